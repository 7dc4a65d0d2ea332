"""What is recorded, when, and what is found out about it: waits of the host, memory, failures."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from headway_runtime import transfers
from headway_runtime.graphs import misses
from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.graph_memory import UsedBytes
from headway_runtime.graphs.recording import Recorder
from headway_runtime.kernels.triton.norm import Norm
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.models.decoder import Decoder


def test_sizes_are_recorded_while_there_is_nothing_else_to_do(start: Callable[..., Any]) -> None:
    driver = start()
    assert driver.graphs.forms == {StepForm(1), StepForm(6)}
    first_bytes = driver.metrics.snapshot().cuda_graph_bytes
    assert first_bytes > 0

    count = 0
    while driver.engine.has_idle_work:
        driver.engine.work_idly()
        count += 1

    plain = {StepForm(size) for size in (1, 2, 4, 6)}
    assert count == 2 + 4
    assert driver.graphs.forms == plain | {StepForm(size, draws=False) for size in (1, 2, 4, 6)}
    assert driver.metrics.snapshot().cuda_graph_bytes > first_bytes


def test_recording_between_requests_changes_no_cached_prefix(
    start: Callable[..., Any], generator: torch.Generator
) -> None:
    recording, plain = start(), start(enforce_eager=True)
    prompt = torch.randint(0, 330, (20,), generator=generator).tolist()
    for driver in (plain, recording):
        driver.add("first", prompt, max_tokens=3, temperature=0.0)
        driver.run()
    cached = recording.engine._runner._cache.data.clone()

    while recording.engine.has_idle_work:
        recording.engine.work_idly()

    assert torch.equal(recording.engine._runner._cache.data, cached)
    for driver in (plain, recording):
        driver.add("again", prompt, max_tokens=3, temperature=0.0)
    assert recording.run() == plain.run()


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
def test_what_many_steps_have_lacked_is_recorded_between_them(
    *, overlaps: bool, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of three sequences run as six until then, and those that end in logits kernel by kernel."""
    monkeypatch.setattr(misses, "MOST_MISSES", 4)
    answers = []
    for changes in ({"enforce_eager": True}, {"overlap": overlaps}):
        driver = start(**changes)
        for number in range(3):
            driver.add(str(number), [5 + number, 6], max_tokens=9 + 6 * number, temperature=0.0)
        driver.add("biased", [7, 8], max_tokens=2, logit_bias=((3, 2.0),), temperature=0.0)
        if driver.engine._runner.graphs is not None:
            assert driver.graphs.forms == {StepForm(1), StepForm(6)}
            first_bytes = driver.metrics.snapshot().cuda_graph_bytes
        answers.append(driver.run())

    assert answers[0] == answers[1]
    # Of three sequences and of two; the last runs as one sequence, which was recorded at the start.
    assert driver.graphs.forms == {StepForm(size) for size in (1, 2, 4, 6)}
    assert driver.metrics.snapshot().cuda_graph_bytes > first_bytes
    for number in range(6):
        driver.add(f"penalized {number}", [9], max_tokens=2, frequency_penalty=0.5, temperature=0.0)
        driver.run()
    assert StepForm(1, draws=False) in driver.graphs.forms


def test_a_step_that_runs_is_waited_for_before_anything_is_recorded(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misses, "MOST_MISSES", 1)
    driver = start()
    events: list[str] = []
    wait, warm = transfers.Moment.wait, Recorder.warm

    def waited(self: transfers.Moment) -> None:
        events.append("wait")
        wait(self)

    def warmed(self: Recorder, work: Callable[[], None]) -> None:
        events.append("warm")
        warm(self, work)

    monkeypatch.setattr(transfers.Moment, "wait", waited)
    monkeypatch.setattr(Recorder, "warm", warmed)
    for number in range(2):
        driver.add(str(number), [5 + number, 6], max_tokens=6, temperature=0.0)
    while StepForm(2) not in driver.graphs.forms:
        assert driver.engine.has_work
        events.clear()
        driver.step()

    assert events[: events.index("warm")] == ["wait"]


class Bounded(Recorder):
    """A device whose recordings take a megabyte each."""

    def used_bytes(self) -> UsedBytes:
        return UsedBytes(len(self.works) << 20)


def test_no_more_memory_is_taken_than_was_set_aside(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headway_runtime.kv_budget import KVBudget
    from headway_runtime.start_memory import StartMemory

    # Logits that are left for sampling are taken before anything is recorded.
    logits = 6 * 330 * 4
    budget, limit = StartMemory.budget, logits + (4 << 20) + 5
    monkeypatch.setattr(StartMemory, "budget", lambda *asked: KVBudget(budget(*asked).num_blocks, limit))
    driver = start(recorder=Bounded())
    caplog.set_level(logging.INFO)

    driver.record_all()

    # All that are drawn within, and one of the others.
    assert driver.graphs.forms == {*(StepForm(size) for size in (1, 2, 4, 6)), StepForm(6, draws=False)}
    assert "3 are left out, the first of 4 sequences, up to the logits" in caplog.text
    assert driver.metrics.snapshot().cuda_graph_bytes == logits + (5 << 20)


class Short(Recorder):
    """A device without room for some tries, which `failing` numbers."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self.failing, self.num_tries, self.num_given_back = failing, 0, 0

    def give_back(self) -> None:
        self.num_given_back += 1

    def capture(self, work: Callable[[], None]) -> Any:
        self.num_tries += 1
        if self.num_tries - 1 in self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().capture(work)


@pytest.mark.parametrize(
    ("failing", "left_out"),
    [
        pytest.param({1}, set(), id="there is room once memory is given back"),
        pytest.param({2, 3}, {StepForm(4)}, id="there is none for that one"),
    ],
)
def test_without_memory_for_a_form_the_others_are_recorded(
    failing: set[int],
    left_out: set[StepForm],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The start records 6 and 1, then follow 4 and 2 and those that end in logits."""
    recorder = Short(failing)
    driver = start(recorder=recorder)
    driver.record_all()

    planned = {StepForm(size, draws=draws) for size in (1, 2, 4, 6) for draws in (True, False)}
    assert driver.graphs.forms == planned - left_out
    assert recorder.num_given_back == 1
    warnings = [one.getMessage() for one in caplog.records if "cannot be recorded" in one.getMessage()]
    assert len(warnings) == len(left_out)
    assert all("4 sequences cannot be recorded (OutOfMemoryError" in one for one in warnings)
    for number in range(3):
        driver.add(str(number), [5, 6], max_tokens=4, temperature=0.0)
    assert all(len(tokens) == 4 for tokens in driver.run().values())


def test_a_wait_for_the_device_is_found_and_steps_run_plainly(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logits = Decoder.logits

    def waiting(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.sum().item() is not None
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", waiting)

    driver = start()
    driver.add("one", [5, 6], max_tokens=4, temperature=0.0)
    got = driver.run()

    assert len(got["one"]) == 4
    assert not driver.engine.has_idle_work
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    (warning,) = (one for one in warnings if "cannot be recorded" in one)
    assert "a decode step of 6 sequences" in warning
    assert "the host waits for the device" in warning
    assert "--enforce-eager" in warning


def test_numbers_of_the_host_in_a_step_are_found(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    norm = RMSNorm.__call__

    def scaled(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return norm(self, x) * torch.tensor([1.0])

    monkeypatch.setattr(RMSNorm, "__call__", scaled)

    driver = start()

    assert not driver.graphs.forms
    assert "lift_fresh" in caplog.text


def test_a_replayed_step_runs_nothing_of_the_model_on_the_host(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward
    calls: list[int] = []

    def counted(self: Decoder, *asked: Any) -> torch.Tensor:
        calls.append(1)
        return forward(self, *asked)

    monkeypatch.setattr(Decoder, "forward", counted)
    recording = start()
    # Each of two sizes was warmed up and recorded.
    assert len(calls) == 4
    recording.add("one", [5, 6, 7], max_tokens=4, temperature=0.0)

    recording.run()

    # The prompt.
    assert len(calls) == 5


def test_a_number_of_the_host_stays_what_it_was_when_recorded(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder keeps constants as a graph does, or these tests would prove nothing."""
    logits = Decoder.logits
    factor = [1.0]
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden).mul_(factor[0]))
    driver = start()
    driver.add("one", [3], max_tokens=4, temperature=0.0)
    want = driver.run()["one"]

    # A step that saw this would take the first of equals, token 0.
    factor[0] = 0.0
    driver.add("two", [3], max_tokens=4, temperature=0.0)

    assert driver.run()["two"] == want
    assert any(want)
    plain = start(enforce_eager=True)
    plain.add("three", [3], max_tokens=4, temperature=0.0)
    assert plain.run()["three"] == [0] * 4


def test_what_is_recorded_runs_in_a_replay_and_not_before(generator: torch.Generator) -> None:
    """As under a stream's capture."""
    norm, weight = Norm(64, 1e-5), torch.rand(64, generator=generator)
    rows, found = torch.randn(3, 64, generator=generator), torch.full((3, 64), torch.nan)

    def work() -> None:
        found.copy_(norm.norm(rows, weight))

    recorded = Recorder().capture(work)
    # What a kernel will write is nothing yet.
    assert found.eq(0).all()

    rows.normal_(generator=generator)
    recorded.replay()

    assert torch.allclose(found, functional.rms_norm(rows, (64,), weight, 1e-5), atol=1e-5)


def test_engines_may_be_told_to_record_nothing(start: Callable[..., Any]) -> None:
    driver = start(enforce_eager=True)

    assert driver.engine._runner.graphs is None
    assert not driver.engine.has_idle_work
    assert driver.recorder.works == []
    assert driver.metrics.snapshot().cuda_graph_bytes == 0
