"""The slots of host memory, and the copies between them and the KV cache's blocks.

A slot holds all of one block: of each layer in turn, its bytes. On a CPU a copy is a copy. On a GPU the slots
are pinned, and what crosses the bus does so on a stream of its own: blocks that go out are first gathered on
the device, in a moment, so that the step may write them; blocks that come in are awaited by the step. Knows
no keys.
"""

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.errors import ConfigError
from headway_runtime.offload.host_memory import PinnedMemory, lazy_memory

# Blocks of one gather on the device, which takes memory for them.
GATHERED_AT_ONCE = 32

Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """data: the KV cache's, bytes [layers, blocks, bytes of a block]."""

    def __init__(self, data: Tensor, memory_bytes: int) -> None:
        """ConfigError where the memory is not to be had, or holds no block."""
        self._data = data
        num_layers, _, layer_bytes = data.shape
        self.slot_bytes = num_layers * layer_bytes
        self.num_slots = memory_bytes // self.slot_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"--kv-offloading-size={memory_bytes / 2**30:g}: {memory_bytes} bytes hold no block, which "
                f"takes {self.slot_bytes}; give more, or leave it out"
            )
        self._is_cuda = data.device.type == "cuda"
        num_bytes = self.num_slots * self.slot_bytes
        self._pinned = PinnedMemory(num_bytes, data.device) if self._is_cuda else None
        memory = lazy_memory(num_bytes) if self._pinned is None else self._pinned.bytes
        self._slots = memory.view(self.num_slots, num_layers, layer_bytes)
        self._stream = torch.cuda.Stream(data.device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        # Copies whose time is not known yet: which way, begin and end.
        self._timed: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def copy(self, stores: Pairs, loads: Pairs) -> tuple[float, float]:
        """Copy pairs of block and slot out, then pairs of slot and block in; what a step does next sees both.

        Returns the seconds that copies out and in took, on a GPU of those that were found to have ended.
        """
        if self._is_cuda:
            return self._copy_cuda(stores, loads)
        started_at = time.monotonic()
        for block, slot in stores:
            self._slots[slot].copy_(self._data[:, block])
        stored_at = time.monotonic()
        for slot, block in loads:
            self._data[:, block].copy_(self._slots[slot])
        return stored_at - started_at, time.monotonic() - stored_at

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, to be read and written."""
        address = self._slots.data_ptr() + slot * self.slot_bytes
        return memoryview((ctypes.c_char * self.slot_bytes).from_address(address)).cast("B")

    def settle(self) -> None:
        """Wait until all copies that were begun are done. From any thread."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Have no memory pinned any more. Nothing may be copied afterwards."""
        if self._pinned is not None:
            with contextlib.suppress(RuntimeError):  # of a device that does not work any more
                self.settle()
            self._pinned.close()

    def _copy_cuda(self, stores: Pairs, loads: Pairs) -> tuple[float, float]:
        assert self._stream is not None
        main = torch.cuda.current_stream(self._data.device)
        for start in range(0, len(stores), GATHERED_AT_ONCE):
            part = stores[start : start + GATHERED_AT_ONCE]
            index = transfers.sent_integers((block for block, _ in part), self._data.device)
            gathered = self._data.index_select(1, index).transpose(0, 1).contiguous()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream), self._timing("store"):
                for row, (_, slot) in enumerate(part):
                    self._slots[slot].copy_(gathered[row], non_blocking=True)
            gathered.record_stream(self._stream)
        for start in range(0, len(loads), GATHERED_AT_ONCE):
            part = loads[start : start + GATHERED_AT_ONCE]
            with torch.cuda.stream(self._stream), self._timing("load"):
                shape = (len(part), *self._slots.shape[1:])
                gathered = torch.empty(shape, dtype=torch.uint8, device=self._data.device)
                for row, (slot, _) in enumerate(part):
                    gathered[row].copy_(self._slots[slot], non_blocking=True)
            main.wait_stream(self._stream)
            index = transfers.sent_integers((block for _, block in part), self._data.device)
            self._data.index_copy_(1, index, gathered.transpose(0, 1))
            gathered.record_stream(main)
        return self._known_seconds()

    @contextlib.contextmanager
    def _timing(self, which: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self._stream)
        yield
        end.record(self._stream)
        self._timed.append((which, begin, end))

    def _known_seconds(self) -> tuple[float, float]:
        seconds = {"store": 0.0, "load": 0.0}
        while self._timed and self._timed[0][2].query():  # type: ignore[no-untyped-call]
            which, begin, end = self._timed.popleft()
            seconds[which] += begin.elapsed_time(end) / 1e3
        return seconds["store"], seconds["load"]
