"""What weights are read through; and safetensors' own reader, which maps files into memory, for CPUs."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway_runtime.checkpoint_files import placed_tensors
from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.weight_cuts import ALL, Part
from headway_runtime.start_timeline import StartTimeline


class TensorFiles(Protocol):
    """The tensors of some files. Errors name the file."""

    @property
    def places(self) -> Mapping[str, Path]:
        """The file of each tensor, by its name."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def dtype_of(self, name: str) -> str:
        """As safetensors calls it: BF16, F8_E4M3, ..."""

    def read(self, name: str, part: Part = ALL) -> Tensor:
        """The tensor as it lies there, on the device, or that part of it, within its shape."""

    def tell(self, timeline: StartTimeline) -> None:
        """Where the time went since the timeline was told last: all is read, and in its form."""

    def close(self) -> None: ...


class MappedFiles:
    """Whatever is looked at is read then."""

    def __init__(
        self, paths: Sequence[Path], device: torch.device, indexed: Mapping[str, Path] | None = None
    ) -> None:
        """indexed: the file of each tensor, as an index has it."""
        self._stack = ExitStack()
        self._opened = {}
        self._num_bytes = 0
        names = {}
        for path in paths:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            except (OSError, SafetensorError) as error:
                self.close()
                raise ModelLoadError(
                    f"{path}: cannot be read ({error}); copy the checkpoint again"
                ) from error
            self._opened[path] = opened
            names[path] = opened.keys()
        self.places = placed_tensors(names, indexed or {})

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype_of(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def read(self, name: str, part: Part = ALL) -> Tensor:
        tensor: Tensor
        if part.columns is not None:
            tensor = self._slice(name)[:, part.columns.first : part.columns.last]
        elif part.rows is not None:
            rows = slice(part.rows.first, part.rows.last) if len(part.rows) else slice(0)
            tensor = self._slice(name)[rows]
        else:
            tensor = self._opened[self.places[name]].get_tensor(name)
        self._num_bytes += tensor.nbytes
        return tensor

    def tell(self, timeline: StartTimeline) -> None:
        """Reading is what looking at numbers does, so it cannot be told from bringing them into form."""
        timeline.ended("read", self._num_bytes)

    def close(self) -> None:
        self._stack.close()
        self._opened.clear()

    def _slice(self, name: str):  # type: ignore[no-untyped-def]
        return self._opened[self.places[name]].get_slice(name)
