"""What a run writes down, and when it stops; which tokens are wrong; which goals are reached."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.checks import judge
from benchmarks.gpu.goals import judged
from benchmarks.gpu.report import Report, Row


def test_what_fails_is_written_down_and_the_rest_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    report = Report(out, {}, seconds=60)

    def fail() -> Row:
        raise RuntimeError("out of memory")

    report.row("engine", "first", fail)
    report.row("engine", "second", lambda: {"x": 1.0})
    first, second = json.loads(out.read_text())["rows"]
    assert first["error"] == "RuntimeError: out of memory"
    assert second["x"] == 1.0
    assert not report.is_right


def test_no_row_is_begun_without_time_for_it(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    report = Report(out, {}, seconds=60)
    assert report.row("engine", "long", lambda: {"x": 1}, needs_seconds=90) is None
    assert report.row("engine", "short", lambda: {"x": 1}, needs_seconds=30) is not None
    assert json.loads(out.read_text())["left_out"] == ["long"]
    assert report.is_right


def test_wrong_tokens_are_told_from_rounded_ones() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    prompt = [1, 2, 3]
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        best = int(model(token_ids).logits[0, -1].argmax())
        worst = int(model(token_ids).logits[0, -1].argmin())
    assert judge(model, [prompt], [[best]])["is_right"]
    assert not judge(model, [prompt], [[worst]])["is_right"]


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
