"""What a trace says of a GPU's use."""

from typing import Any

import pytest
from benchmarks.gpu.gpu_trace import covered, traced, use_of


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_busy_is_what_kernels_and_copies_cover_together() -> None:
    events = [
        event("kernel", "gemm", 100.0, 50.0),
        event("kernel", "norm", 140.0, 20.0),
        event("gpu_memcpy", "Memcpy HtoD", 200.0, 10.0),
        event("cuda_runtime", "cudaLaunchKernel", 0.0, 90.0),
        event("cuda_runtime", "cudaEventSynchronize", 110.0, 40.0),
        event("cuda_driver", "cuStreamSynchronize", 150.0, 10.0),
        event("user_annotation", "step", 0.0, 300.0),
        {"ph": "M", "name": "process_name"},
    ]

    found = use_of(events, seconds=200e-6)

    assert found.busy_seconds == pytest.approx(70e-6)
    assert found.waiting_seconds == pytest.approx(50e-6)
    assert found.num_launches == 3
    assert found.idle_share == pytest.approx(0.65)
    assert found.host_seconds == pytest.approx(150e-6)


@pytest.mark.parametrize(
    ("intervals", "want"),
    [([], 0.0), ([(0.0, 3.0), (1.0, 2.0)], 3.0), ([(5.0, 6.0), (0.0, 1.0), (0.5, 2.0)], 3.0)],
)
def test_what_several_cover_counts_once(intervals: list[tuple[float, float]], want: float) -> None:
    assert covered(intervals) == want


def test_on_a_cpu_no_gpu_is_used() -> None:
    ran = []

    found = traced(lambda: ran.append(1), "cpu")

    assert ran == [1]
    assert found.num_launches == 0
    assert found.idle_share == 1.0
