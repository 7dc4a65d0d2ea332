"""What safetensors files say of their tensors at their beginning: names, types and sizes, no numbers."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_runtime.checkpoint_files import LENGTH_BYTES, LONGEST_HEADER, checkpoint_files
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
    """None where the weights are not there. ModelLoadError for files that cannot be read."""
    if not any(folder.glob("*.safetensors")):
        return None
    paths = checkpoint_files(folder)
    plain: set[str] = set()
    num_bytes = 0
    for path in paths:
        for name, tensor in read_header(path).items():
            if name == "__metadata__":
                continue
            try:
                start, end = tensor["data_offsets"]
                dtype = tensor["dtype"]
            except (TypeError, KeyError, ValueError) as error:
                raise _unreadable(path, error) from error
            num_bytes += int(end) - int(start)
            if name.endswith(WEIGHT) and dtype in PLAIN_DTYPES:
                plain.add(name.removesuffix(WEIGHT))
    return Headers(len(paths), num_bytes, frozenset(plain))


def read_header(path: Path) -> dict[str, Any]:
    """All of it, as it stands there. ModelLoadError for a file that cannot be read."""
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
    return header


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path}: cannot be read ({error!r}); copy the checkpoint again")
