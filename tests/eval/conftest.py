"""Runs `headway eval` in this process; copies of the bundled model with weights quantized, well or badly."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bundled_model.quantized_copy import write_fp8_copy
from headway_eval.main import main


@dataclass(frozen=True)
class Judged:
    """What one run of the command gave."""

    status: int
    report: dict[str, Any]
    stdout: str

    @property
    def failed_checks(self) -> list[str]:
        return [check["name"] for check in self.report["checks"] if not check["passed"]]


@pytest.fixture
def run_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Judged]:
    """run_eval(*arguments): the command's exit status, JSON report and table."""

    def run(*arguments: str) -> Judged:
        path = tmp_path / "report.json"
        status = main([*arguments, "--json", str(path)])
        return Judged(status, json.loads(path.read_text()), capsys.readouterr().out)

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments): what the command says when it cannot judge."""

    def run(*arguments: str) -> str:
        status = main(list(arguments))
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, ""), captured.err
        return captured.err

    return run


@pytest.fixture(scope="session")
def fp8_copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """fp8_copy(scale_factors): the bundled model in llm-compressor's FP8 layout, one scale per output.

    scale_factors: by module, what its scales are multiplied by.
    """

    def make(scale_factors: dict[str, float] | None = None) -> Path:
        folder: Path = tmp_path_factory.mktemp("fp8") / "model"
        write_fp8_copy(folder, scale_factors)
        return folder

    return make
