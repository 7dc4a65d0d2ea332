"""What a GPU did during some steps, by PyTorch's profiler: how long it computed and how long the host waited.

Only the device's own records are kept, kernel by kernel, also inside of CUDA graphs; they cost the host about
a microsecond a launch, so that steps take as long as without, nearly. The arithmetic is over plain intervals.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.interpreted import num_launches

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
WAITS = "Synchronize"
# Names of libraries' kernels go on for hundreds of letters.
NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class GpuUse:
    """seconds: of the host's clock. busy_seconds: in which anything ran on the device.

    waiting_seconds: in which the host waited for it. num_launches: kernels and copies that ran; of what is
    interpreted, kernels. launches: by name and grid how many there were, and their seconds together, those
    that took longest first.
    """

    seconds: float
    busy_seconds: float
    waiting_seconds: float
    num_launches: int
    launches: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        return max(0.0, 1.0 - self.busy_seconds / self.seconds)

    @property
    def host_seconds(self) -> float:
        """What the host did by itself; while a step runs, it is hidden."""
        return max(0.0, self.seconds - self.waiting_seconds)


def traced(work: Callable[[], object], device: str) -> GpuUse:
    """work: ends when the device has done all of it."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    interpreted = num_launches()
    with profile(activities=[activity]) as profiler:
        began_at = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began_at
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    found = use_of(events, seconds)
    return replace(found, num_launches=found.num_launches + num_launches() - interpreted)


def use_of(events: Sequence[Mapping[str, Any]], seconds: float) -> GpuUse:
    """events: of a Chrome trace, whose times are microseconds."""
    own = [event for event in events if event.get("cat") in DEVICE_WORK and "dur" in event]
    device = [_interval(event) for event in own]
    waits = [
        _interval(event)
        for event in events
        if event.get("cat") in HOST_CALLS and WAITS in str(event.get("name")) and "dur" in event
    ]
    return GpuUse(seconds, covered(device) / 1e6, covered(waits) / 1e6, len(device), _by_name(own))


def _by_name(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """The same kernel of another grid does other work."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        grid = event.get("args", {}).get("grid")
        name = str(event.get("name"))[:NAME_LENGTH] + (f" {grid}" if grid else "")
        count, seconds = found.get(name, (0, 0.0))
        found[name] = (count + 1, seconds + float(event["dur"]) / 1e6)
    return dict(sorted(found.items(), key=lambda one: -one[1][1]))


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of all of them together, what several cover counted once."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total
