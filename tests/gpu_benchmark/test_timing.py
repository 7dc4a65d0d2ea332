"""How calls are timed on a GPU that is not there: captured in a graph, or flushed where that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu import timing
from benchmarks.gpu.compile_ahead import Helpers, Launch

L2_BYTES = 50 * 2**20


class FakeGpu:
    """A clock that calls move: 100 us each, those of a replayed graph 20 us and the whole 10 us more."""

    def __init__(self, *, can_capture: bool) -> None:
        self.seconds, self.can_capture, self.is_capturing = 0.0, can_capture, False
        self.num_captured = self.num_replays = self.num_flushes = 0

    def call(self) -> None:
        if self.is_capturing:
            self.num_captured += 1
        else:
            self.seconds += 100e-6

    @contextmanager
    def graph(self, _: object) -> Iterator[None]:
        if not self.can_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.is_capturing = True
        yield
        self.is_capturing = False

    def replay(self) -> None:
        self.num_replays += 1
        self.seconds += self.num_captured * 20e-6 + 10e-6

    def empty(self, size: int, **_: object) -> SimpleNamespace:
        assert size == timing.L2_TIMES * L2_BYTES

        def zero() -> None:
            self.num_flushes += 1
            self.seconds += 70e-6

        return SimpleNamespace(zero_=zero)

    def event(self, **_: object) -> SimpleNamespace:
        own = SimpleNamespace(at=0.0)
        own.record = lambda: setattr(own, "at", self.seconds)
        own.elapsed_time = lambda other: (other.at - own.at) * 1e3
        return own


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], FakeGpu]:
    def make(can_capture: bool) -> FakeGpu:  # noqa: FBT001
        gpu = FakeGpu(can_capture=can_capture)
        nothing = lambda *_: None  # noqa: E731
        monkeypatch.setattr(torch.cuda, "synchronize", nothing)
        monkeypatch.setattr(torch.cuda, "Event", gpu.event)
        monkeypatch.setattr(torch.cuda, "graph", gpu.graph)
        graph = SimpleNamespace(replay=gpu.replay, reset=nothing)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        properties = SimpleNamespace(L2_cache_size=L2_BYTES)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch, "empty", gpu.empty)
        return gpu

    return make


def test_calls_are_timed_as_replays_of_a_graph_that_is_long_enough(
    make_gpu: Callable[[bool], FakeGpu],
) -> None:
    gpu = make_gpu(True)

    found = timing.timed([gpu.call, gpu.call], "cuda")

    # 500 us of calls that take 100 us by themselves, in whole rounds of the two.
    assert gpu.num_captured == 6
    assert found.microseconds == pytest.approx(20 + 10 / 6)
    assert found.is_captured
    assert found.spread == pytest.approx(0.0, abs=1e-9)
    assert timing.LEAST_REPLAYS <= gpu.num_replays <= timing.MOST_REPLAYS + 2


def test_what_cannot_be_captured_is_timed_after_the_cache_is_flushed(
    make_gpu: Callable[[bool], FakeGpu],
) -> None:
    gpu = make_gpu(False)

    found = timing.timed([gpu.call], "cuda")

    assert found.microseconds == pytest.approx(100.0)
    assert not found.is_captured
    assert gpu.num_flushes == timing.TIMES


@pytest.mark.parametrize(
    ("num_bytes", "want"), [(1.0, timing.MOST_SETS), (L2_BYTES, 3), (L2_BYTES * 0.8, 4), (1e9, 1)]
)
def test_inputs_in_turn_exceed_the_cache_three_times(
    num_bytes: float, want: int, make_gpu: Callable[[bool], FakeGpu]
) -> None:
    make_gpu(True)

    assert timing.num_sets(num_bytes, "cuda") == want
    assert timing.num_sets(num_bytes, "cpu") == 1


def test_helpers_say_what_could_not_be_launched_and_end() -> None:
    """Here there is no GPU."""
    launch = Launch("timed", "add and norm, 1 x 4096")
    tried = Launch("timed", "add and norm, 1 x 4096", {"num_warps": 2})
    with Helpers(1) as helpers:
        assert helpers.compile([launch, tried], seconds=100.0) == {"launched": 0, "failed": 2, "left": 0}
        assert helpers.compile([launch], seconds=0.0) == {"launched": 0, "failed": 0, "left": 1}
    with Helpers(0) as helpers:
        assert helpers.compile([launch], seconds=1.0) == {"launched": 0, "failed": 0, "left": 1}
