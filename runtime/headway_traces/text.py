"""A trace file as its lines of text, one by one: however long it is, only the one under way is held."""

from collections.abc import Generator
from pathlib import Path

from headway_traces.line import TraceFileError


def text_lines(path: Path, called: str) -> Generator[str, None, None]:
    """With their ends. Raises TraceFileError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{called} cannot be read: {error}") from error
