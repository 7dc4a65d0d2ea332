"""How long something takes on a device, with nothing of the host in it.

Kernels are timed as they run in a server: in a CUDA graph, one after the other, each call on inputs of its
own in turn, so many that what was read last time has left the L2 cache. Replays of such a graph are timed
with events; the median counts. What cannot be captured is timed call by call, after the cache was flushed.
On a CPU the host's clock must do; what it says there means nothing.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]

TIMES = 20
# One replay shall be long beside the start of a graph, and all replays together short beside a lease.
LEAST_REPLAY_SECONDS = 0.5e-3
ALL_REPLAYS_SECONDS = 0.1
LEAST_REPLAYS, MOST_REPLAYS = 7, 60
MOST_CALLS = 512
# Of the L2 cache's size, by which inputs in turn together exceed it.
L2_TIMES = 3
MOST_SETS = 8


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call. spread: between the quartiles, over the median. is_captured: whether in a graph."""

    microseconds: float
    spread: float
    is_captured: bool


def milliseconds(work: Call, device: str, times: int = TIMES, warm_up: int = 3) -> float:
    """Median time of `work` on the device, each run timed with events; by the host's clock on a CPU."""
    for _ in range(warm_up):
        work()
    if device == "cpu":
        return statistics.median(_host_seconds(work) for _ in range(times)) * 1e3
    return statistics.median(_event_seconds([work] * times)) * 1e3


def num_sets(num_bytes: float, device: str) -> int:
    """How many sets of inputs of that size are to be used in turn."""
    if device == "cpu":
        return 1
    l2_bytes = torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return max(1, min(MOST_SETS, math.ceil(L2_TIMES * l2_bytes / max(1.0, num_bytes))))


def timed(calls: Sequence[Call], device: str) -> Timing:
    """calls: the same work on one set of inputs each; all are run once before anything is timed."""
    for call in calls:
        call()
    if device == "cpu":
        return _timing([_host_seconds(call) for call in calls], 1, is_captured=False)
    torch.cuda.synchronize()
    estimate = statistics.median(_event_seconds(list(calls) * 2))
    try:
        return _replayed(calls, estimate)
    except RuntimeError:
        # Something in it waits for the device, or asks the driver for memory by itself.
        torch.cuda.synchronize()
        return _timing(_flushed_seconds(calls), 1, is_captured=False)


def _replayed(calls: Sequence[Call], estimate: float) -> Timing:
    """estimate: seconds of a call, which may be mostly the host's."""
    rounds = max(1, math.ceil(LEAST_REPLAY_SECONDS / max(1e-6, estimate) / len(calls)))
    rounds = min(rounds, max(1, MOST_CALLS // len(calls)))
    graph = torch.cuda.CUDAGraph()
    # A collection in between might unload a kernel, which would end the capture.
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
    finally:
        gc.enable()
    graph.replay()
    torch.cuda.synchronize()
    (once,) = _event_seconds([graph.replay])
    replays = max(LEAST_REPLAYS, min(MOST_REPLAYS, int(ALL_REPLAYS_SECONDS / max(1e-6, once))))
    seconds = _event_seconds([graph.replay] * replays)
    graph.reset()
    return _timing(seconds, rounds * len(calls), is_captured=True)


def _flushed_seconds(calls: Sequence[Call]) -> list[float]:
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(L2_TIMES * l2_bytes, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(max(1, TIMES // len(calls))):
        for call in calls:
            flush.zero_()
            found.extend(_event_seconds([call]))
    return found


def _event_seconds(calls: Sequence[Call]) -> list[float]:
    make_event: Any = torch.cuda.Event
    starts, ends = ([make_event(enable_timing=True) for _ in calls] for _ in range(2))
    for call, start, end in zip(calls, starts, ends, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [float(one.elapsed_time(other)) / 1e3 for one, other in zip(starts, ends, strict=True)]


def _host_seconds(call: Call) -> float:
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def _timing(seconds: Sequence[float], calls_of_each: int, *, is_captured: bool) -> Timing:
    median = statistics.median(seconds)
    spread = 0.0
    if len(seconds) > 3:
        first, _, third = statistics.quantiles(seconds, n=4)
        spread = (third - first) / median
    return Timing(median / calls_of_each * 1e6, spread, is_captured)
