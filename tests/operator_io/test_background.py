"""Tasks beside the passes that end although they never should."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from headway_operator.background import RECOVERED_SECONDS, Background


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Ends in the way that a test says each time, then goes on until cancelled."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.num_begun = 0
        self.is_running = False
        self.released = asyncio.Event()

    async def __call__(self) -> None:
        self.num_begun += 1
        if self.ends:
            if (error := self.ends.pop(0)) is not None:
                raise error
            return
        self.is_running = True
        try:
            await self.released.wait()
        finally:
            self.is_running = False
        raise RuntimeError("later")


async def test_a_task_that_ends_is_logged_counted_and_begun_anew(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., Any]
) -> None:
    restarted: list[str] = []
    work = Work(RuntimeError("a defect"), None)
    background = Background(restarted.append, first_pause_seconds=0.001)
    with caplog.at_level(logging.ERROR):
        async with background.running(work, "cache"):
            await eventually(lambda: work.is_running)
    assert not work.is_running, "the end of the block cancels it"
    assert (work.num_begun, restarted) == (3, ["cache", "cache"])
    assert "Traceback" in caplog.text
    assert "RuntimeError: a defect" in caplog.text
    assert caplog.text.count("the task 'cache' ended") == 2


async def test_it_fails_until_it_has_run_for_a_quiet_time(eventually: Callable[..., Any]) -> None:
    clock, work = Clock(), Work(RuntimeError("a defect"))
    background = Background(first_pause_seconds=0.001, clock=clock)
    async with background.running(work, "lease"):
        await eventually(lambda: work.is_running)
        clock.now += RECOVERED_SECONDS - 1
        assert background.failing_seconds() == RECOVERED_SECONDS - 1
        clock.now += 1
        assert background.failing_seconds() == 0.0
        # One that fails after a quiet time fails from then on.
        work.released.set()
        await eventually(lambda: work.num_begun >= 3)
        clock.now += 5
        assert background.failing_seconds() == 5.0


async def test_one_that_runs_does_not_hide_one_that_keeps_ending(eventually: Callable[..., Any]) -> None:
    clock, well, ill = Clock(), Work(), Work(*(RuntimeError("a defect") for _ in range(1000)))
    background = Background(first_pause_seconds=0.001, clock=clock)
    async with background.running(well, "keys"), background.running(ill, "resync"):
        await eventually(lambda: ill.num_begun >= 3)
        clock.now += RECOVERED_SECONDS * 2
        await eventually(lambda: ill.num_begun >= 5)
        assert background.failing_seconds() > 0.0
