"""Checks of engines on a GPU find what they are there for."""

from typing import Any

import pytest
import torch
from benchmarks.gpu import engine_checks
from benchmarks.gpu.engine_checks import EngineCheck

ASKED = 64 << 20


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
