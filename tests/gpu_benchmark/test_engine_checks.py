"""Checks of engines on a GPU find what they are there for."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import engine_checks
from benchmarks.gpu.engine_checks import EngineCheck, can_launch_early

from headway_runtime.kernels.triton import overlap
from headway_runtime.kernels.triton.launch import Gpu

ASKED = 64 << 20
TOKENS = [[5, 6, 7], [8, 9, 10]]


class Engine:
    """Takes main memory at its start, and may keep it."""

    def __init__(self, num_bytes: int, kept: list[torch.Tensor] | None) -> None:
        self.memory = torch.ones(num_bytes, dtype=torch.uint8)
        if kept is not None:
            kept.append(self.memory)

    def close(self) -> None:
        """Nothing is to be said."""


@pytest.mark.parametrize(
    ("share", "keeps", "want"),
    [
        pytest.param(1.0, False, True, id="what was asked for"),
        pytest.param(1.6, False, False, id="a power of two above"),
        pytest.param(0.0, False, False, id="nothing"),
        pytest.param(1.0, True, False, id="for good"),
    ],
)
def test_memory_that_is_not_what_was_asked_for_is_found(
    share: float, monkeypatch: pytest.MonkeyPatch, *, keeps: bool, want: bool
) -> None:
    kept: list[torch.Tensor] = []

    def make(*_: Any, **options: Any) -> Engine:
        assert options["offload"].host_memory_bytes == ASKED
        return Engine(int(share * ASKED), kept if keeps else None)

    monkeypatch.setattr(engine_checks, "OFFLOAD_BYTES", ASKED)
    monkeypatch.setattr(engine_checks, "make_engine", make)

    row = EngineCheck("cpu", lambda: None, is_smoke=True).pinned()

    assert row["is_right"] == want, row
    assert row["share_of_asked"] == pytest.approx(share, abs=0.04)


class Early:
    """An engine whose tokens are other ones where launches are early. seen: what the process says of that."""

    def __init__(self, early_tokens: list[list[int]], seen: list[tuple[bool, str | None]]) -> None:
        seen.append((overlap.ENABLED, os.environ.get(overlap.VARIABLE)))
        self.tokens = early_tokens if overlap.ENABLED else TOKENS
        counters = {"steps": 300, "recorded_steps": 299}
        self.metrics = SimpleNamespace(snapshot=lambda: SimpleNamespace(counters=counters))

    def close(self) -> None:
        """Nothing is to be said."""


@pytest.mark.parametrize(
    ("early_tokens", "want"),
    [pytest.param(TOKENS, 0, id="alike"), pytest.param([[5, 6, 7], [8, 0, 1]], 2, id="read too early")],
)
def test_tokens_of_launches_that_read_too_early_are_found(
    early_tokens: list[list[int]], want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, str | None]] = []

    def make(*_: Any, **options: Any) -> Early:
        assert options["max_model_len"] >= 2 * engine_checks.LENGTH + engine_checks.EARLY_STEPS
        assert options["cuda_graph_sizes"] == (engine_checks.EARLY_COUNT,)
        return Early(early_tokens, seen)

    monkeypatch.setattr(engine_checks, "make_engine", make)
    monkeypatch.setattr(EngineCheck, "_answers", lambda self, engine, *_: engine.tokens)
    before = overlap.ENABLED, os.environ.get(overlap.VARIABLE)

    row = EngineCheck("cuda", lambda: None, is_smoke=False).launched_early()

    assert seen == [(False, "0"), (True, "1")]
    assert (overlap.ENABLED, os.environ.get(overlap.VARIABLE)) == before
    assert (row["num_tokens"], row["num_different"]) == (6, want)
    assert row["is_right"] == (want == 0)


def test_launches_are_early_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, want in ((80, False), (90, True)):
        monkeypatch.setattr(engine_checks, "gpu_of", lambda _, own=capability: Gpu("some gpu", own, 132))
        assert can_launch_early("cuda") == want
