"""What was measured, and the page that tells it."""

import json
from pathlib import Path

from benchmarks.gpu import measured

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_page_has_the_committed_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    results = json.loads(measured.RESULTS.read_text(encoding="utf-8"))

    assert measured.MARKS.with_section(page, measured.page_section(results)) == page, (
        "run: PYTHONPATH=runtime python -m benchmarks.gpu.measured --page docs/gpu.md"
    )


def test_rows_are_told_by_what_they_have() -> None:
    conditions = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "cuda": "13.0"}
    conditions |= {"commit": "0123456789abcdef", "tree": "changed"}
    run = {"number": 3, "date": "2026-11-26T07:46:37+00:00", "conditions": conditions}
    step = {"stage": "engine", "name": "llama none, decode 1 at 512", "run": 3, "step_milliseconds": 4.0}
    step |= {"tokens_per_second": 250.0, "share_of_floor": 0.875}
    failed = {"stage": "engine", "name": "llama fp8, load", "run": 3, "error": "no memory"}
    kernel = {
        "stage": "kernels",
        "name": "a product",
        "run": 3,
        "microseconds": 12.5,
        "cublas_over_ours": 1.25,
    }
    kernel |= {"floor_microseconds": 10.0, "share_of_floor": 0.8}

    section = measured.page_section({"runs": [run], "rows": [step, failed, kernel]})

    told = "| 3 | a GPU | 2026-11-26 | 01234567, changed | torch 2.11, Triton 3.6, CUDA 13.0 |  |"
    assert told in section
    assert "| batch-1 bf16 decode, share of copy bandwidth | at least 0.8 | 0.76 | 0.88 | yes |" in section
    assert "| llama none, decode 1 at 512 | 4.00 | 250 | 88% |" in section
    assert "| a product | 12.5 | 10.0 | 80% | cublas 1.25 | 3 |" in section
    assert "no memory" not in section
