"""A rank whose runner loads one model after another: importing torch for each would take most of a test."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from headway_runtime.config import EngineConfig
from headway_runtime.parallel import worker
from headway_runtime.parallel.ranks import Ranks, on_all_ranks
from headway_runtime.parallel.tensor_group import TensorGroup
from headway_runtime.runner import Runner


class OpenedOnce:
    """Ranks whose tensors are connected once for all models."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: TensorGroup | None = None

    def open(self, device: torch.device) -> TensorGroup:
        if self._group is None:
            self._group = self._ranks.open(device)
        return self._group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)


class SharedRunner(Runner):
    """All ranks load what the first one's `load` is told."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = OpenedOnce(ranks)

    @on_all_ranks
    def load(self, config: EngineConfig) -> None:
        self._load(config)

    @on_all_ranks(confirmed=True)
    def check(self, fails_on: int, error: str) -> int:
        """Fails on one rank alone, or on none."""
        if self.ranks.rank == fails_on:
            raise LookupError(error)  # of no kind that anybody reckons with
        return self.ranks.rank

    @on_all_ranks
    def begin_adapter(self, slot: int, folder: str) -> None:
        """As on a node of its own, where the same path may hold other files."""
        own = Path(f"{folder}.rank{self.ranks.rank}")
        self._loading.begin(slot, str(own) if own.is_dir() else folder)

    def close(self) -> None:
        """Others will be loaded."""


if __name__ == "__main__":
    status = worker.main(lambda config, ranks: SharedRunner(ranks))
    sys.stderr.flush()
    os._exit(status)
