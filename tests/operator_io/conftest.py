"""Builders for the operator's I/O tests: stand-in processes, manifests, facts to wait for, a world in one."""

import asyncio
import copy
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from headway_operator.cluster.local import LocalCluster
from headway_operator.errors import ClusterError, ScrapeError
from headway_operator.keys import AdminKeys
from headway_operator.names import COMPONENT_LABEL, REVISION_LABEL, ServiceKey, component_labels
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.samples import Histogram, Limits, ReplicaSample, Sample, Targets
from headway_operator.scrape import Scraper
from headway_operator.state import ChildKey, Evaluation, Gateway, Observed, Replica, Revision, Site

KEY = ServiceKey("default", "demo")
STANDIN = Path(__file__).with_name("standin_server.py")


class DeploymentBuilder(Protocol):
    def __call__(
        self,
        name: str,
        *,
        environment: dict[str, str] | None = None,
        container: dict[str, Any] | None = None,
        pod: dict[str, Any] | None = None,
    ) -> dict[str, Any]: ...


@pytest.fixture
def key() -> ServiceKey:
    return KEY


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Await a fact: polls a function until what it returns is true, and returns that."""

    async def wait(fact: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            value = fact()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert time.monotonic() < deadline, f"not so within {seconds:g} s"
            await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def deployment() -> DeploymentBuilder:
    """A Deployment whose process is the stand-in: `demo-gateway`, or `demo-REVISION`."""

    def build(
        name: str,
        *,
        environment: dict[str, str] | None = None,
        container: dict[str, Any] | None = None,
        pod: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        component = "gateway" if name.endswith("-gateway") else "runtime"
        labels = component_labels("demo", component)
        if component == "runtime":
            labels["serving.headway.dev/revision"] = name.rpartition("-")[2]
        runtime = {
            "name": component,
            "command": [sys.executable, str(STANDIN)],
            "args": ["gateway" if component == "gateway" else "serve", "--port", "0"],
            "env": [{"name": key, "value": value} for key, value in (environment or {}).items()],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1},
            **(container or {}),
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"containers": [runtime], **(pod or {})},
                },
            },
        }

    return build


@pytest.fixture
def admin_keys() -> AdminKeys:
    return AdminKeys.generate()


@pytest.fixture
async def local_cluster(free_port: int, admin_keys: AdminKeys, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(port=free_port, public_pem=admin_keys.public_pem, workspace_parent=tmp_path)
    async with cluster:
        yield cluster


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
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    costs: dict[str, int] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    memory: Mapping[str, Any] | None = None
    counts_until: float = 0.0
    calls: list[str] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)

    def call(self, name: str, detail: str = "") -> None:
        self.calls.append(f"{name} {detail}".strip())
        for fault in (name, f"{name} {detail}"):
            if fault in self.faults:
                raise self.faults[fault]

    async def check_alone(self, key: ServiceKey) -> None:
        if "check_alone" in self.faults:
            raise self.faults["check_alone"]

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
            evaluations=tuple(self.evaluations.values()),
        )

    async def model_caches(self, namespace: str, names: Sequence[str]) -> Mapping[str, Any]:
        self.call("model_caches", " ".join(names))
        return {name: self.caches.get(name) for name in names}

    async def digests(self, key: ServiceKey, files: Sequence[str]) -> Mapping[str, str]:
        self.call("digests", *files)
        return {name: self.files[name] for name in files if name in self.files}

    async def apply(self, key: ServiceKey, manifest: dict[str, Any]) -> None:
        child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        self.call("apply", f"{child.kind} {child.name}")
        self.children[child] = manifest
        if child.kind == "Deployment":
            self.replicas.setdefault(child.name, 1)
        if child.kind == "Job":
            self.evaluations[child.name] = Evaluation(child.name, "running")

    async def repair(self, key: ServiceKey, child: ChildKey) -> None:
        self.call("repair", f"{child.kind} {child.name}")

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        self.call("scale", f"{revision} {replicas}")
        if revision not in self.replicas:
            raise ClusterError(f"no Deployment {revision}")
        self.replicas[revision] = replicas

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        self.call("prune", f"{child.kind} {child.name}")
        del self.children[child]
        self.evaluations.pop(child.name, None)

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        self.call("set_deletion_cost", replica)
        self.costs[replica] = cost

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        return status

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

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any], until: float) -> None:
        self.call("save_memory")
        self.counts_until = until
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
        # Those who patch wait for each other.
        self.together: asyncio.Barrier | None = None

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
                histograms=dict.fromkeys(HISTOGRAMS, Histogram((1.0,), (0, 0), 0, 0.0)),
            )
        return Sample(self._now(), samples)

    async def patch_limits(self, key: ServiceKey, address: str, body: Mapping[str, Any]) -> None:
        self.patches.append((address, dict(body)))
        if self.together is not None:
            await self.together.wait()
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

    async def settle(self) -> Outcome:
        """As many passes as it takes until nothing is left to do; the last one."""
        for _ in range(4):
            outcome = await self.step()
        return outcome

    def condition(self, name: str) -> dict[str, Any]:
        return next(c for c in self.cluster.status["conditions"] if c["type"] == name)

    def told(self, name: str) -> tuple[str, str]:
        return self.condition(name)["status"], self.condition(name)["reason"]

    def runtime(self) -> dict[str, int]:
        """Replicas of each revision there is."""
        return {name: n for name, n in self.cluster.replicas.items() if self.is_runtime(name)}

    def is_runtime(self, name: str) -> bool:
        return ChildKey("Deployment", name) in self.cluster.children and not name.endswith("-gateway")

    def end(self, value: float = 0.0002, **changes: Any) -> str:
        """The evaluation that runs comes to its end."""
        (running,) = [one for one in self.cluster.evaluations.values() if one.phase == "running"]
        check = {"name": "mean KL divergence", "limit": 0.01, "unit": "nats", "note": ""}
        verdict = {
            "schema_version": 1,
            "passed": value <= 0.01,
            "tasks": [],
            "left_out": 0,
            "checks": [{**check, "value": value, "passed": value <= 0.01}],
        }
        ended = Evaluation(running.name, "ended", output=json.dumps(verdict))
        self.cluster.evaluations[running.name] = replace(ended, **changes)
        return running.name


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
    return Stage(cluster, scraper, World(cluster, scraper, admin_keys, clock), manifest, clock)
