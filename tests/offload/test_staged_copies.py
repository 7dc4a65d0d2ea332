"""Copies of a GPU pass through two halves of memory that nobody takes before who had it last is done.

Streams are imagined: what they are given is done at once, and who waits for whom is written down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway_runtime import memory
from headway_runtime.memory import NUM_HALVES, staging_bytes
from headway_runtime.offload.host_blocks import HostBlocks
from headway_runtime.offload.staged_copies import StagedCopies

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 3, 20, 16


@dataclass
class Clock:
    """Of all streams: what each has been given last, in order. known: of each, what it has waited for."""

    now: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


class Event:
    def __init__(self, enable_timing: bool = False) -> None:  # noqa: FBT001 - PyTorch's
        self.at = -1
        self.known: dict[str, int] = {}

    def record(self, stream: "Stream") -> None:
        self.at = stream.clock.tick()
        self.known = {**stream.known, stream.name: self.at}

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


@dataclass
class Stream:
    """known: up to which moment of each stream this one has waited."""

    name: str
    clock: Clock
    known: dict[str, int] = field(default_factory=dict)

    def wait_event(self, event: Event) -> None:
        for name, at in event.known.items():
            self.known[name] = max(at, self.known.get(name, -1))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """All is done."""


class Device:
    """Notes who touches which half, and finds whoever does not wait for who had it before."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.main, self.side = Stream("main", self.clock), Stream("side", self.clock)
        self.current = self.main
        self.last: dict[int, tuple[str, int]] = {}
        self.num_touches = 0

    def touch(self, half: int) -> None:
        self.num_touches += 1
        name, at = self.last.get(half, (self.current.name, -1))
        if name != self.current.name:
            assert self.current.known.get(name, -1) >= at, f"{self.current.name} does not wait for {name}"
        self.last[half] = (self.current.name, self.clock.tick())

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: found.side)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.main)
    monkeypatch.setattr(torch.cuda, "stream", found.using)
    monkeypatch.setattr(memory, "MOST_STAGED_BLOCKS", 4)
    return found


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the device of operators that read or write a half."""

    def __init__(self, device: Device, halves: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._halves = device, halves

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "copy" in func.__name__ or "index" in func.__name__:
            for one in (*args, *kwargs.values()):
                if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in self._halves:
                    self._device.touch(self._halves[one.untyped_storage().data_ptr()])
        return func(*args, **kwargs)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("layer_bytes", [48, 20, 7], ids=["by eight", "by four", "odd"])
def test_blocks_go_out_and_come_in_whatever_their_number(layer_bytes: int, device: Device) -> None:
    data, slots = (
        random_bytes(NUM_LAYERS, NUM_BLOCKS, layer_bytes),
        random_bytes(NUM_SLOTS, NUM_LAYERS, layer_bytes),
    )
    want_data, want_slots = data.clone(), slots.clone()
    copies = StagedCopies(data, slots)
    halves = {half.blocks.untyped_storage().data_ptr(): index for index, half in enumerate(copies._halves)}
    assert sum(half.blocks.nbytes for half in copies._halves) == staging_bytes(NUM_LAYERS * layer_bytes)
    assert len(halves) == NUM_HALVES

    with Watched(device, halves):
        for turn in range(3):
            stores = [(3 + turn + index, (5 * index) % NUM_SLOTS) for index in range(10)]
            # Some of what has just gone out comes in elsewhere.
            loads = [((5 * index) % NUM_SLOTS, 19 - index) for index in range(7)]
            seconds = copies.copy(stores, loads)
            for block, slot in stores:
                want_slots[slot] = want_data[:, block]
            for slot, block in loads:
                want_data[:, block] = want_slots[slot]
            assert torch.equal(slots, want_slots)
            assert torch.equal(data, want_data)
            assert min(seconds) > 0
    # Of each part one gather or scatter, and one copy of each block.
    assert device.num_touches == 3 * (3 + 10 + 2 + 7)


def test_whoever_does_not_wait_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    data, slots = random_bytes(NUM_LAYERS, NUM_BLOCKS, 48), random_bytes(NUM_SLOTS, NUM_LAYERS, 48)
    copies = StagedCopies(data, slots)
    halves = {half.blocks.untyped_storage().data_ptr(): index for index, half in enumerate(copies._halves)}
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)

    with Watched(device, halves), pytest.raises(AssertionError, match="side does not wait for main"):
        copies.copy([(1, 1)], [])


@pytest.mark.parametrize("can_wait", [True, False])
def test_a_device_that_may_wait_for_good_is_not_waited_for_at_the_end(
    device: Device, monkeypatch: pytest.MonkeyPatch, *, can_wait: bool
) -> None:
    """Copies out wait for the step, which may wait for a rank that is lost."""
    done: list[str] = []
    blocks = HostBlocks(random_bytes(NUM_LAYERS, NUM_BLOCKS, 48), NUM_SLOTS * NUM_LAYERS * 48)
    blocks._staged = StagedCopies(blocks._data, blocks._slots)
    blocks._pinned = cast(
        "Any", SimpleNamespace(close=lambda: done.append("closed"), leave=lambda: done.append("left"))
    )
    monkeypatch.setattr(Stream, "synchronize", lambda self: done.append("waited"))

    blocks.close(can_wait=can_wait)

    assert done == (["waited", "closed"] if can_wait else ["left"])
