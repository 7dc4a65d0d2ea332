"""Tells a checkpoint's files apart without reading all of them. Imports no torch.

    whole header + the file's size + SAMPLE_BYTES at NUM_SAMPLES places spread evenly over the file

A file that is no longer than its samples is read whole. Of larger ones some hundred kilobytes are read, which
tells another model, another training or another quantization; not one number that somebody changed.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from headway_runtime.errors import ModelLoadError

NUM_SAMPLES = 128
SAMPLE_BYTES = 4096
# Of a safetensors header, which says how long it is. As long as safetensors itself allows it to be.
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000


def told_checkpoint_file(path: Path) -> str:
    """Size and digest, for people and to be compared. ModelLoadError if it cannot be read."""
    try:
        with path.open("rb") as opened:
            num_bytes = path.stat().st_size
            return f"{num_bytes} bytes, digest {_digest(opened, num_bytes)}"
    except OSError as error:
        raise ModelLoadError(
            f"{path}: cannot be read ({error.strerror}); copy the checkpoint again"
        ) from error


def _digest(opened: BinaryIO, num_bytes: int) -> str:
    found = hashlib.sha256(num_bytes.to_bytes(8))
    if num_bytes <= NUM_SAMPLES * SAMPLE_BYTES:
        found.update(opened.read())
        return found.hexdigest()[:12]
    length = opened.read(_LENGTH_BYTES)
    # Whatever is no header will be told when the file is loaded.
    num_header_bytes = min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES, num_bytes)
    found.update(opened.read(num_header_bytes))
    first, last = opened.tell(), max(opened.tell(), num_bytes - SAMPLE_BYTES)
    for index in range(NUM_SAMPLES):
        opened.seek(first + (last - first) * index // (NUM_SAMPLES - 1))
        found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()[:12]
