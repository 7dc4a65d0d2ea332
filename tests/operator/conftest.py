"""Builders for the operator's frozen values, and a toy fleet that queues, to drive the controller."""

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.operator.law_fleet import Fleet as LawFleet
from tests.operator.slo_scene import Scene

from headway_operator.samples import GatewaySample, Histogram, Limits, ReplicaSample, Sample, Targets
from headway_operator.slo import Memory, Target, decide
from headway_operator.spec import Manifest
from headway_operator.state import Decision, Gateway, Observed, Replica, Revision, Site, Start

EDGES = tuple(1.12**i for i in range(105))


def build_target(**changes: Any) -> Target:
    """TTFT 300 ms and TPOT 40 ms at P95, one to four replicas, limits from 1/16 to 64/2048."""
    target = Target(
        targets=Targets(300.0, 40.0),
        percentile=95,
        window_seconds=300.0,
        fixed_replicas=None,
        min_replicas=1,
        max_replicas=4,
        stabilization_seconds=60.0,
        lowest=Limits(1, 16),
        highest=Limits(64, 2048),
        initial=Limits(2, 512),
    )
    return replace(target, **changes)


def build_histogram(values: Mapping[float, int] | None = None) -> Histogram:
    """A histogram on the replicas' grid, from milliseconds to counts."""
    counts = [0] * (len(EDGES) + 1)
    for value, count in (values or {}).items():
        counts[bisect_left(EDGES, value)] += count
    total = sum(value * count for value, count in (values or {}).items())
    return Histogram(EDGES, tuple(counts), sum(counts), total)


def build_sample(taken_at: float, **changes: Any) -> ReplicaSample:
    """The sample of an idle replica at 2/512, judged by 300 and 40 ms."""
    sample = ReplicaSample(
        instance="one",
        taken_at=taken_at,
        limits=Limits(2, 512),
        envelope=Limits(64, 2048),
        targets=Targets(300.0, 40.0),
        running=0,
        waiting=0,
        oldest_waiting_seconds=0.0,
        kv_blocks_used=0,
        kv_blocks_total=1000,
        draining=False,
        counters={},
        histograms={name: build_histogram() for name in ("ttft", "queue", "prefill", "tpot", "step")},
    )
    return replace(sample, **changes)


def build_replica(name: str, **changes: Any) -> Replica:
    """A replica that has been ready since the beginning."""
    replica = Replica(name, "1a2b3c4d", "ready", f"http://{name}", created_at=0.0, ready_at=0.0)
    return replace(replica, **changes)


def build_manifest(spec: Mapping[str, Any] | None = None, **metadata: Any) -> Manifest:
    """The smallest autoscaled service, with fields of `spec` replaced or added."""
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "team", "uid": "0000-uid", "generation": 3, **metadata},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "slo": {"ttftMilliseconds": 300},
            **(spec or {}),
        },
    }


def build_site(**changes: Any) -> Site:
    """A Kubernetes site whose administrator allows every pod template."""
    site = Site(
        kind="kubernetes",
        runtime_image="example.test/runtime:1",
        gateway_image="example.test/gateway:1",
        admin_public_key_path="/etc/headway/admin/public.pem",
        gateway_backend_arguments=(),
        bind_port=8000,
        allows_unrestricted=True,
    )
    return replace(site, **changes)


@dataclass(slots=True)
class Request:
    """One request inside the toy fleet."""

    received_at: float
    prompt_left: int
    output_left: int
    first_at: float | None = None


@dataclass(slots=True)
class ToyReplica:
    """Steps of 20 ms + 1 ms per running sequence + 0.2 ms per prompt token; first come, first served."""

    name: str
    created_at: float
    ready_at: float
    limits: Limits
    targets: Targets
    slowness: float = 1.0
    num_engine_starts: int = 1
    is_draining: bool = False
    stepped_until: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    ttft: dict[float, int] = field(default_factory=dict)
    tpot: dict[float, int] = field(default_factory=dict)
    queue: dict[float, int] = field(default_factory=dict)
    prefill: dict[float, int] = field(default_factory=dict)

    def count(self, name: str, number: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + number

    def advance(self, until: float) -> None:
        self.stepped_until = max(self.stepped_until, self.ready_at)
        while self.stepped_until < until:
            if self.waiting and not self.running:
                self.stepped_until = max(self.stepped_until, self.waiting[0].received_at)
            while self._can_admit():
                request = self.waiting.popleft()
                _add(self.queue, (self.stepped_until - request.received_at) * 1000)
                self.running.append(request)
            if not self.running:
                self.stepped_until = until
                return
            self._step()

    def _can_admit(self) -> bool:
        has_come = bool(self.waiting) and self.waiting[0].received_at <= self.stepped_until
        return has_come and len(self.running) < self.limits.max_num_seqs

    def _step(self) -> None:
        budget = self.limits.max_num_batched_tokens
        decoding = [request for request in self.running if request.prompt_left == 0]
        budget -= len(decoding)
        prompt_tokens = 0
        finished_prompts = []
        for request in self.running:
            if request.prompt_left and budget > 0:
                tokens = min(budget, request.prompt_left)
                budget -= tokens
                prompt_tokens += tokens
                request.prompt_left -= tokens
                if request.prompt_left == 0:
                    finished_prompts.append(request)
        seconds = (0.020 + 0.001 * len(self.running) + 0.0002 * prompt_tokens) * self.slowness
        self.stepped_until += seconds
        self.count("steps")
        self.count("prompt_tokens", prompt_tokens)
        self.count("generated_tokens", len(decoding) + len(finished_prompts))
        for request in finished_prompts:
            request.first_at = self.stepped_until
            request.output_left -= 1
            milliseconds = (self.stepped_until - request.received_at) * 1000
            _add(self.ttft, milliseconds)
            _add(self.prefill, seconds * 1000)
            self._judge("ttft", milliseconds, self.targets.ttft_milliseconds)
        for request in decoding:
            request.output_left -= 1
            if request.output_left == 0 and request.first_at is not None:
                milliseconds = (self.stepped_until - request.first_at) / 49 * 1000
                _add(self.tpot, milliseconds)
                self._judge("tpot", milliseconds, self.targets.tpot_milliseconds)
                self.running.remove(request)
                self.count("finished")

    def crash(self, now: float, start_seconds: float) -> list[Request]:
        """The engine dies and starts again with empty counters; returns what it had in hand."""
        lost = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self.counters, self.ttft, self.tpot, self.queue, self.prefill = {}, {}, {}, {}, {}
        self.num_engine_starts += 1
        self.ready_at = now + start_seconds
        return lost

    def _judge(self, name: str, milliseconds: float, target: float | None) -> None:
        if target is not None:
            self.count(f"{name}_met" if milliseconds <= target else f"{name}_missed")

    def sample(self, now: float) -> ReplicaSample:
        oldest = now - self.waiting[0].received_at if self.waiting else 0.0
        histograms = {"ttft": self.ttft, "tpot": self.tpot, "queue": self.queue, "prefill": self.prefill}
        return build_sample(
            now,
            instance=f"{self.name} {self.num_engine_starts}",
            limits=self.limits,
            targets=self.targets,
            running=len(self.running),
            waiting=len(self.waiting),
            oldest_waiting_seconds=oldest,
            kv_blocks_used=len(self.running),
            counters=dict(self.counters),
            histograms={name: build_histogram(values) for name, values in histograms.items()},
        )


def _add(histogram: dict[float, int], value: float) -> None:
    edge = next_edge(value)
    histogram[edge] = histogram.get(edge, 0) + 1


def next_edge(value: float) -> float:
    """The edge that stands for every value in its bucket."""
    return EDGES[min(bisect_left(EDGES, value), len(EDGES) - 1)]


@dataclass(slots=True)
class Fleet:
    """Replicas behind a least-loaded gateway, and the controller that moves them, on a clock of its own.

    After each pass the invariants that hold in every situation are checked. `lose(now, name)` says which
    samples are lost.
    """

    target: Target
    start_seconds: float = 8.0
    interval_seconds: float = 2.0
    prompt_tokens: int = 100
    output_tokens: int = 50
    slowness: float = 1.0
    lose: Callable[[float, str], bool] = lambda now, name: False
    now: float = 1000.0
    memory: Memory = field(default_factory=Memory)
    replicas: list[ToyReplica] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    held: deque[Request] = field(default_factory=deque)
    num_made: int = 0
    owed: float = 0.0

    def run(self, seconds: float, requests_per_second: float) -> list[Decision]:
        """Let time pass under a steady load; the decisions taken meanwhile."""
        first = len(self.decisions)
        end = self.now + seconds
        while self.now < end:
            self._serve(requests_per_second)
            self._pass()
        return self.decisions[first:]

    @property
    def wanted(self) -> int:
        return self.decisions[-1].replicas if self.decisions else self.target.min_replicas

    def _serve(self, requests_per_second: float) -> None:
        tick = 0.1
        for _ in range(round(self.interval_seconds / tick)):
            self.now += tick
            self.owed += requests_per_second * tick
            while self.owed >= 1:
                self.owed -= 1
                self.held.append(Request(self.now, self.prompt_tokens, self.output_tokens))
            serving = [r for r in self.replicas if r.ready_at <= self.now and not r.is_draining]
            while self.held and serving:
                least = min(serving, key=lambda r: len(r.running) + len(r.waiting))
                least.waiting.append(self.held.popleft())
            for one in self.replicas:
                one.advance(self.now)
            self.replicas = [r for r in self.replicas if not r.is_draining or r.running or r.waiting]

    def _pass(self) -> None:
        observed, sample = self.observed(), self.sample()
        # A checkpoint must lose nothing: every pass goes through JSON (but not through a restart's caution).
        stored = Memory.from_dict(json.loads(json.dumps(self.memory.to_dict())), self.now)
        kept = stored._replace(
            watched_since=self.memory.watched_since,
            idle_since=self.memory.idle_since,
            marks=self.memory.marks,
            columns=self.memory.columns,
        )
        assert kept == self.memory or not self.decisions
        before = self.wanted
        decision, self.memory = decide(self.target, self.memory, sample, observed, self.now)
        self._check(decision, before, sample)
        self.decisions.append(decision)
        self._follow(decision)

    def _check(self, decision: Decision, before: int, sample: Sample) -> None:
        target, limits = self.target, decision.limits
        assert (
            target.min_replicas <= decision.replicas <= target.max_replicas
            or target.fixed_replicas is not None
        )
        assert target.lowest.max_num_seqs <= limits.max_num_seqs <= target.highest.max_num_seqs
        assert target.lowest.max_num_batched_tokens <= limits.max_num_batched_tokens
        assert limits.max_num_seqs <= limits.max_num_batched_tokens <= target.highest.max_num_batched_tokens
        assert decision.replicas >= before - 1, "one at a time"
        assert decision.replicas <= before + min(4, max(1, before)), "at most doubled, at most four more"
        if any(one is None for one in sample.replicas.values()):
            assert decision.replicas >= before, "never down on partial samples"
        if any(r.ready_at > self.now for r in self.replicas if not r.is_draining):
            assert decision.replicas <= before, "none asked for while one is pending"
        assert decision.cause, decision
        assert decision.message, decision

    def _follow(self, decision: Decision) -> None:
        for one in self.replicas:
            if one.ready_at <= self.now:
                one.limits = decision.limits
        living = [one for one in self.replicas if not one.is_draining]
        for _ in range(decision.replicas - len(living)):
            self.num_made += 1
            self.replicas.append(
                ToyReplica(
                    name=f"replica-{self.num_made}",
                    created_at=self.now,
                    ready_at=self.now + self.start_seconds,
                    limits=decision.limits,
                    targets=self.target.targets,
                    slowness=self.slowness,
                )
            )
        emptiest_first = sorted(living, key=lambda r: len(r.running) + len(r.waiting))
        for one in emptiest_first[: max(0, len(living) - decision.replicas)]:
            one.is_draining = True

    def observed(self) -> Observed:
        replicas = tuple(
            Replica(
                name=one.name,
                revision="1a2b3c4d",
                phase="draining" if one.is_draining else "ready" if one.ready_at <= self.now else "starting",
                address=f"http://{one.name}",
                created_at=one.created_at,
                ready_at=one.ready_at if one.ready_at <= self.now else None,
                num_restarts=one.num_engine_starts - 1,
                start=Start(0.0, 0.0, 0.0, self.start_seconds) if self._has_started_once(one) else None,
            )
            for one in self.replicas
        )
        revisions = (Revision("demo-1a2b3c4d", "1a2b3c4d", self.wanted, 0.0),) if self.replicas else ()
        return Observed(revisions=revisions, replicas=replicas, gateway=Gateway(ready=True))

    def _has_started_once(self, one: ToyReplica) -> bool:
        return one.ready_at <= self.now and one.num_engine_starts == 1

    def sample(self) -> Sample:
        ready = [one for one in self.replicas if one.ready_at <= self.now]
        oldest = self.now - self.held[0].received_at if self.held else 0.0
        gateway = GatewaySample("gateway", self.now, len(self.held), oldest, 0, {"rejected": 0})
        return Sample(
            taken_at=self.now,
            replicas={r.name: None if self.lose(self.now, r.name) else r.sample(self.now) for r in ready},
            gateways={"gateway": gateway},
        )


@dataclass(frozen=True, slots=True)
class Builders:
    """Everything above, for tests."""

    target: Callable[..., Target] = build_target
    histogram: Callable[..., Histogram] = build_histogram
    sample: Callable[..., ReplicaSample] = build_sample
    replica: Callable[..., Replica] = build_replica
    manifest: Callable[..., Manifest] = build_manifest
    site: Callable[..., Site] = build_site
    fleet: Callable[..., Fleet] = Fleet


@pytest.fixture
def build() -> Builders:
    """Builders of the operator's values."""
    return Builders()


@pytest.fixture
def fleet(build: Builders) -> LawFleet:
    """Four replicas whose steps are as a known model has them."""
    return LawFleet(build)


@pytest.fixture
def scene(build: Builders) -> Scene:
    return Scene(build)
