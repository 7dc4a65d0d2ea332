"""What must be done, from what is and what should be."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.manifests import render
from headway_operator.plan import plan
from headway_operator.samples import GatewaySample, Limits, Routing, Sample, Targets
from headway_operator.spec import Service, parse
from headway_operator.state import (
    Attainment,
    ChildKey,
    Decision,
    Gateway,
    Observed,
    Plan,
    Rendered,
    Replica,
    ReplicaPhase,
    Revision,
)

NOTHING = Attainment(None, None, 0, 0, "unknown")
OLD = Revision("demo-0ld00000", "0ld00000", 2, 100.0)


def decision(replicas: int) -> Decision:
    return Decision(1000.0, replicas, Limits(8, 512), "Steady", "steady", "", NOTHING, NOTHING, {})


class Rollout:
    """A service between two revisions: how many replicas each has, and in which phase."""

    def __init__(self, build: Any, spec: dict[str, Any] | None = None) -> None:
        self.service: Service = parse(build.manifest(spec))
        self.rendered: Rendered = render(self.service, build.site(), "PEM", frozenset())
        self.current = Revision(self.rendered.revision.name, self.rendered.revision.hash, 0, 200.0)
        self.revisions: list[Revision] = []
        self.replicas: list[Replica] = []
        self.build = build

    def has(self, revision: Revision, *phases: ReplicaPhase) -> None:
        self.revisions.append(replace(revision, replicas=len(phases)))
        for phase in phases:
            name = f"{revision.name}-{len(self.replicas)}"
            self.replicas.append(self.build.replica(name, revision=revision.hash, phase=phase))

    def plan(self, wanted: int = 2, sample: Sample | None = None) -> Plan:
        observed = Observed(tuple(self.revisions), tuple(self.replicas))
        return plan(self.service, self.rendered, observed, sample or Sample(0.0), decision(wanted))


@pytest.fixture
def rollout(build: Any) -> Rollout:
    return Rollout(build)


def test_a_new_service_gets_its_revision_scaled(rollout: Rollout) -> None:
    result = rollout.plan(2)
    assert result.scale == {rollout.current.name: 2}
    assert result.manifests == rollout.rendered.manifests


def test_nothing_is_scaled_that_has_its_number(rollout: Rollout) -> None:
    rollout.has(rollout.current, "ready", "starting")
    assert rollout.plan(2).scale == {}


def test_fixed_replicas_win_over_the_decision(build: Any) -> None:
    assert list(Rollout(build, {"replicas": 5}).plan(1).scale.values()) == [5]


def test_the_old_revision_serves_until_the_new_one_is_ready(rollout: Rollout) -> None:
    rollout.has(OLD, "ready", "ready")
    rollout.has(rollout.current, "ready", "starting")
    result = rollout.plan(2)
    assert result.scale == {}
    assert ChildKey("Deployment", OLD.name) in result.keep


def test_the_old_revision_goes_once_the_new_one_is_ready(rollout: Rollout) -> None:
    rollout.has(OLD, "ready", "ready")
    rollout.has(rollout.current, "ready", "ready")
    result = rollout.plan(2)
    assert result.scale == {OLD.name: 0}
    assert ChildKey("Deployment", OLD.name) in result.keep


@pytest.mark.parametrize(
    ("phases", "want_scale"),
    [
        pytest.param(("pending", "failed"), {OLD.name: 0}, id="serves nobody: frees its place at once"),
        pytest.param(("starting", "failed"), {}, id="may serve again: stays"),
        pytest.param(("ready", "failed"), {}, id="serves: stays"),
    ],
)
def test_an_old_revision_while_the_new_one_starts(
    rollout: Rollout, phases: tuple[ReplicaPhase, ...], want_scale: dict[str, int]
) -> None:
    rollout.has(OLD, *phases)
    rollout.has(rollout.current, "starting", "starting")
    assert rollout.plan(2).scale == want_scale


def test_an_old_revision_is_pruned_when_its_last_replica_is_gone(rollout: Rollout) -> None:
    rollout.has(rollout.current, "ready")
    rollout.revisions.append(replace(OLD, replicas=0))
    rollout.replicas.append(rollout.build.replica("last", revision=OLD.hash, phase="draining"))
    assert ChildKey("Deployment", OLD.name) in rollout.plan(1).keep
    rollout.replicas.pop()
    assert ChildKey("Deployment", OLD.name) not in rollout.plan(1).keep
    assert ChildKey("Deployment", rollout.current.name) in rollout.plan(1).keep


def test_nobody_serves_for_a_service_scaled_to_zero(build: Any) -> None:
    rollout = Rollout(build, {"replicas": 0})
    rollout.has(OLD, "ready")
    rollout.has(rollout.current, "ready")
    assert rollout.plan(3).scale == {rollout.current.name: 0, OLD.name: 0}


def test_a_whole_rollout_never_lowers_what_serves(rollout: Rollout) -> None:
    """Follow the plan step by step: new replicas become ready one at a time, old ones drain one at a time."""
    replicas = {OLD.name: ["ready"] * 3, rollout.current.name: []}
    lowest, is_pruned = 3, False
    for _ in range(20):
        rollout.revisions, rollout.replicas = [], []
        for revision in (OLD, rollout.current):
            if not (revision is OLD and is_pruned):
                rollout.has(revision, *replicas[revision.name])  # type: ignore[arg-type]
        result = rollout.plan(3)
        is_pruned = is_pruned or ChildKey("Deployment", OLD.name) not in result.keep
        for name, wanted in result.scale.items():
            phases = replicas[name]
            replicas[name] = (phases + ["starting"] * wanted)[:wanted]
        starting = replicas[rollout.current.name]
        if "starting" in starting:
            starting[starting.index("starting")] = "ready"
        lowest = min(lowest, sum(phases.count("ready") for phases in replicas.values()))
    assert (lowest, is_pruned) == (3, True)
    assert replicas == {OLD.name: [], rollout.current.name: ["ready"] * 3}


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({"limits": Limits(8, 512), "targets": Targets(300.0, None)}, None, id="lacks nothing"),
        pytest.param(
            {"limits": Limits(8, 512), "targets": Targets(250.0, 40.0)},
            {"ttft_milliseconds": 300.0, "tpot_milliseconds": None},
            id="other targets",
        ),
        pytest.param(
            {"limits": Limits(4, 512), "targets": Targets(300.0, None)},
            {"max_num_seqs": 8, "max_num_batched_tokens": 512},
            id="other limits go as a pair",
        ),
        pytest.param(
            {"limits": Limits(4, 4), "targets": Targets(300.0, None), "envelope": Limits(4, 128)},
            {"max_num_seqs": 4, "max_num_batched_tokens": 128},
            id="bounded by its own envelope",
        ),
        pytest.param({"limits": Limits(4, 512), "draining": True}, None, id="draining is left alone"),
    ],
)
def test_patches_what_a_replica_lacks(
    rollout: Rollout, build: Any, changes: Mapping[str, Any], want: Mapping[str, Any] | None
) -> None:
    rollout.has(rollout.current, "ready")
    result = rollout.plan(1, Sample(0.0, {"a": build.sample(0.0, **changes), "silent": None}))
    assert result.patch == ({"a": want} if want else {})


def test_the_emptiest_replica_goes_first(rollout: Rollout, build: Any) -> None:
    rollout.has(rollout.current, "ready", "ready", "ready", "starting")
    busy, idle, silent, _ = (replica.name for replica in rollout.replicas)
    rollout.replicas[1] = replace(rollout.replicas[1], deletion_cost=5)
    sample = Sample(
        0.0, {busy: build.sample(0.0, running=3, waiting=2), idle: build.sample(0.0), silent: None}
    )
    result = rollout.plan(2, sample)
    assert result.scale == {rollout.current.name: 2}
    assert result.deletion_costs == {busy: 5, idle: 0, silent: -1}
    rollout.replicas[0] = replace(rollout.replicas[0], deletion_cost=5)
    assert busy not in rollout.plan(2, sample).deletion_costs


def test_costs_are_written_only_when_some_but_not_all_go(rollout: Rollout, build: Any) -> None:
    rollout.has(rollout.current, "ready", "ready")
    sample = Sample(0.0, {replica.name: build.sample(0.0, running=1) for replica in rollout.replicas})
    assert rollout.plan(2, sample).deletion_costs == {}
    assert rollout.plan(3, sample).deletion_costs == {}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, Routing(1024, 30.0), id="what a gateway goes by from its start"),
        pytest.param({"scaling": {"minReplicas": 0}}, Routing(1024, 600.0), id="time for a replica to start"),
        pytest.param({"scaling": {"minReplicas": 0}, "replicas": 1}, Routing(1024, 30.0), id="never asleep"),
        pytest.param({"waiting": {"maxRequests": 7, "timeoutSeconds": 9}}, Routing(7, 9.0), id="as told"),
        pytest.param({"suspend": True}, Routing(1024, 30.0, is_suspended=True), id="suspended"),
    ],
)
def test_a_gateway_is_told_what_it_lacks_and_no_more(build: Any, spec: dict[str, Any], want: Routing) -> None:
    rollout = Rollout(build, spec)
    want = replace(want, revisions=(rollout.current.name,))
    other = Routing(1, 1.0)

    def told(routing: Routing | None) -> dict[str, Routing]:
        gateway = GatewaySample("g", 0.0, 0, 0.0, 0, {}, routing)
        return dict(rollout.plan(1, Sample(0.0, gateways={"http://g": gateway, "http://silent": None})).route)

    assert told(other) == {"http://g": want}
    assert told(want) == {}
    assert told(None) == {}, "one of an earlier version has no ear for it"


def test_a_suspended_service_wants_no_replica_whatever_is_fixed_or_decided(build: Any) -> None:
    rollout = Rollout(build, {"replicas": 5, "suspend": True})
    rollout.has(rollout.current, "ready", "ready")
    assert rollout.plan(3).scale == {rollout.current.name: 0}


@pytest.mark.parametrize(
    ("has", "want"), [(None, {}), (1, {"demo-gateway": 3}), (3, {}), (0, {"demo-gateway": 3})]
)
def test_gateways_are_as_many_as_asked_for_once_there_is_a_deployment(
    build: Any, has: int | None, want: dict[str, int]
) -> None:
    told = Rollout(build, {"gateway": {"replicas": 3}})
    told.has(told.current, "ready")
    observed = Observed(tuple(told.revisions), tuple(told.replicas), gateway=Gateway(replicas=has))
    result = plan(told.service, told.rendered, observed, Sample(0.0), decision(1))
    assert result.scale == want


def test_more_gateways_make_no_other_template(build: Any) -> None:
    one, three = Rollout(build).rendered, Rollout(build, {"gateway": {"replicas": 3}}).rendered
    assert three.revision == one.revision
