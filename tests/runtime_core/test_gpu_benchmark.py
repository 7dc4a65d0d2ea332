"""The GPU benchmark, run whole on the CPU with its tiny shapes: it is ready for the first GPU."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import run
from benchmarks.gpu.checks import judge
from benchmarks.gpu.report import Report, Row


def test_smoke_run_measures_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["run", "--smoke", "--out", str(out)])
    assert run.main() == 0
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert not [name for name, row in rows.items() if "error" in row]
    checks = [row for row in found["rows"] if row["stage"] == "checks"]
    assert len(checks) == 6
    assert all(row["is_right"] and row["num_tokens"] == 5 * 64 for row in checks)
    for weights in ("none", "fp8", "int4"):
        for batch in (1, 4):
            row = rows[f"llama {weights}, decode {batch} at 24"]
            assert 0 < row["floor_milliseconds"] < row["step_milliseconds"]
        assert rows[f"llama {weights}, prompt of 256"]["ttft_milliseconds"] > 0
    assert rows["qwen3, 6 requests, 24 in, 8 out"]["is_whole"]
    assert rows["llama, prompt lookup at 1"]["ratio"] > 0
    assert rows["transformers generate, decode 4 at 24"]["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


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
    import torch
    import transformers

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
