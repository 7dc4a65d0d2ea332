"""Copies between a GPU's KV cache and slots of pinned memory, on a stream of their own.

A block lies in as many pieces as there are layers, a slot in one: both ways blocks pass through memory of the
device in which they lie as in slots. It is allocated once, so that what a step moves takes none that was not
counted (`memory.staging_bytes`). Of two halves one is copied across the bus while the other is gathered, or
scattered. Whoever uses a half next waits on the device for who used it before; so a step that moves more than
both hold is slowed down by the bus, and never by the host.

    out   the step's stream gathers blocks into a half; behind it, the other stream copies it to slots
    in    the other stream copies slots into a half; behind it, the step's stream scatters them

What leaves is gathered before the step, which may then write those blocks; what comes is there before it.
All copies across the bus follow each other, so slots need no other order.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.memory import NUM_HALVES, staged_blocks

Pairs = Sequence[tuple[int, int]]


class _Half:
    """blocks: [blocks, layers, numbers]. used: when who had it last is done; None before anybody had."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.used: torch.cuda.Event | None = None


class StagedCopies:
    """data: the KV cache's, bytes [layers, blocks, of a block]. slots: bytes [slots, layers, of a block]."""

    def __init__(self, data: Tensor, slots: Tensor) -> None:
        self._device = data.device
        # By block; as wide numbers, of which gathering moves one at a time.
        self._blocks, self._slots = _wide(data).transpose(0, 1), _wide(slots)
        num_blocks = staged_blocks(slots[0].nbytes)
        shape = (num_blocks, *self._slots.shape[1:])
        self._halves = deque(
            _Half(torch.empty(shape, dtype=self._slots.dtype, device=data.device)) for _ in range(NUM_HALVES)
        )
        self._num_at_once = num_blocks
        self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        # Whoever had this memory before may not be done with it.
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        # Copies whose time is not known yet: which way, begin and end.
        self._timed: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def copy(self, stores: Pairs, loads: Pairs) -> tuple[float, float]:
        """See `HostBlocks.copy`."""
        main = torch.cuda.current_stream(self._device)
        for start in range(0, len(stores), self._num_at_once):
            self._store(stores[start : start + self._num_at_once], main)
        for start in range(0, len(loads), self._num_at_once):
            self._load(loads[start : start + self._num_at_once], main)
        return self._known_seconds()

    def settle(self) -> None:
        """Wait until all copies that were begun are done. From any thread."""
        self._stream.synchronize()

    def _store(self, part: Pairs, main: torch.cuda.Stream) -> None:
        half = self._next_half()
        index = transfers.sent_integers((block for block, _ in part), self._device)
        if half.used is not None:
            main.wait_event(half.used)
        torch.index_select(self._blocks, 0, index, out=half.blocks[: len(part)])
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream), self._timing("store"):
            for row, (_, slot) in enumerate(part):
                self._slots[slot].copy_(half.blocks[row], non_blocking=True)
        half.used = self._stream.record_event()

    def _load(self, part: Pairs, main: torch.cuda.Stream) -> None:
        half = self._next_half()
        if half.used is not None:
            self._stream.wait_event(half.used)
        with torch.cuda.stream(self._stream), self._timing("load"):
            for row, (slot, _) in enumerate(part):
                half.blocks[row].copy_(self._slots[slot], non_blocking=True)
        main.wait_stream(self._stream)
        index = transfers.sent_integers((block for _, block in part), self._device)
        self._blocks.index_copy_(0, index, half.blocks[: len(part)])
        half.used = main.record_event()

    def _next_half(self) -> _Half:
        self._halves.rotate(1)
        return self._halves[0]

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


def _wide(data: Tensor) -> Tensor:
    """The same bytes as the widest integers that they are whole numbers of, in every piece."""
    sizes = (dtype for dtype in (torch.int64, torch.int32) if data.shape[-1] % dtype.itemsize == 0)
    return data.view(next(sizes, torch.uint8))
