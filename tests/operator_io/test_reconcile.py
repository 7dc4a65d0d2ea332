"""The list of steps against a cluster in memory, with faults put into single steps."""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from headway_operator.errors import ClusterError, ScrapeError, UnavailableError
from headway_operator.keys import AdminKeys
from headway_operator.names import COMPONENT_LABEL, REVISION_LABEL
from headway_operator.reconcile import Carried, Outcome, World, reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import (
    ChildKey,
    Gateway,
    Histogram,
    Limits,
    Observed,
    Replica,
    ReplicaSample,
    Revision,
    Sample,
    ServiceKey,
    Site,
    Targets,
)

HISTOGRAMS = ("ttft", "queue", "prefill", "tpot", "step")
COUNTERS = (
    *("received", "finished", "aborted", "rejected", "errors"),
    *("ttft_met", "ttft_missed", "tpot_met", "tpot_missed"),
    *("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"),
)


@dataclass
class Clock:
    """Seconds since the epoch, moved by the test."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MemoryCluster:
    """`Cluster` in memory: replicas are ready as soon as they are wanted.

    faults: a method, or a method with what it is called for -> what it raises.
    """

    site: Site
    children: dict[ChildKey, dict[str, Any]] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    costs: dict[str, int] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    memory: Mapping[str, Any] | None = None
    calls: list[str] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)

    def call(self, name: str, detail: str = "") -> None:
        self.calls.append(f"{name} {detail}".strip())
        for fault in (name, f"{name} {detail}"):
            if fault in self.faults:
                raise self.faults[fault]

    async def observe(self, key: ServiceKey) -> Observed:
        self.call("observe")
        revisions, replicas = [], []
        for child, manifest in self.children.items():
            labels = manifest["metadata"]["labels"]
            if child.kind == "Deployment" and labels[COMPONENT_LABEL] == "runtime":
                count = self.replicas[child.name]
                revisions.append(Revision(child.name, labels[REVISION_LABEL], count, 0.0))
                for number in range(count):
                    name = f"{child.name}-{number}"
                    address = f"http://{name}:8000"
                    replicas.append(Replica(name, labels[REVISION_LABEL], "ready", address, 0.0, 0.0))
        has_gateway = ChildKey("Deployment", f"{key.name}-gateway") in self.children
        return Observed(
            revisions=tuple(revisions),
            replicas=tuple(replicas),
            gateway=Gateway(ready=has_gateway),
            children=frozenset(self.children),
            url="http://demo",
        )

    async def apply(self, key: ServiceKey, manifest: dict[str, Any]) -> None:
        child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        self.call("apply", f"{child.kind} {child.name}")
        self.children[child] = manifest
        if child.kind == "Deployment":
            self.replicas.setdefault(child.name, 1)

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        self.call("scale", f"{revision} {replicas}")
        if revision not in self.replicas:
            raise ClusterError(f"no Deployment {revision}")
        self.replicas[revision] = replicas

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        self.call("prune", f"{child.kind} {child.name}")
        del self.children[child]

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        self.call("set_deletion_cost", replica)
        self.costs[replica] = cost

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        self.call("write_status")
        self.status = copy.deepcopy(dict(status))

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        self.call("emit", reason)
        self.events.append((kind, reason, message))

    async def load_memory(self, key: ServiceKey) -> Mapping[str, Any] | None:
        self.call("load_memory")
        return self.memory

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any]) -> None:
        self.call("save_memory")
        self.memory = memory

    def named(self, name: str) -> list[str]:
        return [call for call in self.calls if call.split()[0] == name]


class QuietScraper(Scraper):
    """Every ready replica says that it idles; limits and targets are those last patched."""

    def __init__(self, keys: AdminKeys, clock: Any) -> None:
        super().__init__(keys, clock)
        self._now = clock
        self.state: dict[str, dict[str, Any]] = {}
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False

    async def sample(self, key: ServiceKey, observed: Observed) -> Sample:
        samples = {}
        for replica in observed.replicas:
            assert replica.address is not None
            state = self.state.setdefault(
                replica.address,
                {"max_num_seqs": 4, "max_num_batched_tokens": 256, "ttft_milliseconds": None},
            )
            samples[replica.name] = ReplicaSample(
                instance=replica.name,
                taken_at=self._now(),
                limits=Limits(state["max_num_seqs"], state["max_num_batched_tokens"]),
                envelope=Limits(64, 2048),
                targets=Targets(state["ttft_milliseconds"], state.get("tpot_milliseconds")),
                running=0,
                waiting=0,
                oldest_waiting_seconds=0.0,
                kv_blocks_used=0,
                kv_blocks_total=100,
                draining=False,
                counters=dict.fromkeys(COUNTERS, 0),
                histograms=dict.fromkeys(HISTOGRAMS, Histogram((1.0,), (0, 0), 0.0)),
            )
        return Sample(self._now(), samples)

    async def patch_limits(self, key: ServiceKey, address: str, body: Mapping[str, Any]) -> None:
        self.patches.append((address, dict(body)))
        if self.refuses:
            raise ScrapeError(f"PATCH {address}: answered 422")
        self.state[address].update(body)


@dataclass
class Stage:
    """A world in memory, and one service in it."""

    cluster: MemoryCluster
    scraper: QuietScraper
    world: World
    manifest: dict[str, Any]
    clock: Clock
    carried: Carried = field(default_factory=Carried)

    async def step(self, seconds: float = 5.0) -> Outcome:
        self.clock.now += seconds
        self.cluster.calls.clear()
        manifest = {**copy.deepcopy(self.manifest), "status": self.cluster.status}
        return await reconcile(self.world, manifest, self.carried)

    def condition(self, name: str) -> dict[str, Any]:
        return next(c for c in self.cluster.status["conditions"] if c["type"] == name)


@pytest.fixture
def stage(admin_keys: AdminKeys) -> Stage:
    site = Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000)
    cluster = MemoryCluster(site)
    clock = Clock()
    scraper = QuietScraper(admin_keys, clock)
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "default", "uid": "u1", "generation": 1},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "slo": {"ttftMilliseconds": 300},
            "scaling": {"minReplicas": 2, "maxReplicas": 4},
            "batching": {"maxNumSeqs": {"initial": 8}, "maxNumBatchedTokens": {"initial": 512}},
        },
    }
    return Stage(cluster, scraper, World(cluster, scraper, admin_keys.public_pem, clock), manifest, clock)


async def settled(stage: Stage) -> Outcome:
    for _ in range(4):
        outcome = await stage.step()
    return outcome


async def test_a_new_service_gets_its_children_replicas_limits_and_status(stage: Stage) -> None:
    outcome = await settled(stage)
    assert outcome.problems == []
    kinds = {child.kind for child in stage.cluster.children}
    assert kinds == {"ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service", "Deployment"}
    (revision,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    assert stage.cluster.replicas[revision] == 2
    assert len(stage.scraper.state) == 2
    for state in stage.scraper.state.values():
        assert (state["max_num_seqs"], state["max_num_batched_tokens"]) == (8, 512)
        assert state["ttft_milliseconds"] == 300.0
    assert stage.condition("Ready")["status"] == "True"
    assert stage.cluster.status["observedGeneration"] == 1
    assert ("Normal", "Serving") in {event[:2] for event in stage.cluster.events}


async def test_steps_come_in_the_order_that_the_module_states(stage: Stage) -> None:
    await stage.step()
    order = [name for name, _ in itertools.groupby(call.split()[0] for call in stage.cluster.calls)]
    assert order == ["observe", "load_memory", "apply", "scale", "write_status", "emit", "save_memory"]


async def test_a_settled_service_is_left_in_peace(stage: Stage) -> None:
    await settled(stage)
    num_events, num_patches = len(stage.cluster.events), len(stage.scraper.patches)
    await stage.step()
    assert stage.cluster.named("scale") == []
    assert stage.cluster.named("prune") == []
    assert stage.cluster.named("write_status") == []
    assert stage.cluster.named("save_memory") == []
    assert (len(stage.cluster.events), len(stage.scraper.patches)) == (num_events, num_patches)


async def test_memory_is_saved_at_most_once_a_minute_and_read_once(stage: Stage) -> None:
    num_saved = num_read = 0
    for _ in range(60):
        await stage.step(5.0)
        num_saved += len(stage.cluster.named("save_memory"))
        num_read += len(stage.cluster.named("load_memory"))
    assert 2 <= num_saved <= 6
    assert num_read == 1


async def test_an_operator_that_restarts_changes_nothing(stage: Stage) -> None:
    await settled(stage)
    children = copy.deepcopy(stage.cluster.children)
    replicas = dict(stage.cluster.replicas)
    stage.carried = Carried()
    await stage.step()
    assert stage.cluster.children == children
    assert stage.cluster.replicas == replicas
    assert stage.cluster.named("scale") == []
    assert stage.cluster.named("emit") == []


async def test_a_checkpoint_older_than_the_last_decision_undoes_nothing(stage: Stage) -> None:
    await settled(stage)
    (revision,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    assert stage.cluster.memory is not None
    assert (stage.cluster.memory["replicas"], stage.cluster.memory["limits"]) == (2, [8, 512])
    # What the operator decided after the checkpoint, before it ended.
    stage.cluster.replicas[revision] = 3
    later = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "ttft_milliseconds": 300.0}
    stage.scraper.state = {f"http://{revision}-{number}:8000": dict(later) for number in range(3)}
    stage.carried = Carried()
    await stage.step()
    assert stage.cluster.replicas[revision] == 3
    assert list(stage.scraper.state.values()) == [later] * 3


async def test_an_edited_slo_reaches_replicas_without_another_revision(stage: Stage) -> None:
    await settled(stage)
    names = set(stage.cluster.replicas)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.manifest["metadata"]["generation"] = 2
    await settled(stage)
    assert set(stage.cluster.replicas) == names
    assert {state["ttft_milliseconds"] for state in stage.scraper.state.values()} == {450.0}
    assert stage.cluster.status["observedGeneration"] == 2


async def test_another_model_replaces_the_revision_and_prunes_the_old_one(stage: Stage) -> None:
    await settled(stage)
    (before,) = (name for name in stage.cluster.replicas if not name.endswith("-gateway"))
    stage.manifest["spec"]["model"]["maxModelLen"] = 1024
    for _ in range(3):
        await settled(stage)
    deployments = {child.name for child in stage.cluster.children if child.kind == "Deployment"}
    assert len(deployments) == 2
    assert before not in deployments


async def test_a_spec_that_cannot_be_honoured_is_told_and_leaves_what_serves(stage: Stage) -> None:
    await settled(stage)
    replicas = dict(stage.cluster.replicas)
    stage.manifest["spec"]["tensorParallelSize"] = 4
    stage.manifest["spec"]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    outcome = await stage.step()
    assert outcome.problems[0][0] == "read"
    assert stage.condition("Ready")["reason"] == "InvalidSpec"
    assert "spec.tensorParallelSize=4" in stage.condition("Ready")["message"]
    assert stage.cluster.replicas == replicas
    assert stage.cluster.named("apply") == []
    assert ("Warning", "InvalidSpec") in {event[:2] for event in stage.cluster.events}


@pytest.mark.parametrize(
    "step",
    ["apply Service demo", "apply Deployment demo-gateway", "scale", "write_status", "emit", "save_memory"],
)
async def test_a_failing_step_is_recorded_stops_no_other_and_is_tried_again(stage: Stage, step: str) -> None:
    stage.cluster.faults[step] = UnavailableError(f"{step} was refused")
    outcome = await stage.step()
    assert [message for _, message in outcome.problems if f"{step} was refused" in message]
    made = {call.split()[0] for call in stage.cluster.calls}
    assert made >= {"apply", "scale", "write_status", "save_memory"}
    if step.startswith(("apply", "scale")):
        assert stage.condition("Degraded")["reason"] == "StepFailed"
        assert "was refused" in stage.condition("Degraded")["message"]
    del stage.cluster.faults[step]
    outcome = await settled(stage)
    assert outcome.problems == []
    assert stage.condition("Degraded")["status"] == "False"
    assert stage.condition("Ready")["status"] == "True"


async def test_nothing_is_pruned_while_an_apply_fails(stage: Stage) -> None:
    await settled(stage)
    stray = ChildKey("ConfigMap", "demo-stray")
    stage.cluster.children[stray] = {"kind": "ConfigMap", "metadata": {"name": "demo-stray", "labels": {}}}
    stage.cluster.faults["apply ServiceAccount demo-gateway"] = UnavailableError("no")
    await stage.step()
    assert stray in stage.cluster.children
    stage.cluster.faults.clear()
    await stage.step()
    assert stray not in stage.cluster.children


async def test_without_an_observation_nothing_is_done(stage: Stage) -> None:
    await settled(stage)
    stage.cluster.faults["observe"] = UnavailableError("the API server is away")
    with pytest.raises(UnavailableError):
        await stage.step()
    assert stage.cluster.calls == ["observe"]


async def test_an_unreadable_checkpoint_costs_the_memory_and_no_more(stage: Stage) -> None:
    stage.cluster.memory = {"version": 1, "slices": "nonsense"}
    outcome = await settled(stage)
    assert outcome.problems == []
    assert stage.condition("Ready")["status"] == "True"


async def test_a_replica_that_refuses_its_limits_is_reported_and_patched_again(stage: Stage) -> None:
    await settled(stage)
    stage.manifest["spec"]["slo"]["ttftMilliseconds"] = 450
    stage.scraper.refuses = True
    outcome = await stage.step()
    assert [step for step, _ in outcome.problems] == [
        f"patch limits of {name}" for name in sorted(outcome.sample.replicas if outcome.sample else {})
    ]
    assert stage.condition("Degraded")["reason"] == "StepFailed"
    stage.scraper.refuses = False
    outcome = await stage.step()
    assert outcome.problems == []


async def test_a_problem_that_stays_is_logged_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.cluster.faults["apply Service demo"] = UnavailableError("the webhook is away")
    for _ in range(3):
        outcome = await stage.step()
        assert len(outcome.problems) == 1
    stage.cluster.faults.clear()
    await stage.step()
    stage.cluster.faults["apply Service demo"] = UnavailableError("the webhook is away")
    await stage.step()
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in said] == [
        "default/demo: apply Service demo failed and is tried again: the webhook is away"
    ] * 2
