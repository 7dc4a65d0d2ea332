"""Runs `headway eval` in this process; copies of the bundled model with weights quantized, well or badly."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_eval.main import main
from headway_runtime.sources import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "headway-tiny"


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
        shutil.copytree(BUNDLED, folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [one for one in tensors if one.endswith("_proj.weight")]:
            weight = tensors[name].float()
            scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            factor = (scale_factors or {}).get(name.removesuffix(".weight"), 1.0)
            # In float64: a factor may be larger than what a scale can become.
            tensors[f"{name}_scale"] = (scale.double() * factor).float()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": None,
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
