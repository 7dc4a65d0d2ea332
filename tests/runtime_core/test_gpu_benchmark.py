"""The GPU benchmark's script, run whole on the CPU with its tiny shape: it is ready for the first GPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/run.py"


def test_smoke_run_writes_its_json_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    results = json.loads(out.read_text())
    assert [check["dtype"] for check in results["token_checks"]] == ["float32", "bfloat16"]
    assert all(check["is_right"] and check["num_tokens"] == 5 * 64 for check in results["token_checks"])
    assert [speed["batch"] for speed in results["decode"]] == [1, 4]
    assert all(speed["step_milliseconds"] > 0 for speed in results["decode"])
    assert [speed["prompt_tokens"] for speed in results["prefill"]] == [64, 256]
    assert all(speed["tokens_per_second"] > 0 for speed in results["prefill"])
    printed = capsys.readouterr().out
    for words in ("decode batch   4", "prefill   256", "tokens float32   right"):
        assert words in printed
