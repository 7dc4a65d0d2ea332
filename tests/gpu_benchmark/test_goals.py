"""Which goals rows say something of, and whether they are reached."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.goals import judged
from benchmarks.gpu.report import Report
from benchmarks.gpu.run import say_goals

ROWS: list[dict[str, Any]] = [
    {"name": "llama none, decode 1 at 512", "step_milliseconds": 4.4, "share_of_floor": 0.79},
    {"name": "llama int4, decode 1 at 512", "step_milliseconds": 1.6, "share_of_floor": 0.6},
    {"name": "llama fp8, decode 1 at 512", "error": "RuntimeError: out of memory"},
    {"name": "decode attention, 32 at 8192, bfloat16", "share_of_floor": 0.85},
    {"name": "llama none, GPU use of decode 32 at 512", "gpu_idle_share": 0.02},
    {"name": "llama none, prompt of 2048", "ttft_over_compute": 1.2},
]


def test_goals_are_those_that_rows_say_something_of() -> None:
    found = {goal.name: (goal.found, goal.is_reached) for goal in judged(ROWS)}

    assert found == {
        "batch-1 bf16 decode, share of copy bandwidth": (0.79, False),
        "int4 over bf16 at batch 1": (4.4 / 1.6, True),
        "decode attention at 8k, batch 32, share of bandwidth": (0.85, True),
        "GPU idle at batch 32": (0.02, True),
        "TTFT of a 2k prompt over its compute": (1.2, False),
    }


def test_goals_are_judged_over_the_rows_of_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    first = Report(out, {}, seconds=60)
    first.row("kernels", "decode attention, 32 at 8192, bfloat16", lambda: {"share_of_floor": 0.9})
    first.row(
        "engine", "llama none, decode 1 at 512", lambda: {"step_milliseconds": 5.0, "share_of_floor": 0.7}
    )
    second = Report(out, {}, seconds=60)
    second.row("engine", "llama int4, decode 1 at 512", lambda: {"step_milliseconds": 1.0})
    capsys.readouterr()

    say_goals(second)

    dates = [run["date"] for run in json.loads(out.read_text())["runs"]]
    engine = [{"stage": "engine", "run": number} for number in (0, 1)]
    told = {one["name"]: (one["is_reached"], one["from"]) for one in json.loads(out.read_text())["goals"]}
    assert told == {
        "batch-1 bf16 decode, share of copy bandwidth": (False, engine[:1]),
        "int4 over bf16 at batch 1": (True, engine),
        "decode attention at 8k, batch 32, share of bandwidth": (True, [{"stage": "kernels", "run": 0}]),
    }
    assert (
        "goal | decode attention at 8k, batch 32, share of bandwidth | 0.9, goal 0.85: reached "
        f"(kernels of {dates[0]})"
    ) in capsys.readouterr().out.splitlines()
