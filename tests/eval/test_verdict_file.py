"""What the evaluation leaves behind for whoever started it, and that it ends with that one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway_eval.main import main

MODEL = "bundled://headway-tiny"


@pytest.mark.parametrize("limit", [0.05, 0.0], ids=["passed", "failed"])
def test_it_says_in_short_what_the_report_says(
    run_eval: Callable[..., Any], tmp_path: Path, limit: float
) -> None:
    tasks, path = tmp_path / "own.jsonl", tmp_path / "verdict.json"
    tasks.write_text('{"prompt": "12+34=", "answer": "46"}\n{"prompt": "12+34=", "answer": "47"}\n')
    flags = ("--quantization", "int8", "--tasks", str(tasks), "--max-kl", str(limit))
    judged = run_eval(MODEL, *flags, "--verdict-file", str(path))
    verdict = json.loads(path.read_text())
    assert verdict["passed"] == judged.report["passed"] == (judged.status == 0) == (limit > 0)
    checks = {check["name"]: check for check in judged.report["checks"]}
    assert [check["name"] for check in verdict["checks"]] == list(checks)
    for check in verdict["checks"]:
        whole = checks[check["name"]]
        assert check["value"] == pytest.approx(whole["value"], rel=1e-5)
        assert (check["limit"], check["passed"]) == (whole["limit"], whole["passed"])
    assert [check["unit"] for check in verdict["checks"]] == ["nats", "share", "points"]
    assert verdict["text"]["tokens"] == judged.report["text"]["num_tokens"]
    assert verdict["text"]["mean_kl"] == pytest.approx(judged.report["text"]["mean_kl"], rel=1e-5)
    assert verdict["tasks"] == [
        {"name": "own.jsonl", "tasks": 2, "right": 1, "baseline_right": 1, "lost": 0, "won": 0}
    ]


def test_it_is_written_in_place_as_a_mount_has_to_be(run_eval: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.write_text("x" * 4096)
    inode = path.stat().st_ino
    run_eval(MODEL, "--text", "bundled", "--tasks", "none", "--verdict-file", str(path))
    assert path.stat().st_ino == inode
    assert json.loads(path.read_text())["passed"]


def test_what_cannot_be_judged_leaves_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "verdict.json"
    assert main([MODEL, "--text", str(tmp_path / "none.txt"), "--verdict-file", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("headway eval: could not judge: ")
    assert not path.exists()
    assert main([MODEL, "--verdict-file", str(tmp_path / "nowhere" / "verdict.json")]) == 2
    assert "make the folder first" in capsys.readouterr().err


def test_it_ends_with_whoever_holds_its_lifeline() -> None:
    read_end, lifeline = os.pipe()
    command = [sys.executable, "-m", "headway", "eval", MODEL, "--lifeline-fd", str(read_end)]
    with subprocess.Popen(command, pass_fds=(read_end,), stderr=subprocess.PIPE, text=True) as process:
        os.close(read_end)
        os.close(lifeline)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "its parent is gone" in said
