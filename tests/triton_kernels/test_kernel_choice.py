"""Whose kernels layers get, as HEADWAY_KERNELS says, and what the tables and candidates are made of."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from headway_runtime.errors import ConfigError
from headway_runtime.layers import kernel_choice

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_choice() -> Iterator[None]:
    kernel_choice.forget_choice()
    yield
    kernel_choice.forget_choice()


@pytest.mark.parametrize(("told", "want"), [("", True), ("auto", True), ("triton", True), ("torch", False)])
def test_a_cpu_has_cpu_kernels_unless_all_is_pytorchs(
    told: str, *, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, told)

    assert kernel_choice.uses_cpu_kernels(CPU) == want


def test_a_word_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "cutlass")

    with pytest.raises(ConfigError, match="HEADWAY_KERNELS='cutlass' is not known; use one of auto, torch"):
        kernel_choice.uses_triton(CPU)


@pytest.mark.parametrize("interprets", ["0", "1"])
def test_triton_on_a_cpu_needs_its_interpreter(interprets: str) -> None:
    code = (
        "import torch; from headway_runtime.layers.kernel_choice import uses_triton; "
        "print(uses_triton(torch.device('cpu')))"
    )
    environment = {**os.environ, kernel_choice.VARIABLE: "triton", "TRITON_INTERPRET": interprets}

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    if interprets == "1":
        assert done.stdout.strip() == "True", done.stderr
    else:
        assert "set TRITON_INTERPRET=1 as well" in done.stderr


@pytest.mark.parametrize(
    ("capability", "choice", "want"),
    [((9, 0), "auto", True), ((8, 0), "auto", True), ((7, 5), "auto", False), ((9, 0), "torch", False)],
)
def test_a_gpu_has_triton_kernels_where_it_is_new_enough(
    capability: tuple[int, int], choice: str, *, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, choice)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel_choice._runs_triton.cache_clear()

    assert kernel_choice.uses_triton(torch.device("cuda", 0)) == want
    kernel_choice._runs_triton.cache_clear()


def on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch for AMD's GPUs, where an MI300X tells capability 9.4."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    kernel_choice._runs_triton.cache_clear()


def test_a_gpu_of_amds_has_pytorchs_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(kernel_choice.VARIABLE, raising=False)
    on_rocm(monkeypatch)

    assert not kernel_choice.uses_triton(torch.device("cuda", 0))
    assert "they are for CUDA, this PyTorch is built for ROCm" in caplog.text
    kernel_choice._runs_triton.cache_clear()


def test_triton_on_a_gpu_of_amds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "triton")
    on_rocm(monkeypatch)

    with pytest.raises(ConfigError, match=r"HEADWAY_KERNELS='triton'.* built for ROCm"):
        kernel_choice.uses_triton(torch.device("cuda", 0))
    kernel_choice._runs_triton.cache_clear()
