"""What the first run on a GPU takes of the stages."""

from typing import Any

from benchmarks.gpu.cases.checked import checked_cases
from benchmarks.gpu.cases.timed import FULL, timed_cases
from benchmarks.gpu.first import DECODE_KERNELS, furthest_from_floor


def test_kernels_of_a_decode_step_are_checked_and_timed() -> None:
    """cuBLAS is not ours to check."""
    assert set(DECODE_KERNELS) <= {case.kernel for case in timed_cases(FULL)}
    assert set(DECODE_KERNELS) - {"cublas"} <= {case.kernel for case in checked_cases(is_smoke=False)}


def test_kernels_furthest_from_their_floors_are_tuned_first() -> None:
    shares = {
        "norm": (0.8, 0.5),
        "draw": (0.2,),
        "gate": (0.9,),
        "place_step": (0.7,),
        "paged_decode": (0.6,),
    }
    rows = [
        {"stage": "kernels", "kernel": kernel, "shape_class": "default", "share_of_floor": share}
        for kernel, own in shares.items()
        for share in own
    ]
    others: list[dict[str, Any]] = [
        {"stage": "kernels", "kernel": "cublas", "shape_class": None, "share_of_floor": 0.1},
        {"stage": "kernels", "kernel": "failed", "shape_class": "default", "error": "x"},
        {"stage": "engine", "name": "decode", "share_of_floor": 0.1},
    ]

    assert furthest_from_floor(rows + others) == ["draw", "norm", "paged_decode"]
