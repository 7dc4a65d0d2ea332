"""A toy cluster with room for so many pods, driven by the real renderer, rollout, plan and status."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headway_operator import conditions
from headway_operator.manifests import render
from headway_operator.plan import plan, wanted_replicas
from headway_operator.rollout import CanaryEvidence, Rollout, follow
from headway_operator.samples import GatewaySample, Limits, ReplicaSample, RevisionTotals, Routing, Sample
from headway_operator.spec import InferenceServiceStatus, parse
from headway_operator.state import (
    Attainment,
    ChildKey,
    Decision,
    Gateway,
    Observed,
    Rendered,
    Replica,
    ReplicaPhase,
    Revision,
)

INTERVAL_SECONDS = 5.0
NOTHING = Attainment(None, None, 0, 0, "unknown")
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


@dataclass(slots=True)
class Pod:
    """One pod; `passes` counts those it has seen in its phase."""

    name: str
    revision: str
    created_at: float
    phase: ReplicaPhase = "pending"
    restarts: int = 0
    reason: str = ""
    message: str = ""
    ttft: dict[float, int] = field(default_factory=dict)
    met: int = 0
    missed: int = 0


@dataclass(slots=True)
class Toy:
    """Pods are placed while there is room, start in one pass and are ready in the next; crash where told.

    crashing: hashes of revisions whose pods end as soon as they start. told: what the gateway goes by.
    """

    manifest: dict[str, Any]
    build: Any
    room: int = 100
    wanted: int = 2
    now: float = 1_800_000_000.0
    status: dict[str, Any] = field(default_factory=dict)
    revisions: dict[str, Revision] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    crashing: set[str] = field(default_factory=set)
    told: Routing | None = field(default_factory=lambda: Routing(1024, 30.0))
    answered: dict[str, RevisionTotals] = field(default_factory=dict)
    evidence: CanaryEvidence | None = None
    image: str = "example.test/runtime:1"
    num_made: int = 0
    rendered: Rendered | None = None
    rollout: Rollout = field(default_factory=Rollout)

    def edit(self, **spec: Any) -> None:
        """What a user would apply."""
        self.manifest = {**self.manifest, "spec": {**self.manifest["spec"], **spec}}

    def step(self, passes: int = 1) -> None:
        """Let passes of the operator go by, and the cluster follow each."""
        for _ in range(passes):
            self.now += INTERVAL_SECONDS
            self._pass()
            self._move()

    def until(self, fact: Callable[[], bool], passes: int = 100) -> None:
        """Step until it is so."""
        for _ in range(passes):
            if fact():
                return
            self.step()
        raise AssertionError(f"not so within {passes} passes: {self.status['conditions']}")

    def told_of(self, kind: str) -> tuple[str, str, str]:
        found = next(c for c in self.status["conditions"] if c["type"] == kind)
        return found["status"], found["reason"], found["message"]

    def count(self, hash_: str, *phases: ReplicaPhase) -> int:
        return sum(pod.revision == hash_ and pod.phase in phases for pod in self.pods)

    @property
    def num_ready(self) -> int:
        return sum(pod.phase == "ready" for pod in self.pods)

    @property
    def current(self) -> str:
        """Hash of the revision that is rendered now."""
        assert self.rendered is not None
        return self.rendered.revision.hash

    def observed(self) -> Observed:
        children = {ChildKey("Deployment", name) for name in self.revisions}
        return Observed(
            revisions=tuple(self.revisions.values()),
            replicas=tuple(self._replica(pod) for pod in self.pods),
            gateway=Gateway(ready=True, addresses=("http://gateway",)),
            children=frozenset(children | {ChildKey("Deployment", "demo-gateway")}),
        )

    def sample(self) -> Sample:
        gateway = GatewaySample(
            "gateway", self.now, 0, 0.0, 0, {"rejected": 0}, self.told, dict(self.answered)
        )
        ready = [pod for pod in self.pods if pod.phase == "ready"]
        return Sample(self.now, {pod.name: self._sampled(pod) for pod in ready}, {"http://gateway": gateway})

    def _replica(self, pod: Pod) -> Replica:
        is_ready = pod.phase == "ready"
        return Replica(
            pod.name,
            pod.revision,
            pod.phase,
            f"http://{pod.name}",
            pod.created_at,
            self.now if is_ready else None,
            pod.reason,
            pod.message,
            pod.restarts,
        )

    def _sampled(self, pod: Pod) -> ReplicaSample:
        result: ReplicaSample = self.build.sample(
            self.now,
            instance=pod.name,
            counters={"ttft_met": pod.met, "ttft_missed": pod.missed},
            histograms={
                name: self.build.histogram(pod.ttft if name == "ttft" else {})
                for name in ("ttft", "queue", "prefill", "tpot", "step")
            },
        )
        return result

    def _pass(self) -> None:
        service = parse({**self.manifest, "status": self.status})
        observed, sample = self.observed(), self.sample()
        limits = Limits(8, 512)
        decision = Decision(self.now, self.wanted, limits, "Steady", "steady", "", NOTHING, NOTHING, {})
        site = self.build.site(runtime_image=self.image)
        rendered = render(service, site, "PEM", observed.children)
        wanted = wanted_replicas(service, decision)
        rendered, rollout = follow(service, rendered, observed, sample, wanted, None, self.evidence, self.now)
        self.rendered, self.rollout, self.evidence = rendered, rollout, rollout.evidence
        todo = plan(service, rendered, observed, sample, decision, rollout)
        self.status = conditions.status(
            service, rendered, observed, sample, decision, self.now, rollout=rollout
        )
        InferenceServiceStatus.model_validate(self.status)
        for manifest in todo.manifests:
            name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
            if manifest["kind"] == "Deployment" and "serving.headway.dev/revision" in labels:
                hash_ = labels["serving.headway.dev/revision"]
                self.revisions.setdefault(name, Revision(name, hash_, 0, self.now))
        for name, replicas in todo.scale.items():
            self.revisions[name] = replace(self.revisions[name], replicas=replicas)
        for name in list(self.revisions):
            if ChildKey("Deployment", name) not in todo.keep:
                del self.revisions[name]
        for routing in todo.route.values():
            self.told = routing

    def _move(self) -> None:
        self.pods = [pod for pod in self.pods if pod.phase != "draining"]
        for pod in self.pods:
            if pod.phase == "starting" and pod.revision in self.crashing:
                pod.phase, pod.reason, pod.message = "failed", "CrashLoopBackOff", "out of cheese"
            elif pod.phase == "starting":
                pod.phase, pod.reason, pod.message = "ready", "", ""
            elif pod.phase == "failed":
                pod.phase, pod.restarts = "starting", pod.restarts + 1
        for revision in self.revisions.values():
            self._follow(revision)
        for pod in self.pods:
            if pod.phase != "pending":
                continue
            occupied = sum(one.phase not in ("pending",) for one in self.pods)
            if occupied < self.room:
                pod.phase, pod.reason, pod.message = "starting", "", ""
            else:
                pod.reason, pod.message = "Unschedulable", NO_ROOM

    def _follow(self, revision: Revision) -> None:
        mine = [pod for pod in self.pods if pod.revision == revision.hash and pod.phase != "draining"]
        for _ in range(revision.replicas - len(mine)):
            self.num_made += 1
            self.pods.append(Pod(f"{revision.name}-{self.num_made}", revision.hash, self.now))
        unready_first = sorted(mine, key=lambda pod: pod.phase == "ready")
        for pod in unready_first[: max(0, len(mine) - revision.replicas)]:
            if pod.phase == "pending":
                self.pods.remove(pod)
            else:
                pod.phase = "draining"


@pytest.fixture
def toy(build: Any) -> Toy:
    """A service of two replicas, all ready."""
    toy = Toy(build.manifest({"replicas": 2}), build)
    toy.until(lambda: toy.num_ready == 2)
    toy.step()
    return toy
