"""The two committed models, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from bundled_model.judging import Judged, load_judged
from bundled_model.network import DRAFT_NAME, TARGET_NAME


def bundled_directory(name: str) -> Path:
    return Path(str(files("headway_runtime") / "bundled" / name))


@pytest.fixture(scope="session")
def target_directory() -> Path:
    return bundled_directory(TARGET_NAME)


@pytest.fixture(scope="session")
def draft_directory() -> Path:
    return bundled_directory(DRAFT_NAME)


@pytest.fixture(scope="session")
def target(target_directory: Path) -> Judged:
    return load_judged(target_directory)


@pytest.fixture(scope="session")
def draft(draft_directory: Path) -> Judged:
    return load_judged(draft_directory)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: one thread is fastest, and its sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
