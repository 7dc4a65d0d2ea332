"""The engine's promises: one terminal output per request, exact counts, faults kept to their request."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_runtime.batch import Batch
from headway_runtime.config import Envelope, Limits, Targets
from headway_runtime.engine import EngineCore
from headway_runtime.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    LimitRangeError,
    QueueFullError,
)
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import FinishReason, Request, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


def test_every_request_ends_with_exactly_one_terminal_output(
    checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    driver = start_engine(kv_cache_memory_bytes=checkpoint().kv_bytes(20))
    rng = random.Random(4)
    prompts = random_prompts(3, [rng.randint(1, 100) for _ in range(40)])
    gone: set[str] = set()
    for index, prompt in enumerate(prompts):
        driver.add(
            str(index), prompt, seed=index, max_tokens=rng.randint(1, 60), stop_token_ids=frozenset({5, 6})
        )
        if rng.random() < 0.2:
            width = rng.randint(1, 16)
            driver.engine.set_limits(Limits(width, rng.randint(width, 256)))
        if rng.random() < 0.15:
            name = str(rng.randint(0, index))
            if driver.engine.abort(name, 0.0):
                gone.add(name)
            driver.engine.check_integrity()
        driver.step()
    driver.run()
    for index in range(len(prompts)):
        reasons = [one.finish_reason for one in driver.outputs[str(index)] if one.finish_reason is not None]
        assert len(reasons) == (0 if str(index) in gone else 1)
    counters = driver.metrics.snapshot().counters
    assert counters["received"] == 40
    assert (counters["aborted"], counters["finished"]) == (len(gone), 40 - len(gone))
    assert len(gone) >= 2
    assert counters["preemptions"] >= 2
    assert driver.engine.kv_blocks_used == 0


def test_stop_token_ends_a_request_and_is_its_last_token(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("free", range(20), **GREEDY)
    driver.run()
    tokens = driver.tokens("free")
    stop = tokens[3]
    driver.add("stopped", range(20), **GREEDY, stop_token_ids=frozenset({stop}))
    driver.add("later", range(20), **GREEDY, stop_token_ids=frozenset({stop}), min_tokens=8)
    driver.run()
    assert driver.tokens("stopped") == tokens[: tokens.index(stop) + 1]
    assert driver.outputs["stopped"][-1].finish_reason is FinishReason.STOP
    assert len(driver.tokens("later")) == 8
    assert stop not in driver.tokens("later")
    assert driver.outputs["later"][-1].finish_reason is FinishReason.LENGTH


def test_context_end_is_a_finish_by_length(start_engine: Any) -> None:
    driver = start_engine(max_model_len=32)
    driver.add("a", range(30), temperature=0.0, max_tokens=100)
    driver.run()
    assert len(driver.tokens("a")) == 2
    assert driver.outputs["a"][-1].finish_reason is FinishReason.LENGTH


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_preemption(
    checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    prompts = random_prompts(5, [90, 60, 80, 20, 75])
    params: list[dict[str, Any]] = [
        {"seed": 3},
        {"seed": 3, "top_p": 0.9},
        {"seed": 5, "top_k": 20},
        {"seed": 6},
        {"seed": 7},
    ]
    alone = start_engine()
    for index, prompt in enumerate(prompts):
        alone.add(str(index), prompt, max_tokens=64, **params[index])
        alone.run()
    crowded = start_engine(
        kv_cache_memory_bytes=checkpoint().kv_bytes(23), envelope=Envelope(8, 48), limits=Limits(8, 48)
    )
    for index, prompt in enumerate(prompts):
        crowded.add(str(index), prompt, max_tokens=64, **params[index])
    crowded.run()
    assert crowded.counter("preemptions") >= 2
    for index in range(len(prompts)):
        assert crowded.tokens(str(index)) == alone.tokens(str(index))


def test_abort_frees_blocks_at_once_and_gives_no_output(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("a", range(50), **GREEDY)
    driver.step()
    assert driver.engine.kv_blocks_used > 0
    before = len(driver.outputs["a"])
    assert driver.engine.abort("a", 1.0) is True
    assert driver.engine.kv_blocks_used == 0
    assert driver.engine.abort("a", 1.0) is False
    assert not driver.engine.has_work
    assert driver.step() == []
    assert len(driver.outputs["a"]) == before
    assert (driver.counter("aborted"), driver.counter("finished")) == (1, 0)


def test_finish_from_outside_counts_as_finished(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("a", range(5), **GREEDY)
    driver.step()
    assert driver.engine.finish("a", 1.0) is True
    assert driver.engine.finish("a", 1.0) is False
    assert (driver.counter("aborted"), driver.counter("finished")) == (0, 1)
    assert driver.engine.kv_blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "error", "complaint"),
    [
        pytest.param((), InvalidRequestError, "prompt is empty", id="empty"),
        pytest.param(
            tuple(range(256)), ContextLengthError, "prompt has 256 tokens", id="no room for a token"
        ),
        pytest.param((1, 320), InvalidRequestError, r"outside \[0, 319\]", id="token above the vocabulary"),
        pytest.param((-1,), InvalidRequestError, "outside", id="negative token"),
    ],
)
def test_prompt_that_can_never_run_is_refused_at_once(
    prompt: tuple[int, ...], error: type[Exception], complaint: str, start_engine: Any
) -> None:
    driver = start_engine()
    with pytest.raises(error, match=complaint):
        driver.add("a", prompt, **GREEDY)
    assert not driver.engine.has_work
    rejected = driver.metrics.snapshot().rejected
    assert sum(rejected.values()) == 1
    assert rejected["context_length" if error is ContextLengthError else "invalid"] == 1


def test_longest_prompt_that_fits_is_served(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("a", range(255), **GREEDY)
    driver.run()
    assert len(driver.tokens("a")) == 1


def test_live_request_id_is_refused(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("a", [1], **GREEDY)
    with pytest.raises(InvalidRequestError, match="'a' is live already"):
        driver.add("a", [1], **GREEDY)


def test_full_queue_refuses_with_a_time_to_come_back(start_engine: Any) -> None:
    engine = start_engine(max_waiting=2).engine

    def add(request_id: str, now: float) -> None:
        engine.add_request(Request(request_id, (1, 2), SamplingParams(), now), now)

    add("a", 0.0)
    add("b", 10.0)
    with pytest.raises(QueueFullError) as caught:
        add("c", 7.5)
    assert caught.value.retry_after_seconds == 8
    with pytest.raises(QueueFullError) as caught:
        add("c", 10_000.0)
    assert caught.value.retry_after_seconds == 60
    assert engine.oldest_waiting_seconds(7.5) == 7.5
    engine.step(11.0)
    assert engine.oldest_waiting_seconds(12.0) == 0.0
    add("c", 12.0)
    assert engine.metrics.snapshot().rejected["queue_full"] == 2


def test_limits_change_at_the_next_step_and_only_inside_the_envelope(start_engine: Any) -> None:
    driver = start_engine(envelope=Envelope(4, 32), limits=Limits(2, 8))
    for index in range(4):
        driver.add(str(index), range(4), **GREEDY)
    assert driver.engine.step(0.0).num_prefill_tokens == 8
    assert driver.engine.num_running == 2
    driver.engine.set_limits(Limits(4, 32))
    assert driver.engine.limits == Limits(4, 32)
    outputs = driver.engine.step(0.0)
    assert (outputs.num_decodes, outputs.num_prefill_tokens, driver.engine.num_running) == (2, 8, 4)
    for wrong in (Limits(5, 32), Limits(4, 33), Limits(0, 8), Limits(4, 3)):
        with pytest.raises(LimitRangeError):
            driver.engine.set_limits(wrong)
    assert driver.engine.limits == Limits(4, 32)


def test_start_limits_outside_the_envelope_are_refused(engine_config: Any) -> None:
    with pytest.raises(LimitRangeError):
        EngineCore(engine_config(envelope=Envelope(2, 16), limits=Limits(3, 16)), EngineMetrics())


def test_targets_live_in_the_metrics(start_engine: Any) -> None:
    driver = start_engine()
    driver.engine.set_targets(Targets(300.0, 20.0))
    assert driver.engine.targets == driver.metrics.targets == Targets(300.0, 20.0)
    assert driver.metrics.targets_epoch == 2


@pytest.mark.parametrize(
    ("at_start", "live", "late_yield_seconds", "first"),
    [
        pytest.param(Targets(5000.0), None, 60.0, "in-time", id="from the start"),
        pytest.param(Targets(), Targets(5000.0), 60.0, "in-time", id="told later"),
        pytest.param(Targets(5000.0), Targets(), 60.0, "late", id="taken back"),
        pytest.param(Targets(5000.0), None, 0.0, "late", id="turned off"),
    ],
)
def test_who_is_late_by_the_ttft_target_of_the_moment_yields(
    engine_config: Any, at_start: Targets, live: Targets | None, late_yield_seconds: float, first: str
) -> None:
    config = engine_config(
        envelope=Envelope(1, 64), limits=Limits(1, 64), late_yield_seconds=late_yield_seconds
    )
    clock = 0.0
    engine = EngineCore(config, EngineMetrics(at_start), lambda: clock)
    if live is not None:
        engine.set_targets(live)
    for name, received_at in (("late", 0.0), ("in-time", 6.0)):
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        engine.add_request(Request(name, (1, 2, 3), sampling, received_at), received_at)
    clock = 7.0
    order: list[str] = []
    while engine.has_work:
        order += [one.request_id for one in engine.step(clock).outputs]
        engine.check_integrity()
    assert order[0] == first
    assert set(order) == {"late", "in-time"}


def test_the_first_and_the_last_output_say_what_share_waits_too_late(engine_config: Any) -> None:
    clock = 0.0
    config = engine_config(envelope=Envelope(1, 64), limits=Limits(1, 64))
    engine = EngineCore(config, EngineMetrics(Targets(5000.0)), lambda: clock)
    for name in ("a", "b", "c"):
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        engine.add_request(Request(name, (1, 2, 3), sampling, clock), clock)
    said: list[tuple[str, float | None]] = []
    most: list[int | None] = []
    while engine.has_work:
        outputs = engine.step(clock).outputs
        said += [(one.request_id, one.late_share) for one in outputs]
        most += [one.max_num_seqs for one in outputs]
        clock += 4.0
    # By the time "a" ends, two wait too late and nobody else is here; then one beside the next, or after it.
    want = [("a", 0.0), ("a", None), ("a", 2 / 3), ("b", 0.5), ("b", None), ("b", 0.5)]
    assert said == [*want, ("c", 0.0), ("c", None), ("c", 0.0)]
    assert most == [1, None, 1] * 3


def test_times_are_measured_from_receipt_to_token(engine_config: Any) -> None:
    clock = iter([3.0, 4.0, 7.0])
    metrics = EngineMetrics()
    engine = EngineCore(engine_config(), metrics, lambda: next(clock))
    engine.add_request(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=3), 1.0), 1.5)
    for now in (2.0, 3.5, 6.0):
        engine.step(now)
    sums = {name: one.sum_milliseconds for name, one in metrics.snapshot().histograms.items()}
    assert sums["queue"] == pytest.approx(1000.0)  # 1.0 -> 2.0
    assert sums["prefill"] == pytest.approx(1000.0)  # 2.0 -> 3.0
    assert sums["inter_token"] == pytest.approx(4000.0)  # 3.0 -> 4.0 -> 7.0
    assert sums["tpot"] == pytest.approx(2000.0)
    assert sums["e2e"] == pytest.approx(6000.0)  # 1.0 -> 7.0
    assert sums["step"] == pytest.approx(2500.0)
    counters = metrics.snapshot().counters
    assert (counters["prompt_tokens"], counters["generated_tokens"], counters["steps"]) == (3, 3, 3)
    assert (counters["prefill_step_tokens"], counters["decode_step_sequences"]) == (3, 2)


class FailingOnce:
    """Stands before a runner and fails one step."""

    def __init__(self, runner: Any, *, usable: bool) -> None:
        self._runner = runner
        self._usable = usable
        self._has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Any:
        if not self._has_failed:
            self._has_failed = True
            raise RuntimeError("out of memory")
        return self._runner.launch(batch)

    def is_usable(self) -> bool:
        return self._usable


def test_failed_step_ends_its_requests_and_the_engine_goes_on(start_engine: Any) -> None:
    driver = start_engine(envelope=Envelope(2, 64), limits=Limits(2, 64))
    for name in ("a", "b", "c"):
        driver.add(name, range(20), **GREEDY)
    driver.engine._steps.runner = FailingOnce(driver.engine._runner, usable=True)
    outputs = driver.step()
    assert [(one.request_id, one.finish_reason, one.error) for one in outputs] == [
        ("a", FinishReason.ERROR, "RuntimeError: out of memory"),
        ("b", FinishReason.ERROR, "RuntimeError: out of memory"),
    ]
    assert driver.engine.kv_blocks_used == 0
    driver.run()
    assert len(driver.tokens("c")) == 8
    assert (driver.counter("errors"), driver.counter("finished")) == (2, 1)


def test_dead_device_passes_the_error_through(start_engine: Any) -> None:
    driver = start_engine()
    driver.add("a", [1], **GREEDY)
    driver.engine._steps.runner = FailingOnce(driver.engine._runner, usable=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.step()


@pytest.fixture
def poisoned(checkpoint: Any, tmp_path: Path) -> Path:
    """A model in which token 7 makes everything that sees it not a number."""
    for path in checkpoint("mha, untied").folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_request_that_is_not_finite_fails_alone_and_leaves_nothing_behind(
    poisoned: Path, checkpoint: Any, start_engine: Any
) -> None:
    config = {"kv_cache_memory_bytes": checkpoint("mha, untied").kv_bytes(17)}
    clean = start_engine(poisoned, **config)
    clean.add("a", range(20, 60), **GREEDY)
    clean.add("b", range(30, 51), **GREEDY)
    clean.run()
    driver = start_engine(poisoned, **config)
    driver.add("a", range(20, 60), **GREEDY)
    driver.add("bad", [7] * 100, **GREEDY)
    driver.run()
    (output,) = driver.outputs["bad"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.token_ids == ()
    assert "not finite" in str(output.error)
    assert driver.tokens("a") == clean.tokens("a")
    # Blocks go round, so that the bad one's are used again; of two sequences together, the shorter one's last
    # block is read to its end, behind a mask.
    for index in range(6):
        driver.add(f"a{index}", range(20, 60), **GREEDY)
        driver.add(f"b{index}", range(30, 51), **GREEDY)
        driver.run()
        assert driver.tokens(f"a{index}") == clean.tokens("a")
        assert driver.tokens(f"b{index}") == clean.tokens("b")


def test_cuda_without_a_device_is_refused(engine_config: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="device='cuda'"):
        EngineCore(replace(engine_config(), device="cuda"), EngineMetrics())
