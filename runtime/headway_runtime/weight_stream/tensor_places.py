"""Where tensors lie in safetensors files: the format's own header, checked against the file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway_runtime.checkpoint_files import LENGTH_BYTES, placed_tensors
from headway_runtime.errors import ModelLoadError
from headway_runtime.fit.headers import read_header

# As the format names them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """offset: of the first byte, in the file."""

    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """ModelLoadError for one that PyTorch does not have."""
        if self.dtype_name not in DTYPES:
            raise ModelLoadError(
                f"{self.path}: holds a tensor of {self.dtype_name!r}, which is not read; known are "
                f"{', '.join(DTYPES)}"
            )
        return DTYPES[self.dtype_name]

    @property
    def row_bytes(self) -> int:
        """Of all that one index of the first dimension has."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_places(paths: Sequence[Path], indexed: Mapping[str, Path] | None = None) -> dict[str, TensorPlace]:
    """By name. indexed: the file of each tensor, as an index has it.

    ModelLoadError for a file that is cut, or whose header is not one.
    """
    places: dict[Path, dict[str, TensorPlace]] = {path: {} for path in paths}
    for path in paths:
        header = read_header(path)
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
            for name, told in header.items():
                if name != "__metadata__":
                    places[path][name] = _place(path, told, start, size)
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read ({error!r}); copy the checkpoint again") from error
    return {name: places[path][name] for name, path in placed_tensors(places, indexed or {}).items()}


def _place(path: Path, told: dict[str, Any], start: int, size: int) -> TensorPlace:
    """ValueError for one that does not fit its file."""
    first, last = map(int, told["data_offsets"])
    place = TensorPlace(path, str(told["dtype"]), tuple(map(int, told["shape"])), start + first)
    if first < 0 or start + last > size:
        raise ValueError(f"bytes {first} to {last} of {size - start}")
    if place.dtype_name in DTYPES and place.num_bytes != last - first:
        raise ValueError(f"{last - first} bytes for {place.dtype_name} of shape {place.shape}")
    return place
