"""The thread that steps a core: every request ends once, whatever the (here fake) core or its users do."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine_thread import EngineThread, Event
from headway_runtime.errors import EngineDeadError, InvalidRequestError
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams

MAX_WAITING = 2


@dataclass
class Outputs:
    outputs: list[RequestOutput]


@dataclass
class FakeCore:
    """Gives each request one token per step, and a fault when told to. `may_step` holds the steps up."""

    may_step: threading.Event = field(default_factory=threading.Event)
    live: list[Request] = field(default_factory=list)
    most_waiting: int = 0
    fault: Exception | None = None
    is_closed: bool = False
    entered_by: str | None = None
    is_stepping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.config = EngineConfig(
            model_path="",
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=64,
            block_size=16,
            kv_cache_memory_bytes=None,
            envelope=Envelope(1, 16),
            limits=Limits(1, 16),
            max_waiting=MAX_WAITING,
            num_threads=1,
        )
        self._made: dict[str, int] = {}
        self.may_step.set()

    def enter_thread(self) -> None:
        self.entered_by = threading.current_thread().name

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def num_waiting(self) -> int:
        return len(self.live)

    def add_request(self, request: Request, now: float) -> None:
        if request.prompt_token_ids == (0,):
            raise InvalidRequestError("no such prompt", param="prompt")
        self.live.append(request)
        self.most_waiting = max(self.most_waiting, len(self.live))

    def abort(self, request_id: str, now: float) -> bool:
        before = len(self.live)
        self.live = [one for one in self.live if one.request_id != request_id]
        return len(self.live) < before

    finish = abort

    adapters = None
    has_idle_work = False

    def work_idly(self) -> None:
        raise AssertionError("there is none")

    def close(self) -> None:
        self.is_closed = True

    def step(self, now: float) -> Outputs:
        assert self.entered_by == threading.current_thread().name
        self.is_stepping.set()
        assert self.may_step.wait(20)
        if self.fault is not None:
            raise self.fault
        outputs = []
        for one in list(self.live):
            self._made[one.request_id] = count = self._made.get(one.request_id, 0) + 1
            is_last = count == one.sampling.max_tokens
            if is_last:
                self.live.remove(one)
            outputs.append(RequestOutput(one.request_id, (7,), FinishReason.LENGTH if is_last else None))
        return Outputs(outputs)


class Heard:
    """A sink, and what it has heard."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()

    def __call__(self, request_id: str, event: Event) -> None:
        self.events.put((request_id, event))

    def next(self) -> tuple[str, Event]:
        return self.events.get(timeout=120)

    def ends(self, count: int) -> dict[str, Event]:
        """The last event of each of `count` requests."""
        found: dict[str, Event] = {}
        while len(found) < count:
            request_id, event = self.next()
            assert request_id not in found, "nothing may follow an end"
            if isinstance(event, Exception) or event.finish_reason is not None:
                found[request_id] = event
        return found


def request(name: str, max_tokens: int = 3, prompt: tuple[int, ...] = (5,)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), time.monotonic())


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def thread(core: FakeCore) -> Iterator[EngineThread]:
    one = EngineThread(core, EngineMetrics())
    yield one
    core.may_step.set()
    one.close()


def test_more_requests_than_may_wait_are_all_served_in_turn(core: FakeCore, thread: EngineThread) -> None:
    heard = Heard()
    thread.submit([request(f"r{index}") for index in range(20)], heard)
    ends = heard.ends(20)
    assert list(ends) == [f"r{index}" for index in range(20)]
    assert core.most_waiting == MAX_WAITING


def test_a_core_is_entered_before_its_first_step_by_the_thread_that_steps(
    core: FakeCore, thread: EngineThread
) -> None:
    heard = Heard()
    thread.submit([request("one")], heard)
    assert isinstance(heard.ends(1)["one"], RequestOutput)
    assert core.entered_by == "headway-engine"


def test_a_refused_request_ends_with_its_error_and_others_go_on(thread: EngineThread) -> None:
    heard = Heard()
    thread.submit([request("good"), request("bad", prompt=(0,))], heard)
    ends = heard.ends(2)
    assert isinstance(ends["bad"], InvalidRequestError)
    assert isinstance(ends["good"], RequestOutput)


def test_what_is_aborted_is_heard_of_no_more(core: FakeCore, thread: EngineThread) -> None:
    core.may_step.clear()
    gone, stays = Heard(), Heard()
    thread.submit([request("gone"), request("gone-too"), request("in-backlog")], gone)
    thread.submit([request("stays")], stays)
    thread.abort(["gone", "gone-too", "in-backlog", "never-was"])
    core.may_step.set()
    assert list(stays.ends(1)) == ["stays"]
    # The step that was under way when they were aborted may have brought one token.
    late = []
    while not gone.events.empty():
        late.append(gone.next())
    assert all(isinstance(event, RequestOutput) and event.finish_reason is None for _, event in late)
    assert not core.live


def test_a_core_that_breaks_ends_every_request_and_refuses_new_ones(
    core: FakeCore, thread: EngineThread
) -> None:
    heard = Heard()
    core.may_step.clear()
    thread.submit([request(f"r{index}", max_tokens=100) for index in range(5)], heard)
    core.fault = RuntimeError("the device is gone")
    core.may_step.set()
    ends = heard.ends(5)
    assert all(isinstance(event, EngineDeadError) for event in ends.values())
    assert "the device is gone" in str(ends["r0"])
    with pytest.raises(EngineDeadError, match="the device is gone"):
        thread.submit([request("late")], heard)
    thread.abort(["late"])  # nothing to do, nothing to raise
    assert thread.snapshot().counters["steps"] == 0


def test_closing_ends_what_lives_and_may_be_done_twice(core: FakeCore, thread: EngineThread) -> None:
    heard = Heard()
    thread.submit([request("long", max_tokens=10**9)], heard)
    heard.next()
    thread.close()
    thread.close()
    assert isinstance(heard.ends(1)["long"], EngineDeadError)
    assert core.is_closed
    with pytest.raises(EngineDeadError, match="has been closed"):
        thread.submit([request("late")], heard)


def test_all_end_at_once_when_what_the_core_needs_is_lost_and_its_step_hangs(
    core: FakeCore, thread: EngineThread
) -> None:
    core.may_step.clear()
    heard, gone = Heard(), Heard()
    thread.submit([request(f"r{index}", max_tokens=100) for index in range(5)], heard)
    assert core.is_stepping.wait(20)
    thread.submit([request("asked-since")], heard)
    thread.submit([request("gone")], gone)
    thread.abort(["gone"])

    thread.fail("rank 1 is lost")

    ends = heard.ends(6)
    assert all(isinstance(event, EngineDeadError) for event in ends.values())
    assert "rank 1 is lost" in str(ends["asked-since"])
    assert gone.events.empty()
    with pytest.raises(EngineDeadError, match="rank 1 is lost"):
        thread.submit([request("late")], heard)
    assert thread.snapshot().counters["steps"] == 0
    # What the step brings in the end, nobody hears.
    core.may_step.set()
    thread.close()
    assert core.is_closed
    assert heard.events.empty()


def test_closing_does_not_wait_for_ever_for_a_step_that_hangs(core: FakeCore) -> None:
    core.may_step.clear()
    thread = EngineThread(core, EngineMetrics(), close_seconds=0.05)
    heard = Heard()
    thread.submit([request("long", max_tokens=100)], heard)
    assert core.is_stepping.wait(20)

    thread.close()

    assert "while a step hung" in str(heard.ends(1)["long"])
    core.may_step.set()


def test_a_snapshot_is_taken_between_steps(thread: EngineThread) -> None:
    heard = Heard()
    thread.submit([request("long", max_tokens=10**9)], heard)
    heard.next()
    assert thread.snapshot().counters["received"] == 0  # the fake counts nothing; it answers
