"""One block's contents in one file: a header that says what it is, then the bytes. No index, no limits.

A file appears under its name only when it is complete; what was cut short by a crash is found out by length
and checksum when it is read. The checksum guards against accidents; a folder that others may write to is not
what it is for.
"""

import contextlib
import os
import struct
import zlib
from pathlib import Path

# Magic and version; the block's key; length and CRC-32 of what follows.
_HEADER = struct.Struct("<8s32sQI")
_MAGIC = b"HDWYKV\x00\x01"
TEMPORARY_SUFFIX = ".part"
HEADER_BYTES = _HEADER.size


class DamagedFileError(Exception):
    """A file does not hold what its name says."""


def write_block(path: Path, key: bytes, contents: memoryview) -> None:
    """OSError if the disk does not take it; then nothing of it is left."""
    header = _HEADER.pack(_MAGIC, key, len(contents), zlib.crc32(contents, zlib.crc32(key)))
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        # What it was computed from can be guessed at by whoever reads it.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(header), contents):
                _write_all(file.fileno(), part)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_block(path: Path, key: bytes, into: memoryview) -> None:
    """Fill `into`. DamagedFileError, with `into` in an unknown state; OSError if there is no such file."""
    header = bytearray(HEADER_BYTES)
    with path.open("rb", buffering=0) as file:
        if not _read_all(file.fileno(), memoryview(header)):
            raise DamagedFileError("it ends within its header")
        magic, own_key, length, checksum = _HEADER.unpack(header)
        if (magic, own_key, length) != (_MAGIC, key, len(into)):
            raise DamagedFileError("its header is of another block, or of another format")
        if not _read_all(file.fileno(), into) or os.read(file.fileno(), 1):
            raise DamagedFileError("it is shorter or longer than its header says")
    if zlib.crc32(into, zlib.crc32(key)) != checksum:
        raise DamagedFileError("its checksum is not that of its contents")


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _read_all(descriptor: int, into: memoryview) -> bool:
    """False where the file ends before it is full."""
    while into:
        count = os.readv(descriptor, [into])
        if count == 0:
            return False
        into = into[count:]
    return True
