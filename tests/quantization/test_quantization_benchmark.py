"""The benchmark of quantized weights: its arithmetic, and that the whole of it runs."""

import argparse
from typing import Any

import pytest
import torch
from benchmarks.cpu import quantization
from benchmarks.cpu.tensor_bytes import tensor_bytes

from headway_runtime.layers.linear import Linear


def test_a_speed_is_the_median_of_the_rounds_own_ratios() -> None:
    """A slow round slows both, and does not count for one."""
    assert quantization.speedups([10.0, 100.0, 12.0], [5.0, 50.0, 4.0]) == 2.0


def test_each_storage_counts_once() -> None:
    weight = torch.zeros(8, 4)
    own = Linear(torch.zeros(2, 4), torch.zeros(2))
    assert tensor_bytes([Linear(weight, None), {"again": Linear(weight[:4], None)}, own]) == 4 * (32 + 8 + 2)


def test_goals_are_judged_by_the_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"bfloat16": 1.0, "12 bits": 1.25, "fp8": 1.5, "int8": 1.1, "int4": 4.0}

    def load(name: str, *others: Any) -> quantization.Lever:
        return quantization.Lever(name, name, 1.0, 2_000_000)  # type: ignore[arg-type]

    def milliseconds(given: list[quantization.Lever], batch: Any, rounds: int) -> list[list[float]]:
        return [[24.0 / speeds[lever.name]] * rounds for lever in given]

    monkeypatch.setattr(quantization, "load", load)
    monkeypatch.setattr(quantization, "milliseconds", milliseconds)
    monkeypatch.setattr(quantization, "make_model_folder", lambda *what, **options: None)
    monkeypatch.setattr(quantization, "read_gigabytes_per_second", lambda: 30.0)
    asked = argparse.Namespace(batch=[1, 16], context=32, prompt=[16], rounds=3, quick=True, forms=[*speeds])
    assert quantization.run(asked) == 1
    printed = capsys.readouterr().out
    assert "| int4 | 0.00 | 1.0 | 6.0 (4.00x) | 6.0 (4.00x) | 6.0 (4.00x) |" in printed
    assert "- int4 over bfloat16, batch 1: 4.00 (goal 2: met)" in printed
    assert "- int8 over bfloat16, batch 1: 1.10 (goal 1.2: missed)" in printed
