"""When passes come: woken, by the clock, after failures."""

import asyncio
import contextvars
import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest

from headway_operator import loop as loop_module
from headway_operator.errors import NotLeadingError, OtherOperatorError, UnavailableError
from headway_operator.loop import ServiceLoop, ServiceLoops
from headway_operator.names import ServiceKey
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Carried, Outcome, Problem
from headway_operator.turns import Turns

HOUR = 3600.0


class Passes:
    """Stands in for `reconcile`: notes each pass; `faults` are raised one after the other."""

    def __init__(self) -> None:
        self.taken: list[tuple[ServiceKey, Carried]] = []
        self.faults: list[Exception] = []
        self.service: dict[str, Any] | None = {"metadata": {"uid": "u1"}}

    async def fetch(self, key: ServiceKey) -> dict[str, Any] | None:
        return self.service

    async def __call__(self, world: Any, manifest: Any, carried: Carried) -> Outcome:
        key = ServiceKey("default", "demo")
        self.taken.append((key, carried))
        if self.faults:
            raise self.faults.pop(0)
        return Outcome(key, {}, problems=[Problem("apply Service demo", "refused", "ConflictError")])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    standin = Passes()
    monkeypatch.setattr(loop_module, "reconcile", standin)
    return standin


def make_loop(passes: Passes, key: ServiceKey, **options: Any) -> ServiceLoop:
    world: Any = None  # only `reconcile` would look at it
    settings: dict[str, Any] = {"interval_seconds": HOUR, "metrics": OperatorMetrics(), **options}
    return ServiceLoop(world, key, passes.fetch, **settings)


@pytest.fixture
async def running(passes: Passes, key: ServiceKey) -> Any:
    """Start a loop's task; it is cancelled at the end."""
    tasks = []

    def start(**options: Any) -> tuple[ServiceLoop, asyncio.Task[None]]:
        loop = make_loop(passes, key, **options)
        tasks.append(asyncio.create_task(loop.run()))
        return loop, tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_wake_up_brings_a_pass_at_once_and_the_clock_brings_others(
    passes: Passes, running: Any, eventually: Callable[..., Any]
) -> None:
    loop, _ = running()
    await eventually(lambda: len(passes.taken) == 1)
    loop.wake()
    await eventually(lambda: len(passes.taken) == 2)
    running(interval_seconds=0.01)
    await eventually(lambda: len(passes.taken) >= 6)


async def test_failures_end_a_pass_and_not_the_loop_and_are_logged_once(
    passes: Passes, running: Any, eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = OperatorMetrics()
    passes.faults = [UnavailableError("away"), UnavailableError("away"), ZeroDivisionError("a defect")]
    with caplog.at_level(logging.ERROR):
        running(interval_seconds=0.01, metrics=metrics)
        await eventually(lambda: len(passes.taken) >= 5)
    assert [record.message.count("away") for record in caplog.records] == [1, 0]
    assert caplog.records[1].exc_info is not None
    page = generate_latest(metrics.registry).decode()
    for reason, count in (("UnavailableError", 2.0), ("Unexpected", 1.0)):
        labels = f'{{name="demo",namespace="default",reason="{reason}",step="pass"}}'
        assert f"headway_operator_reconcile_errors_total{labels} {count}" in page
    assert 'reason="ConflictError",step="apply"' in page


async def test_what_fails_around_a_pass_costs_one_interval_and_is_counted(
    passes: Passes, running: Any, eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(OperatorMetrics):
        faults = 1

        def waited(self, seconds: float) -> None:
            if self.faults:
                self.faults -= 1
                raise OSError("no such histogram")
            super().waited(seconds)

    metrics = Faulty()
    running(metrics=metrics, interval_seconds=0.05)
    await eventually(lambda: len(passes.taken) >= 2)
    assert "the pass failed: OSError: no such histogram" in caplog.text
    assert 'reason="Unexpected"' in generate_latest(metrics.registry).decode()


async def test_what_is_carried_ends_with_the_service_it_belongs_to(
    passes: Passes, running: Any, eventually: Callable[..., Any]
) -> None:
    loop, task = running()
    await eventually(lambda: len(passes.taken) == 1)
    loop.wake()
    await eventually(lambda: len(passes.taken) == 2)
    passes.service = {"metadata": {"uid": "u2"}}
    loop.wake()
    await eventually(lambda: len(passes.taken) == 3)
    first, second, third = (carried for _, carried in passes.taken)
    assert first is second
    assert third is not second
    passes.service = {"metadata": {"uid": "u2", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    loop.wake()
    await asyncio.wait_for(task, 5)
    assert len(passes.taken) == 3


async def test_an_operator_that_does_not_lead_takes_no_pass(
    passes: Passes, running: Any, eventually: Callable[..., Any]
) -> None:
    asked = itertools.count()
    running(interval_seconds=0.01, may_act=lambda: next(asked) > 5)
    await eventually(lambda: passes.taken)
    assert next(asked) > 6


async def test_services_come_and_go(passes: Passes, key: ServiceKey, eventually: Callable[..., Any]) -> None:
    gone: list[ServiceKey] = []
    loops = ServiceLoops(lambda one: make_loop(passes, one), gone.append)
    assert loops.oldest_pass_seconds() == 0.0
    loops.wake(key)
    await eventually(lambda: passes.taken)
    assert len(loops) == 1
    assert 0.0 <= loops.oldest_pass_seconds() < 30.0
    passes.service = None
    loops.wake(key)
    await eventually(lambda: gone == [key])
    assert len(loops) == 0
    passes.service = {"metadata": {"uid": "u3"}}
    loops.wake(key)
    await eventually(lambda: len(passes.taken) >= 2)
    await loops.close()
    assert len(loops) == 0
    assert gone == [key]  # what is there when the operator ends is not gone


async def test_a_loop_keeps_nothing_of_what_brought_the_news(
    passes: Passes, key: ServiceKey, eventually: Callable[..., Any]
) -> None:
    class Brought:
        """What kopf has of an event while it tells of it."""

    event: contextvars.ContextVar[Brought] = contextvars.ContextVar("event")
    loops = ServiceLoops(lambda one: make_loop(passes, one))

    async def tell() -> weakref.ref[Brought]:
        brought = Brought()
        event.set(brought)
        loops.wake(key)
        return weakref.ref(brought)

    brought = await asyncio.create_task(tell())
    await eventually(lambda: passes.taken)
    await asyncio.sleep(0)  # the event loop itself keeps what it does last
    gc.collect()
    assert brought() is None
    await loops.close()


async def test_a_service_made_anew_while_it_is_found_gone_is_not_lost(
    passes: Passes, key: ServiceKey, eventually: Callable[..., Any]
) -> None:
    answers: list[dict[str, Any] | None] = [None, {"metadata": {"uid": "u2"}}]
    asked, answered = asyncio.Event(), asyncio.Event()

    async def fetch(_: ServiceKey) -> dict[str, Any] | None:
        asked.set()
        await answered.wait()
        return answers.pop(0)

    world: Any = None
    loops = ServiceLoops(
        lambda one: ServiceLoop(world, one, fetch, interval_seconds=HOUR, metrics=OperatorMetrics())
    )
    loops.wake(key)
    await asked.wait()
    loops.wake(key)  # made anew after the question, before the answer
    answered.set()
    await eventually(lambda: passes.taken)
    await loops.close()


async def test_passes_take_turns_and_say_how_long_they_waited(
    passes: Passes, key: ServiceKey, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, turns = OperatorMetrics(), Turns(woken=1, by_the_clock=1)
    may_end, running = asyncio.Event(), []

    async def long_pass(world: Any, manifest: Any, carried: Carried) -> Outcome:
        running.append(key)
        await may_end.wait()
        return Outcome(key, {})

    monkeypatch.setattr(loop_module, "reconcile", long_pass)
    loops = [make_loop(passes, key, metrics=metrics, turns=turns) for _ in range(3)]
    tasks = [asyncio.create_task(loop.run()) for loop in loops]

    def told(what: str) -> float:
        page = generate_latest(metrics.registry).decode()
        return float(next(line.split()[-1] for line in page.splitlines() if line.startswith(what)))

    await eventually(lambda: told("headway_operator_queued") == 2)
    assert len(running) == 1
    may_end.set()
    await eventually(lambda: told("headway_operator_queue_seconds_count") == 3)
    assert told("headway_operator_queued") == 0
    assert len(running) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_pass_that_was_woken_does_not_queue_behind_those_that_come_by_the_clock(
    passes: Passes, key: ServiceKey, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, may_end, running = Turns(woken=1, by_the_clock=1), asyncio.Event(), []

    async def long_pass(world: Any, manifest: Any, carried: Carried) -> Outcome:
        running.append(key)
        if len(running) > 1:  # the first lets its loop come to where it may be woken
            await may_end.wait()
        return Outcome(key, {})

    monkeypatch.setattr(loop_module, "reconcile", long_pass)
    woken, *others = [make_loop(passes, key, turns=turns) for _ in range(3)]
    tasks = [asyncio.create_task(woken.run())]
    await eventually(lambda: running)
    tasks += [asyncio.create_task(loop.run()) for loop in others]
    await eventually(lambda: len(running) == 2)
    woken.wake()

    await eventually(lambda: len(running) == 3)

    may_end.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_pass_that_loses_the_lease_ends_and_what_it_carried_is_dropped(
    passes: Passes, running: Any, eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = OperatorMetrics()
    passes.faults = [NotLeadingError("PATCH x: this operator does not hold the Lease")]
    with caplog.at_level(logging.ERROR):
        running(interval_seconds=0.01, metrics=metrics)
        await eventually(lambda: len(passes.taken) >= 2)
    assert passes.taken[0][1] is not passes.taken[1][1]
    assert caplog.records == []
    assert "NotLeading" not in generate_latest(metrics.registry).decode()


async def test_what_was_carried_is_dropped_where_another_operator_looks_after_the_service(
    passes: Passes, running: Any, eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = OperatorMetrics()
    passes.faults = [OtherOperatorError("system", "laptop") for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        running(interval_seconds=0.01, metrics=metrics)
        await eventually(lambda: len(passes.taken) >= 5)
    carried = [one for _, one in passes.taken]
    assert len({id(one) for one in carried[:4]}) == 4
    assert carried[3] is carried[4]
    (record,) = caplog.records
    assert "'system'" in record.message
    labels = '{name="demo",namespace="default",reason="OtherOperatorError",step="pass"}'
    page = generate_latest(metrics.registry).decode()
    assert f"headway_operator_reconcile_errors_total{labels} 3.0" in page


async def test_what_was_carried_is_dropped_while_another_leads(
    passes: Passes, running: Any, eventually: Callable[..., Any]
) -> None:
    leads = itertools.chain([True, False], itertools.repeat(True))
    running(interval_seconds=0.01, may_act=lambda: next(leads))
    await eventually(lambda: len(passes.taken) >= 3)
    first, second, third = (carried for _, carried in passes.taken[:3])
    assert first is not second
    assert second is third
