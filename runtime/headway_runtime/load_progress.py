"""How far a checkpoint has been read, or fetched: a bar on a terminal, else a log line every few seconds.

Counts bytes and files as they are told; reads nothing itself. A model that loads faster than the first line
is due gets one line in all, when it is done.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Words:
    """What is said. done: with places for GB, files, their plural's end, and seconds."""

    bar: str
    under_way: str
    done: str


READING = Words("Reading weights", "reading weights", "read %.3f GB of weights from %d file%s in %.2f s")


class _Bar(Protocol):
    total: float | None

    def refresh(self) -> object: ...
    def update(self, n: float) -> object: ...
    def set_postfix_str(self, s: str) -> object: ...
    def close(self) -> object: ...


class LoadProgress:
    """The progress of one checkpoint. clock: seconds. has_terminal: whether somebody watches stderr."""

    def __init__(
        self,
        num_bytes: int,
        num_files: int,
        *,
        words: Words = READING,
        has_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_bytes, self._num_files = num_bytes, num_files
        self._bytes_read = self._files_read = 0
        self._words = words
        self._clock = clock
        self._began_at = self._logged_at = clock()
        self._bar: _Bar | None = None
        if sys.stderr.isatty() if has_terminal is None else has_terminal:
            # Not imported where no bar is drawn: it takes some of the time that a small model loads in.
            import tqdm

            self._bar = tqdm.tqdm(
                total=num_bytes,
                desc=words.bar,
                unit="B",
                unit_scale=True,
                leave=False,
                file=sys.stderr,
            )

    def expect_more(self, num_bytes: int, num_files: int) -> None:
        """There is more of it than was known."""
        self._num_bytes += num_bytes
        self._num_files += num_files
        if self._bar is not None:
            self._bar.total = self._num_bytes
            self._bar.refresh()

    def tensor_read(self, num_bytes: int) -> None:
        """One more tensor, of so many bytes in its file."""
        num_bytes = min(num_bytes, self._num_bytes - self._bytes_read)
        self._bytes_read += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
            return
        now = self._clock()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            logger.info(
                "%s: %.2f of %.2f GB, %d of %d files",
                self._words.under_way,
                self._bytes_read / 1e9,
                self._num_bytes / 1e9,
                self._files_read,
                self._num_files,
            )

    def file_read(self) -> None:
        """Nothing more is wanted of one of the files."""
        self._files_read += 1
        if self._bar is not None:
            self._bar.set_postfix_str(f"file {self._files_read} of {self._num_files}")

    def close(self) -> None:
        """All is read."""
        if self._bar is not None:
            self._bar.close()
        seconds = self._clock() - self._began_at
        logger.info(
            self._words.done,
            self._num_bytes / 1e9,
            self._num_files,
            "" if self._num_files == 1 else "s",
            seconds,
        )
