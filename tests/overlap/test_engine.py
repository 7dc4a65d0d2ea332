"""The engine with overlapping steps: its promises are those of the plain one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from headway_runtime.batch import Batch
from headway_runtime.config import EngineConfig
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.parallel.ranks import OnlyRank
from headway_runtime.pending_step import PendingStep
from headway_runtime.request import FinishReason, Request, SamplingParams

Start = Callable[..., Any]
VOCAB_SIZE = 96
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


def test_a_turn_launches_a_step_and_reads_the_one_before(start: Start) -> None:
    driver = start()
    driver.add("a", range(20), temperature=0.0, max_tokens=3)
    assert driver.step() == []
    assert driver.engine.has_work
    assert [len(driver.step()) for _ in range(3)] == [1, 1, 1]
    assert len(driver.tokens("a")) == 3
    assert not driver.engine.has_work
    assert driver.engine.kv_blocks_used == 0


def test_the_last_step_of_a_known_length_is_followed_by_none(start: Start) -> None:
    driver = start()
    launched: list[Batch] = []
    launch = driver.engine._runner.launch

    def noted(batch: Batch) -> Any:
        launched.append(batch)
        return launch(batch)

    driver.engine._runner.launch = noted
    driver.add("a", range(20), temperature=0.0, max_tokens=3)
    driver.run()
    assert [batch.num_tokens for batch in launched] == [20, 1, 1]
    driver.add("b", range(40), temperature=0.0, max_tokens=30, stop_token_ids=frozenset(driver.tokens("a")))
    driver.run()
    count = len(driver.tokens("b"))
    stopped = driver.reason("b") is FinishReason.STOP
    assert len(launched) - 3 == count + stopped, "a stop is noticed one step late"


def test_steps_overlap_on_a_gpu_alone_unless_told_otherwise(start: Start) -> None:
    config: EngineConfig = start().engine.config

    def overlaps(device: Any, *, overlap: bool | None) -> bool:
        return replace(config, device=device, overlap=overlap).overlaps_steps

    assert overlaps("cuda", overlap=None)
    assert not overlaps("cpu", overlap=None)
    assert overlaps("cpu", overlap=True)
    assert not overlaps("cuda", overlap=False)


# Ends.


def test_a_stop_token_is_the_last_one_that_anybody_sees_or_counts(start: Start) -> None:
    driver = start()
    driver.add("free", range(20), temperature=0.0, max_tokens=30)
    driver.add("beside", range(30, 50), temperature=0.0, max_tokens=30)
    driver.run()
    tokens, before = driver.tokens("free"), driver.counter("generated_tokens")
    stop = tokens[4]
    driver.add("stopped", range(20), temperature=0.0, max_tokens=30, stop_token_ids=frozenset({stop}))
    driver.run()
    want = tokens[: tokens.index(stop) + 1]
    assert driver.tokens("stopped") == want
    assert driver.reason("stopped") is FinishReason.STOP
    assert driver.counter("generated_tokens") == before + len(want)
    assert driver.metrics.snapshot().sizes["generated_tokens"].sum == 60 + len(want)
    assert driver.engine.kv_blocks_used == 0


@pytest.mark.parametrize("way", ["abort", "finish"])
def test_taking_out_a_request_under_way_frees_its_blocks_at_once(way: str, start: Start) -> None:
    driver = start()
    driver.add("a", range(50), **GREEDY)
    driver.step()
    driver.step()
    before = driver.tokens("a")
    take_out = getattr(driver.engine, way)
    assert take_out("a", 1.0) is True
    assert take_out("a", 1.0) is False
    assert driver.engine.kv_blocks_used == 0
    driver.engine.check_integrity()
    driver.run()
    assert driver.tokens("a") == before
    assert (driver.counter("aborted"), driver.counter("finished")) == ((1, 0) if way == "abort" else (0, 1))
    assert driver.counter("generated_tokens") == len(before)


def test_a_name_may_be_used_again_while_its_old_step_is_under_way(start: Start) -> None:
    driver = start()
    driver.add("want", range(60, 80), **GREEDY)
    driver.run()
    driver.add("a", range(50), **GREEDY)
    driver.step()
    driver.step()
    driver.engine.abort("a", 1.0)
    driver.add("a", range(60, 80), **GREEDY)
    driver.run()
    assert driver.tokens("a") == driver.tokens("want")


def test_blocks_that_are_freed_under_way_serve_others(start: Start) -> None:
    driver = start(num_blocks=8, enable_prefix_caching=False)
    driver.add("want", range(90), **GREEDY)
    driver.run()
    for index in range(5):
        driver.add(f"gone {index}", range(index, index + 70), temperature=0.0, max_tokens=40)
        for _ in range(3):
            driver.step()
        driver.engine.abort(f"gone {index}", 1.0)
        driver.add(f"next {index}", range(90), **GREEDY)
        driver.run()
        assert driver.tokens(f"next {index}") == driver.tokens("want")


# Failures.


@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_step_that_fails_ends_its_own_requests(where: str, start: Start) -> None:
    driver = start(num_blocks=20)
    driver.add("want", range(60, 80), **GREEDY)
    driver.run()
    runner = driver.engine._runner
    method = getattr(runner, where)
    driver.add("a", range(20), **GREEDY)
    driver.step()
    driver.step()

    def failing(*arguments: Any) -> Any:
        setattr(runner, where, method)
        raise RuntimeError("out of memory")

    setattr(runner, where, failing)
    # It comes into the step that fails to launch, or into one behind that which fails to be read.
    driver.add("b", range(60, 80), **GREEDY)
    driver.step()
    assert driver.outputs["a"][-1].error == "RuntimeError: out of memory"
    assert driver.reason("a") is FinishReason.ERROR
    assert len(driver.tokens("a")) == (2 if where == "launch" else 1), "what came before the failure counts"
    driver.run()
    if where == "launch":
        assert driver.reason("b") is FinishReason.ERROR
    else:
        assert driver.tokens("b") == driver.tokens("want")
    assert driver.engine.kv_blocks_used == 0
    driver.add("c", range(60, 80), **GREEDY)
    driver.run()
    assert driver.tokens("c") == driver.tokens("want")


def test_a_dead_device_passes_the_error_through(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()
    driver.add("a", range(20), **GREEDY)
    driver.step()

    def failing(pending: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(driver.engine._runner, "read", failing)
    monkeypatch.setattr(driver.engine._runner, "is_usable", lambda: False)
    with pytest.raises(RuntimeError, match="device lost"):
        driver.step()


# Times.


def test_a_step_takes_the_time_since_the_one_before_was_read(start: Start) -> None:
    times = iter([3.0, 4.0, 7.0])
    metrics = EngineMetrics()
    engine = EngineCore(start().engine.config, metrics, lambda: next(times))
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=3), 1.0), 1.5)
    for now in (2.0, 2.5, 3.5, 4.5):
        engine.step(now)
    assert not engine.has_work
    sums = {name: one.sum_milliseconds for name, one in metrics.snapshot().histograms.items()}
    assert sums["queue"] == pytest.approx(1000.0)  # 1.0 -> 2.0
    assert sums["prefill"] == pytest.approx(1000.0)  # 2.0 -> 3.0
    assert sums["inter_token"] == pytest.approx(4000.0)  # 3.0 -> 4.0 -> 7.0
    # Launched at 2.0, 2.5 and 3.5; but the device had time for the second from 3.0 on, for the last from 4.0.
    assert sums["step"] == pytest.approx(5000.0)
    assert sums["e2e"] == pytest.approx(6000.0)


def test_reading_a_step_is_minded_by_who_knows_of_other_ranks(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device waits for may never come, if another rank is to send it."""
    events: list[str] = []
    read = PendingStep.read

    @contextmanager
    def noted(self: OnlyRank) -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    def noted_read(self: PendingStep) -> Any:
        events.append("read")
        return read(self)

    monkeypatch.setattr(PendingStep, "read", noted_read)
    monkeypatch.setattr(OnlyRank, "waiting", noted)
    driver = start()
    driver.add("one", [5, 6], max_tokens=3, temperature=0.0)
    driver.run()

    assert events == ["begins", "read", "ends"] * (len(events) // 3)
    assert len(events) >= 3 * 3
