"""Weights by name: read from safetensors files, or made up from a seed. No other format is ever opened.

A model takes each tensor it needs with the shape it expects; `finish` then tells of tensors nobody took. So
a checkpoint that does not fit its config is an error naming the tensor, never a model that talks nonsense.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.errors import ModelLoadError
from headway_runtime.load_progress import LoadProgress

# Buffers that old checkpoints carry; they follow from config.json.
DERIVED_TENSORS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# As transformers initialises a Llama.
DUMMY_STANDARD_DEVIATION = 0.02


class Weights(Protocol):
    """Where a model gets its tensors."""

    def names(self) -> Set[str]:
        """Of the tensors that are there and not yet taken; none where they are made up as they are taken."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, on the device and in the dtype of the model."""

    def put(self, name: str, tensor: Tensor) -> None:
        """A tensor that is a part of one taken, for whoever takes it under this name."""

    def finish(self, unused: Iterable[str] = ()) -> None:
        """All is taken. `unused`: names that may be there although nobody takes them."""


class CheckpointWeights:
    """The safetensors files of one folder, a single one or shards with an index."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._files = ExitStack()
        self._where: dict[str, Path] = {}
        self._opened = {}
        self._left: Counter[Path] = Counter()
        self._put: dict[str, Tensor] = {}
        paths = checkpoint_files(folder)
        self._progress = LoadProgress(sum(path.stat().st_size for path in paths), len(paths))
        for path in paths:
            try:
                opened = self._files.enter_context(safe_open(path, framework="pt", device=str(device)))
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(
                    f"{path}: cannot be read ({error}); copy the checkpoint again"
                ) from error
            self._opened[path] = opened
            names = opened.keys()
            self._where.update(dict.fromkeys(names, path))
            self._left[path] = len(names)

    def names(self) -> Set[str]:
        return self._where.keys() | self._put.keys() if self._put else self._where.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        self._put[name] = tensor

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name in self._put:
            return self._put.pop(name)
        path = self._where.pop(name, None)
        if path is None:
            raise ModelLoadError(
                f"tensor {name!r} is in no file of the checkpoint; config.json does not fit it"
            )
        tensor: Tensor = self._opened[path].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)!r}, config.json asks for {shape!r}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelLoadError(
                f"{path}: tensor {name!r} is {tensor.dtype}; quantized weights are not supported"
            )
        self._progress.tensor_read(tensor.nbytes)
        self._left[path] -= 1
        if not self._left[path]:
            self._progress.file_read()
        return tensor.to(self._dtype)

    def finish(self, unused: Iterable[str] = ()) -> None:
        self._progress.close()
        self._files.close()
        self._opened.clear()
        left = sorted(
            name for name in self._where.keys() - set(unused) if not DERIVED_TENSORS.fullmatch(name)
        )
        if left:
            raise ModelLoadError(
                f"{len(left)} tensors of the checkpoint have no place in this model, first {left[0]!r}; "
                "config.json does not fit it"
            )


class DummyWeights:
    """Random weights that depend on the seed and each tensor's name only; norms are ones."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)

    def names(self) -> Set[str]:
        return frozenset()

    def put(self, name: str, tensor: Tensor) -> None:
        raise AssertionError("only what a checkpoint holds has parts")

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Nothing can be left over."""
