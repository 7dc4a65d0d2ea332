"""The slots of host memory, and the copies between them and the KV cache's blocks.

A slot holds all of one block: of each layer in turn, its bytes. On a CPU a copy is a copy. On a GPU the slots
are pinned, and copies go on beside the step (`staged_copies`). Knows no keys.
"""

import contextlib
import ctypes
import time

from torch import Tensor

from headway_runtime.errors import ConfigError
from headway_runtime.offload.host_memory import PinnedMemory, lazy_memory
from headway_runtime.offload.staged_copies import Pairs, StagedCopies


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
        num_bytes = self.num_slots * self.slot_bytes
        is_cuda = data.device.type == "cuda"
        self._pinned = PinnedMemory(num_bytes, data.device) if is_cuda else None
        memory = lazy_memory(num_bytes) if self._pinned is None else self._pinned.bytes
        self._slots = memory.view(self.num_slots, num_layers, layer_bytes)
        self._staged = StagedCopies(data, self._slots) if is_cuda else None

    def copy(self, stores: Pairs, loads: Pairs) -> tuple[float, float]:
        """Copy pairs of block and slot out, then pairs of slot and block in; what a step does next sees both.

        Returns the seconds that copies out and in took, on a GPU of those that were found to have ended.
        """
        if self._staged is not None:
            return self._staged.copy(stores, loads)
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
        if self._staged is not None:
            self._staged.settle()

    def close(self, *, can_wait: bool = True) -> None:
        """Have no memory pinned any more. Nothing may be copied afterwards.

        can_wait: False where the device may wait for good for what other ranks do not send.
        """
        if self._pinned is None:
            return
        if not can_wait:
            self._pinned.leave()
            return
        with contextlib.suppress(RuntimeError):  # of a device that does not work any more
            self.settle()
        self._pinned.close()
