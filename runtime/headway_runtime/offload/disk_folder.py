"""The files of a folder that blocks are kept in: which there are, how much they take, which go first.

Owns names, sizes and their order by last use, of the own blocks and of those that engines with other weights
or types left behind: all count against one limit, and the longest unused go first, whosever they are. Files
that do not look like blocks are never touched. Safe to use from two threads; unlinking is left to the caller.
"""

import contextlib
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

from headway_runtime.errors import ConfigError
from headway_runtime.offload.block_file import TEMPORARY_SUFFIX
from headway_runtime.offload.counters import TierCounters

_BLOCK_NAME = re.compile(r"headway-kv-[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}\.kv")
# What a crash left behind; nobody writes one file for so long.
OLDEST_TEMPORARY_SECONDS = 600.0
# Files take whole pages of a disk.
PAGE_BYTES = 4096


class DiskFolder:
    """path: as the user gave it. folder: the own blocks' part of it, by name."""

    def __init__(self, path: Path, limit_bytes: int, counters: TierCounters) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._counters = counters
        counters.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._folder: str | None = None
        # By name below path, the longest unused first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_own = self._num_bytes = 0

    def open(self, folder: str) -> None:
        """Find what earlier engines left. OSError if the folder cannot be read."""
        (self._path / folder).mkdir(mode=0o700, exist_ok=True)
        found = sorted(self._scan())
        with self._lock:
            self._folder = folder
            for _, name, size in found:
                self._note(name, size)

    def path_of(self, key: bytes) -> Path:
        return self._path / self._name(key)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._folder is not None and self._name(key) in self._sizes

    def add(self, key: bytes, size: int) -> None:
        """There is a file for `key` now."""
        with self._lock:
            self._note(self._name(key), size)

    def touch(self, key: bytes) -> None:
        """A file was used."""
        with self._lock:
            name = self._name(key)
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):  # it is only its place in the next engine's order
            os.utime(self._path / name)

    def drop(self, key: bytes) -> Path:
        """A file is to count no more; it is the caller's to unlink."""
        with self._lock:
            name = self._name(key)
            self._forget(name)
            return self._path / name

    def drop_for(self, num_bytes: int) -> list[Path] | None:
        """Make room for so much: the files to unlink, the longest unused. None: there may not be so much."""
        num_bytes = _on_disk(num_bytes)
        if num_bytes > self._limit_bytes:
            return None
        dropped = []
        with self._lock:
            while self._num_bytes + num_bytes > self._limit_bytes:
                name = next(iter(self._sizes))
                dropped.append(self._path / name)
                self._forget(name)
                self._counters.evicted_blocks += 1
        return dropped

    def drop_own(self) -> list[Path]:
        """Forget the own blocks; the files to unlink."""
        with self._lock:
            own = [name for name in self._sizes if self._is_own(name)]
            for name in own:
                self._forget(name)
        return [self._path / name for name in own]

    def _scan(self) -> list[tuple[float, str, int]]:
        """Time of last use, name and size of each block; remove what a crash left half written."""
        found = []
        stale_before = time.time() - OLDEST_TEMPORARY_SECONDS
        for path in self._path.glob("headway-kv-*/??/*"):
            try:
                status = path.stat()
                name = path.relative_to(self._path).as_posix()
                if _BLOCK_NAME.fullmatch(name):
                    found.append((status.st_mtime, name, status.st_size))
                elif name.endswith(TEMPORARY_SUFFIX) and status.st_mtime < stale_before:
                    path.unlink()
            except FileNotFoundError:
                continue  # another engine's, and gone meanwhile
        return found

    def _name(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self._folder}/{digits[:2]}/{digits}.kv"

    def _is_own(self, name: str) -> bool:
        return self._folder is not None and name.startswith(self._folder)

    def _note(self, name: str, size: int) -> None:
        self._forget(name)
        size = _on_disk(size)
        self._sizes[name] = size
        self._num_bytes += size
        self._num_own += self._is_own(name)
        self._count()

    def _forget(self, name: str) -> None:
        size = self._sizes.pop(name, None)
        if size is not None:
            self._num_bytes -= size
            self._num_own -= self._is_own(name)
            self._count()

    def _count(self) -> None:
        self._counters.held_blocks, self._counters.held_bytes = self._num_own, self._num_bytes


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def check_folder(path: Path) -> None:
    """Make the folder if need be. ConfigError if files cannot be written there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--kv-offloading-disk-path={str(path)!r}: files cannot be written there ({error.strerror}); "
            "name a folder that may be made or written to"
        ) from error
