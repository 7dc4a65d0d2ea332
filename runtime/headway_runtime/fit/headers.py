"""What safetensors files say of their tensors at their beginning: names, types and sizes, no numbers."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_runtime.checkpoint_files import LENGTH_BYTES, LONGEST_HEADER, checkpoint_files, indexed_tensors
from headway_runtime.errors import ModelLoadError

PLAIN_DTYPES = ("BF16", "F16", "F32")
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Headers:
    """num_bytes: of all tensors. plain_modules: names of those whose `weight` is of plain numbers."""

    num_files: int
    num_bytes: int
    plain_modules: frozenset[str]


def read_headers(folder: Path) -> Headers | None:
    """None where the weights are not there.

    ModelLoadError for files that cannot be read, are shorter than they say, or lack what an index puts there.
    """
    if not any(folder.glob("*.safetensors")):
        return None
    paths = checkpoint_files(folder)
    plain: set[str] = set()
    indexed = indexed_tensors(folder)
    num_bytes = 0
    for path in paths:
        header, end_of_header = _read(path)
        end_of_numbers = 0
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            try:
                start, end = map(int, tensor["data_offsets"])
                dtype = tensor["dtype"]
            except (TypeError, KeyError, ValueError) as error:
                raise _unreadable(path, error) from error
            end_of_numbers = max(end_of_numbers, end)
            num_bytes += end - start
            if name.endswith(WEIGHT) and dtype in PLAIN_DTYPES:
                plain.add(name.removesuffix(WEIGHT))
        _check_size(path, end_of_header, end_of_header + end_of_numbers)
        for name in sorted(name for name, place in indexed.items() if place == path and name not in header):
            raise ModelLoadError(
                f"{path}: has no tensor {name!r}, which the index puts there; copy the checkpoint again"
            )
    return Headers(len(paths), num_bytes, frozenset(plain))


def _check_size(path: Path, end_of_header: int, wanted: int) -> None:
    """ModelLoadError for a file that ends among its numbers. Without any it is but a header, on purpose."""
    size = path.stat().st_size
    if size != end_of_header and size < wanted:
        raise ModelLoadError(
            f"{path}: has {size} bytes where its header tells of {wanted}: it was cut off; copy the "
            "checkpoint again"
        )


def read_header(path: Path) -> dict[str, Any]:
    """All of it, as it stands there. ModelLoadError for a file that cannot be read."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """A header, and where it ends."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise _unreadable(path, error) from error
    if not isinstance(header, dict):
        raise _unreadable(path, ValueError("no object"))
    return header, LENGTH_BYTES + length


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path}: cannot be read ({error!r}); copy the checkpoint again")
