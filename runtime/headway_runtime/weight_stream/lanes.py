"""Threads that bring pieces of files to a device: each reads into two buffers in turn, and copies them on.

While one buffer is copied, the next piece is read into the other, so that of a thread's reads and copies the
longer ones alone take time. Threads read side by side: one alone copies out of the page cache at a fraction
of what the bus to a GPU takes, and a disk wants several reads to be waiting.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_BYTES = 8 << 20
NUM_THREADS = 8
Bytes = NDArray[numpy.uint8]


class Ordering(Protocol):
    """A point in a device's work; `torch.cuda.Event` is one."""

    def wait(self) -> None:
        """Have the current stream go on only behind that point."""


class Lane(Protocol):
    """One thread's way to the device."""

    def buffer(self) -> Bytes:
        """Memory to read the next piece into; waits for it if it is still being copied from."""

    def send(self, piece: Bytes, target: Tensor, after: Ordering | None) -> Ordering | None:
        """Copy what was read into that memory to `target` (uint8, on the device), behind `after`.

        Returns at once; what it gives back is the point behind the copy.
        """


class CudaLane:
    """Two buffers of pinned memory and a stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # Who waits for these leaves the processor to the threads that read.
        self._copied = [
            torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._turn = 0

    def buffer(self) -> Bytes:
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        numbers: Bytes = self._buffers[self._turn].numpy()
        return numbers

    def send(self, piece: Bytes, target: Tensor, after: Ordering | None) -> Ordering | None:
        source = self._buffers[self._turn][: piece.size]
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            target.copy_(source, non_blocking=True)
            self._copied[self._turn].record()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return done


def release_pinned_memory() -> None:
    """Give back what buffers were in; PyTorch would keep it for later ones. Not all versions can."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file from `offset` on: `rows` runs of `run_bytes`, whose beginnings are `stride` apart."""

    descriptor: int
    offset: int
    rows: int
    run_bytes: int
    stride: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.run_bytes

    def read_into(self, memory: Bytes) -> None:
        """OSError, also for a file that has become shorter."""
        if self.rows == 1 or self.run_bytes == self.stride:
            _read_all(self.descriptor, memory.data, self.offset)
            return
        # Runs are short; only the pages that they lie in are read.
        first = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        last = self.offset + (self.rows - 1) * self.stride + self.run_bytes
        if os.fstat(self.descriptor).st_size < last:
            raise OSError(f"it ends before byte {last}")
        with mmap.mmap(self.descriptor, last - first, access=mmap.ACCESS_READ, offset=first) as pages:
            runs = numpy.ndarray(
                (self.rows, self.run_bytes),
                numpy.uint8,
                buffer=pages,
                offset=self.offset - first,
                strides=(self.stride, 1),
            )
            numpy.copyto(memory.reshape(self.rows, self.run_bytes), runs)
            del runs  # pages are not let go of while somebody looks at them


def _read_all(descriptor: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            raise OSError(f"it ends at byte {offset + done}")
        done += count


class Lanes:
    """The threads. make_lane: called on each of them. closed: called once they have ended."""

    def __init__(
        self,
        make_lane: Callable[[], Lane],
        num_threads: int = NUM_THREADS,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_lane, self._closed = make_lane, closed
        self._own = threading.local()
        self._lock = threading.Lock()
        self.read_seconds = self.copy_seconds = 0.0
        self._threads = ThreadPoolExecutor(num_threads, "headway-weights")

    def move(self, piece: Piece, target: Tensor, after: Ordering | None) -> "Future[Ordering | None]":
        """Bring a piece to `target`; the result is the point behind its copy."""
        return self._threads.submit(self._moved, piece, target, after)

    def _moved(self, piece: Piece, target: Tensor, after: Ordering | None) -> Ordering | None:
        with torch.inference_mode():
            lane: Lane | None = getattr(self._own, "lane", None)
            if lane is None:
                lane = self._own.lane = self._make_lane()
            began_at = time.monotonic()
            memory = lane.buffer()[: piece.num_bytes]
            free_at = time.monotonic()
            piece.read_into(memory)
            read_at = time.monotonic()
            done = lane.send(memory, target, after)
            sent_at = time.monotonic()
        with self._lock:
            self.read_seconds += read_at - free_at
            self.copy_seconds += free_at - began_at + sent_at - read_at
        return done

    def close(self) -> None:
        """Waits for what is under way; what has not begun is left."""
        self._threads.shutdown(cancel_futures=True)
        self._closed()
