"""Weights by name: read from safetensors files, or made up from a seed. No other format is ever opened.

A model takes each tensor it needs with the shape it expects; `finish` then tells of tensors nobody took. So
a checkpoint that does not fit its config is an error naming the tensor, never a model that talks nonsense.
Weights of linear layers come as they are to be kept: quantized where the checkpoint has them so, or where the
user wants it.
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

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.quantized_weights import QuantizedWeight
from headway_runtime.layers.quantizer import quantized, quantized_as
from headway_runtime.load_progress import LoadProgress
from headway_runtime.models.stored_weights import FLOATS, WEIGHT_NAMES, read_stored
from headway_runtime.quantization.choice import Quantization
from headway_runtime.quantization.scheme import Scheme

# What may be there and is not needed: buffers of old checkpoints, which follow from config.json, and scales
# for a KV cache, which finds its own.
DERIVED_TENSORS = re.compile(
    r"model\.layers\.\d+\.self_attn\.(rotary_emb\.inv_freq|(.*\.)?[qkv]_scale|prob_scale|[kv]_proj\.output_scale)"
)
BIAS = ".bias"
# As safetensors names them.
PLAIN_DTYPES = ("BF16", "F16", "F32")
UNQUANTIZED = Quantization("none")
# As transformers initialises a Llama.
DUMMY_STANDARD_DEVIATION = 0.02


class Weights(Protocol):
    """Where a model gets its tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's arithmetic, and of all tensors that are not quantized."""

    @property
    def adapters(self) -> AdapterBank | None:
        """What products are put into to which LoRA adapters can be added; None if there are to be none."""

    def names(self) -> Set[str]:
        """Of the tensors that are there and not yet taken; none where they are made up as they are taken."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, on the device and in the dtype of the model."""

    def take_linear(self, module: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of the linear layer of that name, as it is to be kept."""

    def put(self, name: str, tensor: Tensor) -> None:
        """A tensor that is a part of one taken, for whoever takes it under this name."""

    def finish(self, unused: Iterable[str] = ()) -> None:
        """All is taken. `unused`: names that may be there although nobody takes them."""


class CheckpointWeights:
    """The safetensors files of one folder, a single one or shards with an index."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.dtype = dtype
        self.adapters = adapters
        self._quantization = quantization
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
        self._all = dict(self._where)

    def names(self) -> Set[str]:
        return self._where.keys() | self._put.keys() if self._put else self._where.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        self._put[name] = tensor

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name in self._put:
            return self._put.pop(name)
        return self.take_stored(name, FLOATS, shape).to(self.dtype)

    def take_linear(self, module: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        kind = self._quantization.of_module(module)
        if isinstance(kind, Scheme) and not self._is_plain(module, kind):
            return read_stored(self, module, outputs, inputs, kind)
        weight = self.take(f"{module}.weight", (outputs, inputs))
        return weight if kind is None or isinstance(kind, Scheme) else quantized(weight, kind)

    def _is_plain(self, module: str, scheme: Scheme) -> bool:
        """Whether plain numbers lie where a scheme is said to apply: tools do not name all exceptions."""
        if scheme.layout != "plain":
            return self.holds(f"{module}.weight") and not self.holds(
                f"{module}.{WEIGHT_NAMES[scheme.layout]}"
            )
        name = f"{module}.weight"
        if name not in self._where:
            return name in self._put
        return self._opened[self._where[name]].get_slice(name).get_dtype() in PLAIN_DTYPES

    def holds(self, name: str) -> bool:
        """Whether a tensor of that name is there and not yet taken."""
        return name in self._where or name in self._put

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor as it lies there, of one of these dtypes and shapes."""
        if name not in self._where:
            raise ModelLoadError(
                f"tensor {name!r} is in no file of the checkpoint; config.json does not fit it"
            )
        tensor: Tensor = self._opened[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(map(repr, shapes))
            raise self.error(name, f"has shape {tuple(tensor.shape)!r}, config.json asks for {wanted}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(
                name, f"is {tensor.dtype}, want {wanted}: config.json's quantization_config does not fit it"
            )
        path = self._where.pop(name)
        self._progress.tensor_read(tensor.nbytes)
        self._left[path] -= 1
        if not self._left[path]:
            self._progress.file_read()
        return tensor

    def error(self, name: str, complaint: str) -> ModelLoadError:
        """About the tensor of that name, which may be taken already."""
        path = self._all.get(name)
        place = "the checkpoint" if path is None else str(path)
        return ModelLoadError(f"{place}: tensor {name!r} {complaint}")

    def finish(self, unused: Iterable[str] = ()) -> None:
        left = sorted(
            name
            for name in self._where.keys() - set(unused)
            if not DERIVED_TENSORS.fullmatch(name) and not self._is_empty_bias(name)
        )
        self._progress.close()
        self._files.close()
        self._opened.clear()
        if left:
            raise ModelLoadError(
                f"{len(left)} tensors of the checkpoint have no place in this model, first {left[0]!r}; "
                "config.json does not fit it"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Quantizers give layers without a bias one of zeros."""
        if self._quantization.stored is None or not name.endswith(BIAS):
            return False
        return not bool(self._opened[self._where[name]].get_tensor(name).any())


class DummyWeights:
    """Random weights that depend on the seed and each tensor's name only; norms are ones."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
        adapters: AdapterBank | None = None,
    ) -> None:
        self._seed = seed
        self.dtype = dtype
        self.adapters = adapters
        self._device = device
        self._quantization = quantization

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        tensor = torch.empty(shape, dtype=self.dtype, device=self._device)
        return tensor.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)

    def take_linear(self, module: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        weight = self.take(f"{module}.weight", (outputs, inputs))
        kind = self._quantization.of_module(module)
        if isinstance(kind, Scheme):
            return quantized_as(weight, kind)
        return weight if kind is None else quantized(weight, kind)

    def names(self) -> Set[str]:
        return frozenset()

    def put(self, name: str, tensor: Tensor) -> None:
        raise AssertionError("only what a checkpoint holds has parts")

    def finish(self, unused: Iterable[str] = ()) -> None:
        """Nothing can be left over."""
