"""A trace file as its lines of text, one by one: however long it is, only the one under way is held.

Files that gzip packed are unpacked on the way, whatever their names.
"""

import gzip
import zlib
from collections.abc import Generator
from io import TextIOWrapper
from pathlib import Path

from headway_traces.line import TraceFileError

GZIP_BEGIN = b"\x1f\x8b"


def text_lines(path: Path, called: str) -> Generator[str, None, None]:
    """With their ends. Raises TraceFileError."""
    try:
        with path.open("rb") as file:
            # A pipe can be looked into, not rewound.
            is_packed = file.peek(len(GZIP_BEGIN)).startswith(GZIP_BEGIN)
            plain = gzip.GzipFile(fileobj=file) if is_packed else file
            with TextIOWrapper(plain, encoding="utf-8-sig", newline="") as text:
                yield from text
    except UnicodeDecodeError as error:
        raise TraceFileError(
            f"{called} is no UTF-8 text: it has byte 0x{error.object[error.start]:02x}; unpack it, if "
            "anything but gzip packed it, or write it as UTF-8"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceFileError(
            f"{called} is packed by gzip, and broken: {error}; give it whole, or unpacked"
        ) from error
    except IsADirectoryError as error:
        raise TraceFileError(f"{called} cannot be read: it is a folder; give a file") from error
    except OSError as error:
        raise TraceFileError(
            f"{called} cannot be read: {error.strerror or error}; check the path, and who may read it"
        ) from error
