"""A device that waits for other ranks for good ends the engine: not every kernel that waits has a limit."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway_runtime.config import EngineConfig, ParallelConfig
from headway_runtime.parallel import leader, tensor_group, watch
from headway_runtime.parallel.leader import Leader
from headway_runtime.parallel.messages import Call
from headway_runtime.parallel.ranks import OnlyRank
from headway_runtime.parallel.share import Share
from headway_runtime.parallel.tensor_group import ALONE
from headway_runtime.parallel.watch import RankWatch

LIMIT_SECONDS = 0.3
PATIENCE_SECONDS = 30.0


@pytest.fixture
def rank_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankWatch]:
    """Over ranks that are somebody else's; `told` is what it has failed for."""
    monkeypatch.setattr(watch, "TICK_SECONDS", 0.02)
    found = RankWatch(ParallelConfig(size=2, timeout_seconds=LIMIT_SECONDS), [], None)
    yield found
    found.close()


def test_a_wait_that_does_not_end_is_a_failure_that_says_which_limit_it_was(rank_watch: RankWatch) -> None:
    told: list[tuple[str, int]] = []
    let_go = threading.Event()
    rank_watch.on_failure = lambda message, status: told.append((message, status))
    rank_watch.let_go = let_go.set

    with rank_watch.waiting():
        assert let_go.wait(PATIENCE_SECONDS)

    ((message, status),) = told
    assert status == 1
    assert message == rank_watch.failure
    assert message.startswith(
        "a rank has not done its part of a step within 0.3 s (--distributed-timeout-seconds)"
    )


def test_many_waits_that_end_are_none(rank_watch: RankWatch) -> None:
    until = time.monotonic() + 3 * LIMIT_SECONDS
    while time.monotonic() < until:
        with rank_watch.waiting():
            time.sleep(0.01)
    # Nor is a time without any.
    assert not rank_watch.has_failed.wait(2 * LIMIT_SECONDS)


@contextmanager
def noted(events: list[str]) -> Iterator[None]:
    events.append("begins")
    yield
    events.append("ends")


@pytest.mark.parametrize(("device", "want"), [("cuda", ["begins", "work", "ends"]), ("cpu", ["work"])])
def test_the_first_rank_minds_what_it_launches_on_a_gpu(
    device: str,
    want: list[str],
    engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launching waits, too, where the device's queue is full."""
    events: list[str] = []
    monkeypatch.setattr(leader, "open_group", lambda *_: ALONE)
    minding = SimpleNamespace(failure=None, waiting=lambda: noted(events))
    gathering = SimpleNamespace(wait=lambda: None, calls={}, host="127.0.0.1")
    started: Any = SimpleNamespace(
        watch=minding, gathering=gathering, address="127.0.0.1", close=lambda: None
    )
    ranks = Leader(started, engine_config(tmp_path, parallel=ParallelConfig(size=2)))

    ranks.open(torch.device(device))
    ranks.call(Call("work", (), False, ""), lambda: events.append("work"))

    assert events == want


def test_a_rank_alone_has_nobody_to_wait_for() -> None:
    assert isinstance(OnlyRank().waiting(), nullcontext)


def test_nccls_own_limit_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process without a word to anybody."""
    import torch._C._distributed_c10d as c10d

    given: list[timedelta] = []

    class Nccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            given.append(options._timeout)

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(tensor_group, "most_bytes_for", lambda *_: 0)
    tensor_group.open_group(Share(0, 2), c10d.HashStore(), torch.device("cuda", 0), "127.0.0.1", 600.0)

    assert given == [timedelta(seconds=660)]
