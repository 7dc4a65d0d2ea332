"""No replicas at all: falling asleep, waking, and coming back from a suspension, decided pass by pass."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import GatewaySample, Routing, Sample
from headway_operator.slo import Memory, decide, resume, target_of
from headway_operator.spec import parse
from headway_operator.state import Decision, Observed, ReplicaPhase, Revision

START = 10_000.0
INTERVAL_SECONDS = 5.0


class Life:
    """A service whose replicas are ready a pass after they are asked for."""

    def __init__(self, build: Any, **target: Any) -> None:
        self.build = build
        self.target = build.target(min_replicas=0, may_sleep=True, **{"idle_seconds": 60.0, **target})
        self.memory = Memory(began_at=START)
        self.now = START
        self.replicas = 0
        self.waiting = 0
        self.running = 0
        self.received = 0
        self.routing: Routing | None = Routing(1024, 600.0)
        self.is_gateway_silent = False
        self.has_revision = False
        self.other_scaler = ""
        self.phase: ReplicaPhase = "ready"

    def step(self, passes: int = 1) -> Decision:
        for _ in range(passes):
            self.now += INTERVAL_SECONDS
            decision, self.memory = decide(self.target, self.memory, self.sample(), self.observed(), self.now)
            self.replicas, self.has_revision = decision.replicas, True
        return decision

    def observed(self) -> Observed:
        revisions = (Revision("demo-1", "1", self.replicas, START),) if self.has_revision else ()
        names = [f"r{number}" for number in range(self.replicas)]
        replicas = tuple(self.build.replica(name, revision="1", phase=self.phase) for name in names)
        return Observed(revisions, replicas, other_scaler=self.other_scaler)

    def sample(self) -> Sample:
        one = self.build.sample(self.now, running=self.running, counters={"received": self.received})
        gateway = GatewaySample("g", self.now, self.waiting, 1.0, self.running, {"rejected": 0}, self.routing)
        return Sample(
            self.now,
            {f"r{number}": one for number in range(self.replicas)},
            {"g": None if self.is_gateway_silent else gateway},
        )


@pytest.fixture
def life(build: Any) -> Life:
    return Life(build)


def test_a_new_service_shows_that_it_can_serve_before_it_sleeps(life: Life) -> None:
    assert life.step().replicas == 1
    assert life.step(11).replicas == 1
    decision = life.step(2)
    assert (decision.replicas, decision.cause) == (0, "Idle")
    assert "no request for 60 s: replicas 1 -> 0" in decision.message
    assert life.step().cause == "Asleep"


@pytest.mark.parametrize("sign", ["running", "received", "waiting"])
def test_whoever_asks_keeps_it_awake(life: Life, sign: str) -> None:
    for number in range(60):
        # Between two passes a short request leaves nothing but the count of those received.
        setattr(life, sign, number // 8 if sign == "received" else int(number % 8 == 0))
        assert life.step().replicas >= 1
    setattr(life, sign, getattr(life, sign) if sign == "received" else 0)
    life.step(20)
    assert life.replicas == 0


def test_several_replicas_fall_asleep_together(life: Life) -> None:
    life.step()
    life.replicas, life.memory = 3, life.memory._replace(replicas=3)
    life.step(20)
    assert life.replicas == 0


def test_nothing_unseen_is_idle(life: Life) -> None:
    life.step()
    life.is_gateway_silent = True
    assert life.step(40).replicas == 1
    life.is_gateway_silent = False
    assert life.step(11).replicas == 1
    assert life.step(4).replicas == 0


def test_a_sample_that_is_missing_now_and_then_keeps_nobody_awake(life: Life) -> None:
    """What came meanwhile is counted in the next; nobody sleeps on a pass that did not see."""
    life.step()
    for number in range(1, 13):
        life.is_gateway_silent = number % 3 == 0
        assert life.step().replicas == 1
    assert life.is_gateway_silent
    life.is_gateway_silent = False
    assert life.step().replicas == 0


def test_what_came_beside_a_missing_sample_keeps_it_awake(life: Life) -> None:
    life.step(10)
    life.is_gateway_silent = True
    life.step()
    life.is_gateway_silent, life.received = False, 1
    life.step()
    assert life.step(10).replicas == 1
    assert life.step(4).replicas == 0


def test_a_gateway_that_could_not_wake_it_keeps_it_awake_and_says_so(life: Life) -> None:
    life.routing = None
    decision = life.step(30)
    assert (decision.replicas, decision.blocker) == (1, "GatewayCannotWake")
    assert "a new revision brings another" in decision.message


@pytest.mark.parametrize(("waiting", "want"), [(1, 1), (4, 1), (5, 2), (400, 4)])
def test_it_wakes_to_the_size_of_what_waits(life: Life, waiting: int, want: int) -> None:
    life.step(20)
    assert life.replicas == 0
    life.waiting = waiting  # at two places each, and as many waiting for them
    decision = life.step()
    assert (decision.replicas, decision.cause) == (want, "Woken")
    assert decision.message == f"{waiting} requests wait for a replica: replicas 0 -> {want}"
    assert life.step().replicas >= want


@pytest.mark.parametrize(
    ("bound", "want"), [pytest.param({}, [3, 4], id="all"), pytest.param({"other_scaler": "HPA"}, [1, 1])]
)
def test_what_comes_while_the_first_one_starts_calls_for_more(
    life: Life, bound: dict[str, str], want: list[int]
) -> None:
    life.step(20)
    life.waiting, life.phase = 1, "starting"
    assert life.step().replicas == 1
    for name, value in bound.items():
        setattr(life, name, value)
    seen = []
    for waiting in (9, 400):
        life.waiting = waiting
        decision = life.step()
        seen.append(decision.replicas)
        assert decision.cause == ("WaitingForReplicas" if bound else "AddedReplicas")
    assert seen == want
    if not bound:
        assert decision.message == "0 of 3 replicas ready; 400 requests wait: replicas 3 -> 4"


def test_what_waits_for_a_service_that_cannot_start_adds_nobody(build: Any) -> None:
    """It may not sleep, so that nobody knows whether its replica comes at all."""
    life = Life(build)
    life.target = replace(life.target, may_sleep=False, min_replicas=1)
    life.phase, life.waiting = "starting", 400
    assert {life.step().replicas for _ in range(400)} == {1}


def test_naps_are_no_regrets(life: Life) -> None:
    for _ in range(3):
        life.waiting, life.running = 0, 0
        life.step(20)
        life.waiting = 4
        life.step()
        assert life.memory.patience == 1.0


def test_a_restart_wakes_nobody_and_sends_nobody_to_sleep(life: Life) -> None:
    life.step(10)
    saved = json.loads(json.dumps(life.memory.to_dict()))
    life.memory = resume(saved, life.sample(), life.now)
    assert life.step(11).replicas == 1, "nobody watched in between"
    assert life.step(3).replicas == 0
    life.memory = resume(json.loads(json.dumps(life.memory.to_dict())), life.sample(), life.now)
    assert life.step(3).replicas == 0


def test_one_replica_at_least_is_needed_while_somebody_asks(life: Life) -> None:
    """Removing one at a time never ends at none; that is for idleness alone."""
    life.target = replace(life.target, stabilization_seconds=10.0, idle_seconds=1000.0)
    assert life.step(100).replicas == 1


def test_another_scaler_decides_alone(life: Life) -> None:
    life.step()
    life.other_scaler = "HorizontalPodAutoscaler/rival"
    assert life.step(40).replicas == 1
    life.replicas = 0
    life.waiting = 3
    assert life.step().replicas == 0


def test_a_suspended_service_comes_back_with_as_many_replicas_as_it_had(life: Life) -> None:
    life.step()
    life.replicas, life.memory = 3, life.memory._replace(replicas=3)
    life.target = replace(life.target, min_replicas=1, may_sleep=False, is_suspended=True)
    decision = life.step()
    assert (decision.replicas, decision.cause, decision.blocker) == (0, "Suspended", "Suspended")
    life.step(50)
    # The operator restarts in the meantime.
    life.memory = resume(json.loads(json.dumps(life.memory.to_dict())), life.sample(), life.now)
    life.step(5)
    life.target = replace(life.target, is_suspended=False)
    decision = life.step()
    assert (decision.replicas, decision.cause) == (3, "Resumed")
    assert decision.message == "spec.suspend is false again: replicas 0 -> 3"
    assert life.step().replicas == 3


def test_bounds_that_moved_meanwhile_hold_when_it_comes_back(life: Life) -> None:
    life.step()
    life.replicas, life.memory = 3, life.memory._replace(replicas=3)
    life.target = replace(life.target, is_suspended=True)
    life.step(3)
    life.target = replace(life.target, is_suspended=False, max_replicas=2)
    assert life.step().replicas == 2


def test_of_an_earlier_checkpoint_what_a_suspension_set_aside_is_read() -> None:
    saved = {"version": 1, "began_at": 5.0, "parked_replicas": 3}
    assert Memory.from_dict(saved, 100.0) == Memory(began_at=100.0, parked_replicas=3)
    assert Memory.from_dict({"version": 1}, 100.0).parked_replicas is None


def test_only_an_autoscaled_service_without_a_least_number_may_sleep(build: Any) -> None:
    def told(**spec: Any) -> tuple[bool, float | None]:
        target = target_of(parse(build.manifest(spec)).spec)
        return target.may_sleep, target.idle_seconds

    assert told(scaling={"minReplicas": 0, "idleSeconds": 90}) == (True, 90.0)
    assert told(scaling={"minReplicas": 0}) == (True, None)
    assert told()[0] is False
    assert told(scaling={"minReplicas": 0}, replicas=1)[0] is False


@pytest.mark.parametrize(
    ("starts", "wanted"), [([], 600), ([30.0], 600), ([40.0, 200.0, 200.0], 1000), ([200.0] * 3, 1000)]
)
def test_unless_told_it_sleeps_the_later_the_longer_its_way_back(
    build: Any, starts: list[float], wanted: int
) -> None:
    life = Life(build, idle_seconds=None)
    life.memory = life.memory._replace(starts=tuple((START - one, one) for one in starts))
    life.waiting = 1
    life.step(2)
    life.waiting = 0
    decision = life.step(2)
    since = life.now
    while decision.replicas and life.now < since + 2000:
        decision = life.step()
    assert decision.cause == "Idle"
    # Idle since the first pass that saw nobody, which was one before `since`.
    assert life.now - since == wanted - INTERVAL_SECONDS


def test_asleep_behind_a_gateway_that_is_long_silent_nobody_knows_whether_somebody_asks(life: Life) -> None:
    life.step()
    life.step(20)
    assert life.replicas == 0
    life.is_gateway_silent = True
    decision = life.step(6)
    assert (decision.cause, decision.blocker) == ("Asleep", ""), "for half a minute"
    decision = life.step(7)
    assert (decision.cause, decision.blocker) == ("Asleep", "SamplesMissing")
    assert "a gateway gives no usable sample" in decision.message
    life.is_gateway_silent = False
    assert life.step().blocker == ""
