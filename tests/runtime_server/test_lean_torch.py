"""PyTorch without parts that serving never uses: they are left out, and there when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway_runtime.server import lean_torch

BEGIN = "from headway_runtime.server.lean_torch import leave_out; assert leave_out(); import torch, sys\n"
IS_LATER = "assert type(sys.modules[{!r}]).__name__ == '_Later'\n"
IS_REAL = "assert type(sys.modules[{!r}]).__name__ == 'module'\n"


def python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", BEGIN + script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_engine_runs_without_ever_asking_for_them() -> None:
    later = "".join(IS_LATER.format(name) for name in lean_torch.LEFT_OUT)
    python(
        "from headway_runtime.inprocess import Engine\n"
        "from headway_runtime.sampling_params import SamplingParams\n"
        "with Engine('bundled://headway-tiny', max_model_len=64, num_threads=1) as engine:\n"
        "    params = SamplingParams(temperature=0.0, max_tokens=4)\n"
        "    assert engine.generate('12+34=', params, use_tqdm=False)[0].text == '46'\n"
        "    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, logprobs=2, max_tokens=4)\n"
        "    engine.generate(['one', 'two'], params, use_tqdm=False)\n" + later
    )


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("assert torch.export.export and torch.export.Dim", id="an attribute"),
        pytest.param("from torch.export import Dim; assert Dim", id="a name of it"),
        pytest.param(
            "import torch.export.dynamic_shapes as module; assert module.Dim is torch.export.Dim",
            id="a module below it",
        ),
        pytest.param(
            "import torch._dynamo\n" + IS_REAL.format("torch._meta_registrations"), id="the compiler"
        ),
    ],
)
def test_they_are_there_when_they_are_asked_for(script: str) -> None:
    python(script + "\n" + IS_REAL.format("torch.export"))


def test_a_version_that_was_not_tried_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_torch, "TRIED_VERSIONS", ("0.1.",))
    before = list(sys.meta_path)
    assert not lean_torch.leave_out()
    assert sys.meta_path == before
