"""Blocks on a local disk: what is in host memory is copied there, and comes back from there.

Two threads do all that touches files, so that no step ever waits for a disk: one reads, which requests wait
for, the other one writes, in the order in which it was asked to, and lets others go first. What is written
is read from the slot of host memory that holds it, which is not given up meanwhile; a slot that is given up
before its turn is not written. What is read goes straight into a slot, and is reported by `completed`.

Whatever is wrong with a file is a miss: a damaged one is deleted. A disk that does not take a file (it is
full, or read-only) switches writing off, with one warning; reading goes on.
"""

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from headway_runtime.offload.block_file import HEADER_BYTES, DamagedFileError, read_block, write_block
from headway_runtime.offload.counters import OffloadCounters
from headway_runtime.offload.disk_folder import DiskFolder

logger = logging.getLogger(__name__)

# The latest read's part in what a read is taken to last.
SMOOTHING = 0.2
CLOSING_SECONDS = 5.0
# Steps that take all processors leave a thread of this one a tenth of one.
WRITER_NICENESS = 10


class HostMemory(Protocol):
    """The slots."""

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, to be read and written."""

    def settle(self) -> None:
        """Wait until copies between slots and the KV cache that were begun are done."""


@dataclass(frozen=True, slots=True)
class Read:
    """is_good: whether the slot holds what `key` names; else its contents are unknown."""

    key: bytes
    slot: int
    is_good: bool


class DiskTier:
    """name_folder: finds the name of the own blocks' folder; called on a thread, and may take long."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        name_folder: Callable[[], str],
        memory: HostMemory,
        counters: OffloadCounters,
    ) -> None:
        self._folder = DiskFolder(path, limit_bytes, counters.disk)
        self._name_folder = name_folder
        self._memory = memory
        self._counters = counters
        # Guards all below.
        self._changed = threading.Condition()
        self._is_open = self._is_closing = False
        self._is_writable = True
        # Things that are being done.
        self._num_busy = 0
        self._reads: deque[tuple[bytes, int, int]] = deque()
        self._writes: OrderedDict[int, bytes] = OrderedDict()
        # The slot that is being written from.
        self._busy_slot: int | None = None
        self._to_unlink: list[Path] = []
        self._done: list[Read] = []
        # Of what was begun before the last reset, nothing counts.
        self._epoch = 0
        self._seconds_per_read: float | None = None
        self._reader = threading.Thread(target=self._run_reader, name="headway-kv-read", daemon=True)
        self._writer = threading.Thread(target=self._run_writer, name="headway-kv-write", daemon=True)
        self._reader.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._folder

    def write(self, key: bytes, slot: int) -> None:
        """Copy a slot's contents to the disk, some time."""
        if key in self._folder:
            return
        with self._changed:
            if self._is_writable:
                self._writes[slot] = key
                self._changed.notify_all()

    def read(self, key: bytes, slot: int) -> None:
        """Fill a slot from the disk; `completed` will tell of it."""
        with self._changed:
            self._reads.append((key, slot, self._epoch))
            self._changed.notify_all()

    def let_go(self, slot: int) -> bool:
        """Whether a slot may be filled with something else: not while it is being written."""
        with self._changed:
            if slot == self._busy_slot:
                return False
            if self._writes.pop(slot, None) is not None:
                self._counters.unwritten_blocks += 1
            return True

    def completed(self) -> list[Read]:
        """Reads that are done since the last call."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> None:
        """Until a read is done, at most so long."""
        with self._changed:
            if not self._done:
                self._changed.wait(seconds)

    def seconds_to_read(self, count: int) -> float | None:
        """What so many more reads would take; None before the first one."""
        with self._changed:
            if self._seconds_per_read is None:
                return None
            return (len(self._reads) + count) * self._seconds_per_read

    def forget_slowness(self, share: float) -> None:
        """Believe in faster reads by and by: none that were not tried can show it."""
        with self._changed:
            if self._seconds_per_read is not None:
                self._seconds_per_read *= share

    def reset(self) -> None:
        """Nothing that is on the disk, or on its way, may be found again."""
        with self._changed:
            self._epoch += 1
            self._writes.clear()
            self._done = [Read(one.key, one.slot, is_good=False) for one in self._done]
            self._to_unlink += self._folder.drop_own()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until nothing is left to be done, at most so long; whether that is so."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, seconds)

    def close(self) -> None:
        """Let what is to be written be written, for a while, and end the threads."""
        self.flush(CLOSING_SECONDS)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._reader.join(CLOSING_SECONDS)
        if self._writer.ident is not None:
            self._writer.join(CLOSING_SECONDS)

    def check_integrity(self, slot_of: Callable[[bytes], int | None]) -> None:
        """AssertionError unless each slot that is to be written holds what it is to be written as."""
        with self._changed:
            for slot, key in self._writes.items():
                assert slot_of(key) == slot, f"slot {slot} is to be written and holds something else"

    def _is_idle(self) -> bool:
        has_work = self._reads or self._writes or self._to_unlink or self._num_busy
        return not self._reader.is_alive() or (self._is_open and not has_work)

    def _run_reader(self) -> None:
        started_at = time.monotonic()
        try:
            self._folder.open(self._name_folder())
        except OSError as error:
            logger.warning("KV offload to the disk is off: %s", error)
            self._stop_writing()
            return
        logger.info("KV offload: the disk's folder was opened in %.1f s", time.monotonic() - started_at)
        # A limit that is lower than the one before.
        _unlink(self._folder.drop_for(0) or [])
        with self._changed:
            self._is_open = True
            self._changed.notify_all()
        self._writer.start()
        while (job := self._next_to_read()) is not None:
            job()
            self._finished()

    def _next_to_read(self) -> Callable[[], None] | None:
        """What the reader is to do, waiting for it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._to_unlink or self._reads)
            if self._is_closing:
                return None
            self._num_busy += 1
            if self._to_unlink:
                unlinked, self._to_unlink = self._to_unlink, []
                return partial(_unlink, unlinked)
            return partial(self._read, *self._reads.popleft())

    def _run_writer(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not all systems have it for a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while (job := self._next_to_write()) is not None:
            job()
            self._finished()

    def _next_to_write(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._writes)
            if self._is_closing:
                return None
            slot, key = self._writes.popitem(last=False)
            self._num_busy += 1
            self._busy_slot = slot
            self._changed.notify_all()
            return partial(self._write, slot, key, self._epoch)

    def _finished(self) -> None:
        with self._changed:
            self._num_busy -= 1
            self._changed.notify_all()

    def _read(self, key: bytes, slot: int, epoch: int) -> None:
        is_good = False
        if key in self._folder:
            path = self._folder.path_of(key)
            try:
                into = self._memory.view(slot)
                self._memory.settle()
                started_at = time.monotonic()
                read_block(path, key, into)
            except DamagedFileError as error:
                logger.warning("KV offload: %s is deleted: %s", path, error)
                self._counters.corrupt_blocks += 1
                _unlink([self._folder.drop(key)])
            except OSError:
                # Gone, or not readable: what cannot be used need not stay.
                _unlink([self._folder.drop(key)])
            else:
                is_good = True
                seconds = time.monotonic() - started_at
                self._counters.moved("disk_to_host", 1, len(into), seconds)
                self._folder.touch(key)
        with self._changed:
            if is_good:
                before = self._seconds_per_read
                self._seconds_per_read = (
                    seconds if before is None else before + SMOOTHING * (seconds - before)
                )
            self._done.append(Read(key, slot, is_good and epoch == self._epoch))
            self._changed.notify_all()

    def _write(self, slot: int, key: bytes, epoch: int) -> None:
        started_at = time.monotonic()
        contents = self._memory.view(slot)
        path = self._folder.path_of(key)
        is_written = False
        dropped = self._folder.drop_for(HEADER_BYTES + len(contents))
        if dropped is not None:
            _unlink(dropped)
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._memory.settle()
                write_block(path, key, contents)
                is_written = True
            except OSError as error:
                logger.warning(
                    "KV offload: no more is written to the disk, what is there is still read: %s: %s",
                    path,
                    error,
                )
                self._stop_writing(key)
        if is_written:
            self._counters.moved("host_to_disk", 1, len(contents), time.monotonic() - started_at)
        with self._changed:
            self._busy_slot = None
            if is_written and epoch == self._epoch:
                self._folder.add(key, HEADER_BYTES + len(contents))
            elif is_written:
                self._to_unlink.append(path)

    def _stop_writing(self, *failed: bytes) -> None:
        with self._changed:
            self._is_writable = False
            self._counters.unwritten_blocks += len(self._writes) + len(failed)
            self._writes.clear()


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # another engine was faster
            path.unlink()
