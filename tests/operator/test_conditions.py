"""What the status says, when it is written, and which events go with it."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.service_world import KEY, MET, NO_TARGET, NOW, STEADY, UNKNOWN, VIOLATED, World

from headway_operator import conditions
from headway_operator.errors import SpecError
from headway_operator.samples import Limits
from headway_operator.spec import InferenceServiceStatus
from headway_operator.state import Attainment, Gateway, Loss


@pytest.fixture
def world(build: Any) -> World:
    return World(build)


def get(status: dict[str, Any], kind: str) -> tuple[str, str, str]:
    found = next(c for c in status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def test_a_serving_service_says_so_with_its_numbers(world: World) -> None:
    status = world.status()
    assert get(status, "Ready") == ("True", "Serving", "2 of 2 replicas ready at http://demo.team")
    assert get(status, "Progressing")[:2] == ("False", "Settled")
    assert get(status, "SLOMet")[:2] == ("True", "TargetsMet")
    assert get(status, "ScalingActive")[:2] == ("True", "Measuring")
    assert get(status, "ModelAvailable")[:2] == ("True", "Loaded")
    assert get(status, "Degraded")[:2] == ("False", "AsExpected")
    assert (status["replicas"], status["readyReplicas"], status["desiredReplicas"]) == (2, 2, 2)
    assert status["selector"] == "serving.headway.dev/component=runtime,serving.headway.dev/service=demo"
    assert status["limits"] == {"maxNumSeqs": 6, "maxNumBatchedTokens": 512}
    assert status["slo"]["ttftMilliseconds"] == {
        "target": 300.0,
        "value": 212.4,
        "percentile": 95,
        "attainment": 0.9938,
        "verdict": "met",
    }
    assert status["display"] == {"replicas": "2/2", "ttft": "P95 212/300 ms", "tpot": "P95 21 ms"}
    assert status["lastDecision"]["cause"] == "Steady"
    assert status["revision"]["runtimeImage"] == "example.test/runtime:1"
    assert status["observedGeneration"] == 3


@pytest.mark.parametrize(
    ("changes", "want_reason", "want_words"),
    [
        pytest.param(
            {"phase": "failed", "reason": "CrashLoopBackOff", "message": "out of cheese"},
            "CrashLoopBackOff",
            "1 of 2 replicas cannot run: b: out of cheese",
            id="crash loop",
        ),
        pytest.param(
            {"phase": "starting", "num_restarts": 1, "reason": "OOMKilled", "message": "memory 2Gi"},
            "OOMKilled",
            "b: memory 2Gi",
            id="starting again after a crash",
        ),
    ],
)
def test_never_ready_while_a_pod_crashes(
    world: World, changes: dict[str, Any], want_reason: str, want_words: str
) -> None:
    world.replicas[1] = world.replica("b", **changes)
    status = world.status()
    assert get(status, "Ready")[:2] == ("False", want_reason)
    assert want_words in get(status, "Ready")[2]
    assert get(status, "Degraded")[:2] == ("True", want_reason)
    assert get(status, "Progressing")[:2] == ("False", want_reason)


def test_the_real_cause_of_waiting_is_named(world: World) -> None:
    world.replicas = [
        world.replica("a", phase="pending", reason="Unschedulable", message="0/3 nodes have a GPU"),
        world.replica("b", phase="pending", reason="Unschedulable", message="0/3 nodes have a GPU"),
    ]
    status = world.status()
    assert get(status, "Ready") == (
        "False",
        "Unschedulable",
        "0 of 2 replicas ready: a: 0/3 nodes have a GPU",
    )
    assert get(status, "ModelAvailable") == ("Unknown", "Unschedulable", "a: 0/3 nodes have a GPU")
    # Both were made long ago.
    assert get(status, "Degraded") == ("True", "Unschedulable", "2 replicas wait: a: 0/3 nodes have a GPU")


def test_an_ordinary_start_says_how_far_it_is(world: World) -> None:
    world.replicas = [world.replica("a", phase="starting"), world.replica("b", phase="pending")]
    assert get(world.status(), "Ready") == (
        "False",
        "ReplicasStarting",
        "0 of 2 replicas ready: 1 pending, 1 starting",
    )


def test_one_more_replica_on_its_way_leaves_the_service_ready(world: World) -> None:
    world.decision = replace(STEADY, replicas=3)
    world.replicas.append(world.replica("c", phase="starting"))
    status = world.status()
    assert get(status, "Ready")[0] == "True"
    assert get(status, "Progressing") == ("True", "AddingReplicas", "2 of 3 replicas ready")
    assert status["display"]["replicas"] == "2/3"


def test_fixed_replicas_are_ready_only_when_all_are(build: Any) -> None:
    world = World(build, {"replicas": 3})
    world.replicas.append(world.replica("c", phase="starting"))
    assert get(world.status(), "Ready")[:2] == ("False", "ReplicasStarting")


def test_not_ready_without_gateway_and_not_at_zero(build: Any, world: World) -> None:
    world.gateway = Gateway(ready=False, reason="ImagePullBackOff", message="no such image")
    assert get(world.status(), "Ready") == (
        *("False", "ImagePullBackOff"),
        "no gateway is ready: no such image",
    )
    asleep = World(build, {"replicas": 0})
    asleep.replicas = []
    assert get(asleep.status(), "Ready")[:2] == ("False", "ScaledToZero")


@pytest.mark.parametrize(
    ("gateway", "want"),
    [
        pytest.param(
            Gateway(ready=False, reason="CrashLoopBackOff", message="exited with status 1"),
            ("True", "CrashLoopBackOff", "no gateway is ready: exited with status 1"),
            id="the only one crashes",
        ),
        pytest.param(
            Gateway(ready=True, reason="CrashLoopBackOff", message="exited with status 1"),
            ("True", "CrashLoopBackOff", "a gateway is not ready, another one is: exited with status 1"),
            id="one of two crashes",
        ),
        pytest.param(
            Gateway(ready=True, reason="Unschedulable", message="no room", waits_since=NOW - 60),
            ("True", "Unschedulable", "a gateway is not ready, another one is: no room"),
            id="one of two has waited for a minute",
        ),
        pytest.param(
            Gateway(ready=True, reason="Unschedulable", message="no room", waits_since=NOW - 59),
            ("False", "AsExpected", "nothing is wrong"),
            id="one of two was just made",
        ),
        pytest.param(
            Gateway(ready=False), ("False", "AsExpected", "nothing is wrong"), id="it is about to start"
        ),
    ],
)
def test_a_gateway_that_does_not_come_up_is_told_whether_or_not_another_serves(
    world: World, gateway: Gateway, want: tuple[str, str, str]
) -> None:
    world.gateway = gateway
    status = world.status()
    assert get(status, "Degraded") == want
    assert get(status, "Ready")[0] == ("True" if gateway.ready else "False")
    assert get(status, "Progressing")[1] == "Settled"


def test_a_rollout_is_progress(world: World) -> None:
    world.replicas.append(world.build.replica("old", revision="0ld00000"))
    status = world.status()
    assert get(status, "Progressing")[:2] == ("True", "RollingOut")
    assert "1 of older ones remain" in get(status, "Progressing")[2]


def test_too_many_replicas_are_progress_too(world: World) -> None:
    world.decision = replace(STEADY, replicas=1)
    assert get(world.status(), "Progressing")[:2] == ("True", "RemovingReplicas")


@pytest.mark.parametrize(
    ("ttft", "tpot", "want"),
    [
        (MET, NO_TARGET, ("True", "TargetsMet")),
        (VIOLATED, NO_TARGET, ("False", "TTFTViolated")),
        (VIOLATED, VIOLATED, ("False", "TTFTAndTPOTViolated")),
        (MET, VIOLATED, ("False", "TPOTViolated")),
        (MET, UNKNOWN, ("Unknown", "NotEnoughRequests")),
        (UNKNOWN, NO_TARGET, ("Unknown", "NoTraffic")),
        (NO_TARGET, NO_TARGET, ("Unknown", "NoTarget")),
    ],
)
def test_slo_met_says_what_the_evidence_allows(
    world: World, ttft: Attainment, tpot: Attainment, want: tuple[str, str]
) -> None:
    world.decision = replace(STEADY, ttft=ttft, tpot=tpot)
    assert get(world.status(), "SLOMet")[:2] == want


@pytest.mark.parametrize(
    ("blocker", "want"),
    [
        ("FixedReplicas", ("False", "FixedReplicas")),
        ("OtherScaler", ("False", "OtherScaler")),
        ("SamplesMissing", ("False", "SamplesMissing")),
        ("AtMaxReplicas", ("True", "AtMaxReplicas")),
        ("", ("True", "Measuring")),
    ],
)
def test_scaling_active_names_what_holds_it_back(world: World, blocker: str, want: tuple[str, str]) -> None:
    world.decision = replace(STEADY, blocker=blocker)
    assert get(world.status(), "ScalingActive")[:2] == want


def test_a_new_replica_may_wait_a_while_before_that_is_trouble(world: World) -> None:
    waiting = {"phase": "pending", "reason": "Unschedulable", "message": "no GPU"}
    world.decision = replace(STEADY, replicas=3)
    world.replicas.append(world.replica("c", created_at=NOW - 59, **waiting))
    status = world.status()
    assert get(status, "Ready")[0] == "True"
    assert get(status, "Degraded")[0] == "False"
    assert get(status, "Progressing") == (
        "True",
        "AddingReplicas",
        "2 of 3 replicas ready: Unschedulable: c: no GPU",
    )
    world.replicas[-1] = world.replica("c", created_at=NOW - 60, **waiting)
    assert get(world.status(), "Degraded")[:2] == ("True", "Unschedulable")


def test_a_replica_that_was_taken_away_is_told_of_until_another_has_its_place(world: World) -> None:
    world.losses = (Loss("z", "Evicted", "The node was low on resource: memory.", NOW - 599),)
    assert get(world.status(), "Degraded")[:2] == ("True", "Evicted")
    assert get(world.status(), "Ready")[0] == "True"
    world.replicas = []
    assert get(world.status(), "Ready")[1] == "Evicted"
    assert get(world.status(NOW), "ModelAvailable")[:2] == ("Unknown", "Evicted")
    world.losses = (replace(world.losses[0], at=NOW - 600),)
    assert get(world.status(), "Ready")[1] == "NoReplicas"


def test_feasible_is_what_was_seen_until_the_opposite_is(world: World) -> None:
    def pass_with(generation: int = 3, **changes: Any) -> tuple[str, str]:
        world.manifest["metadata"]["generation"] = generation
        world.decision = replace(STEADY, **changes)
        world.previous = world.status()
        return get(world.previous, "SLOFeasible")[:2]

    assert pass_with(ttft=UNKNOWN) == ("Unknown", "NotProven")
    assert pass_with(ttft=VIOLATED) == ("Unknown", "NotProven")
    assert pass_with(ttft=MET) == ("True", "TargetsMet")
    assert pass_with(ttft=UNKNOWN) == ("True", "TargetsMet")
    assert pass_with(ttft=VIOLATED, blocker="TargetInfeasible") == ("False", "TargetInfeasible")
    assert pass_with(ttft=VIOLATED) == ("False", "TargetInfeasible")
    told = {"blocker": "FixedReplicas", "advice": "prefill alone takes 640 ms at idle"}
    assert pass_with(4, ttft=MET, **told) == ("True", "TargetsMet"), "advice is of what came since a change"
    assert pass_with(4, ttft=VIOLATED, **told) == ("False", "TargetInfeasible"), "whoever sets the number"
    assert pass_with(5, ttft=UNKNOWN) == ("Unknown", "NotProven")
    assert pass_with(5, ttft=NO_TARGET) == ("Unknown", "NoTarget")


def test_a_step_that_failed_degrades(world: World) -> None:
    status = world.status(problems=("apply Service demo: forbidden", "scale x: no answer"))
    assert get(status, "Degraded") == (
        "True",
        "StepFailed",
        "apply Service demo: forbidden (and 1 more); it is tried again",
    )


def test_a_replica_that_alone_breaks_the_promise_degrades_what_serves(world: World) -> None:
    words = "b in 40 of 40 requests of the last 90 s misses the TTFT target while the other one keeps it"
    world.decision = replace(STEADY, ttft=VIOLATED, blocker="SickReplica", sick=words)
    status = world.status()
    assert get(status, "Degraded") == ("True", "SickReplica", words)
    assert get(status, "Ready")[0] == "True"


def test_a_model_that_cannot_be_loaded_is_not_available(world: World) -> None:
    message = "exited with status 2; last line: headway serve: /models/x: no config.json"
    crashed = world.replica("a", phase="failed", reason="CrashLoopBackOff", message=message)
    world.replicas = [crashed, world.replica("b", phase="starting")]
    assert get(world.status(), "ModelAvailable") == ("False", "CrashLoopBackOff", f"a: {message}")
    world.replicas = [crashed, world.replica("b")]
    assert get(world.status(), "ModelAvailable")[0] == "True"


def test_transition_times_move_only_on_a_flip(world: World) -> None:
    world.previous = world.status(NOW)
    world.decision = replace(STEADY, blocker="AtMaxReplicas")
    world.replicas[1] = world.replica("b", phase="failed", reason="OOMKilled")
    later = {c["type"]: c["lastTransitionTime"] for c in world.status(NOW + 100)["conditions"]}
    before = {c["type"]: c["lastTransitionTime"] for c in world.previous["conditions"]}
    flipped = {kind for kind, time in later.items() if time != before[kind]}
    assert flipped == {"Ready", "Degraded"}
    assert before["Ready"] == "2027-01-15T08:00:00Z"
    assert later["Ready"] == "2027-01-15T08:01:40Z"


def test_a_refused_spec_keeps_what_serves_and_names_the_field(world: World) -> None:
    world.previous = world.status(NOW)
    manifest = {**world.build.manifest(generation=4), "status": world.previous}
    error = SpecError("spec.quantization", "'int8' is not supported", "UnsupportedField")
    status = conditions.refused(manifest, error, NOW + 5)
    InferenceServiceStatus.model_validate(status)
    assert get(status, "Ready") == (
        "False",
        "UnsupportedField",
        "spec.quantization: 'int8' is not supported",
    )
    assert (status["observedGeneration"], status["readyReplicas"]) == (4, 2)
    assert status["revision"] == world.previous["revision"]
    assert conditions.worth_writing(KEY, world.previous, status, NOW + 5)
    assert conditions.events(world.previous, status) == [
        ("Warning", "UnsupportedField", "Ready is False: spec.quantization: 'int8' is not supported")
    ]


def test_the_life_of_a_service_in_events(world: World) -> None:
    def passes(at: float) -> list[tuple[str, str]]:
        status = world.status(at)
        told = conditions.events(world.previous, status)
        assert not told or conditions.worth_writing(KEY, world.previous, status, at), "an event told twice"
        world.previous = status
        return [(kind, reason) for kind, reason, _ in told]

    world.replicas = []
    world.decision = replace(STEADY, ttft=UNKNOWN)
    assert passes(NOW) == [("Normal", "NoReplicas"), ("Normal", "RevisionMade")]
    world.replicas = [world.replica("a"), world.replica("b")]
    assert passes(NOW + 1) == [("Normal", "Serving")]
    assert passes(NOW + 2) == []
    world.decision = replace(STEADY, ttft=VIOLATED)
    assert passes(NOW + 3) == [("Warning", "TTFTViolated")]
    world.decision = replace(
        STEADY, ttft=VIOLATED, limits=Limits(16, 512), cause="RaisedBatchLimit", message="8 -> 16"
    )
    assert passes(NOW + 4) == [("Normal", "RaisedBatchLimit")]
    world.replicas[1] = world.replica("b", phase="failed", reason="OOMKilled", message="memory 2Gi")
    assert passes(NOW + 5) == [("Warning", "OOMKilled")]
    world.replicas[1] = world.replica("b", phase="failed", reason="CrashLoopBackOff", message="x")
    assert passes(NOW + 6) == [("Warning", "CrashLoopBackOff")]
    world.replicas[1] = world.replica("b")
    assert passes(NOW + 7) == [("Normal", "Serving"), ("Normal", "AsExpected")]
    world.decision = replace(world.decision, ttft=MET)
    assert passes(NOW + 8) == [("Normal", "TargetsMet")]
