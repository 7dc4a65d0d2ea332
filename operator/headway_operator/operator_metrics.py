"""The operator's own metrics, for Prometheus. The controller reads none of them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway_operator.passes import READ_STEP, Outcome
from headway_operator.quality import Gate
from headway_operator.state import Decision, ServiceKey

LABELS = ("namespace", "name")
WHOLE_PASS = "pass"
# Of passes, waits and calls: from the quickest to what a person would notice.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# As `headway_operator_start_seconds` names them, and `status.startup`.
START_STAGES = {
    "scheduled": "scheduledSeconds",
    "pulled": "pulledSeconds",
    "fetched": "fetchedSeconds",
    "loaded": "loadedSeconds",
    "warm": "warmSeconds",
    "total": "totalSeconds",
}
# Of starts of replicas: an interpreter to a large model from far away.
START_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)


class OperatorMetrics:
    """One registry per operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "headway_operator_reconcile_seconds",
            "Duration of a pass over one service, by whether all of it succeeded",
            ("result",),
            registry=self.registry,
            buckets=BUCKETS,
        )
        self._errors = Counter(
            "headway_operator_reconcile_errors",
            "Steps of passes that failed, or whole passes, by error; a spec that is refused is none of them",
            (*LABELS, "step", "reason"),
            registry=self.registry,
        )
        self._decisions = Counter(
            "headway_operator_decisions",
            "Decisions of the controller, by cause",
            (*LABELS, "cause"),
            registry=self.registry,
        )
        self._refused = Gauge(
            "headway_operator_spec_refused",
            "Whether the spec cannot be honoured (1), and the one before it, if any, is in force",
            LABELS,
            registry=self.registry,
        )
        self._scalings = Counter(
            "headway_operator_scalings",
            "Changes of the number of replicas decided, by direction: up, down",
            (*LABELS, "direction"),
            registry=self.registry,
        )
        self._blocked = Gauge(
            "headway_operator_scaling_blocked",
            "What keeps the controller from moving replicas now (1)",
            (*LABELS, "blocker"),
            registry=self.registry,
        )
        self._last: dict[ServiceKey, tuple[int, str]] = {}  # replicas, blocker
        self._wanted = Gauge(
            "headway_operator_replicas_wanted", "Replicas decided", LABELS, registry=self.registry
        )
        self._ready = Gauge(
            "headway_operator_replicas_ready", "Replicas ready", LABELS, registry=self.registry
        )

        self._verified = Gauge(
            "headway_operator_quality_verified",
            "Whether what a service with spec.quality asks for has passed (1), or has not or not yet (0)",
            LABELS,
            registry=self.registry,
        )
        self._judgements = Counter(
            "headway_operator_quality_judgements",
            "Evaluations that came to their end, by reason",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._measured = Gauge(
            "headway_operator_quality_measured",
            "Numbers of the current judgement, by check (nats, shares or percentage points)",
            (*LABELS, "check"),
            registry=self.registry,
        )
        self._limit = Gauge(
            "headway_operator_quality_limit",
            "The most that passes each check",
            (*LABELS, "check"),
            registry=self.registry,
        )
        self._given_up = Gauge(
            "headway_operator_rollout_given_up",
            "Whether the revision that the spec asks for was given up and the one before it serves (1)",
            LABELS,
            registry=self.registry,
        )
        self._weight = Gauge(
            "headway_operator_canary_weight",
            "Share of the requests that a revision in its canary gets, in percent; 0 without one",
            LABELS,
            registry=self.registry,
        )
        self._checks: dict[ServiceKey, frozenset[str]] = {}
        self._make_own()
        self._make_starts()
        self._of_services: tuple[Counter | Gauge, ...] = (
            *(self._errors, self._decisions, self._wanted, self._ready, self._start_latest),
            *(self._verified, self._judgements, self._measured, self._limit),
            *(self._given_up, self._weight, self._refused, self._scalings, self._blocked),
        )

    def _make_own(self) -> None:
        """What the operator does as a program."""
        self._queue_seconds = Histogram(
            "headway_operator_queue_seconds",
            "From the moment that a pass over a service is due until it begins",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self._queued = Gauge(
            "headway_operator_queued", "Services whose pass waits for its turn", registry=self.registry
        )
        self._calls = Histogram(
            "headway_operator_api_seconds",
            "Calls to the API server, by method and HTTP status (0: no answer)",
            ("method", "status"),
            registry=self.registry,
            buckets=BUCKETS,
        )
        self._leading = Gauge(
            "headway_operator_leading", "Whether this operator may write (1)", registry=self.registry
        )
        self._services = Gauge(
            "headway_operator_services", "Services that are looked after", registry=self.registry
        )
        self._missed = Counter(
            "headway_operator_missed_changes",
            "Changes of services that a full list showed and the watch had not",
            registry=self.registry,
        )
        self._restarts = Counter(
            "headway_operator_task_restarts",
            "Tasks beside the passes that ended and were begun anew, by name",
            ("task",),
            registry=self.registry,
        )

    def _make_starts(self) -> None:
        """What the starts of replicas took."""
        self._start_latest = Gauge(
            "headway_operator_latest_start_seconds",
            "The latest start of a replica, by stage",
            (*LABELS, "stage"),
            registry=self.registry,
        )
        self._starts = Histogram(
            "headway_operator_start_seconds",
            "Starts of replicas of all services, by stage",
            ("stage",),
            registry=self.registry,
            buckets=START_BUCKETS,
        )
        self._newest_start: dict[ServiceKey, tuple[str, str]] = {}

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """A pass waits for its turn meanwhile."""
        with self._queued.track_inprogress():
            yield

    def waited(self, seconds: float) -> None:
        """A pass begins, so long after it was due."""
        self._queue_seconds.observe(seconds)

    def called(self, method: str, status: int, seconds: float) -> None:
        """The API server was called."""
        self._calls.labels(method, str(status)).observe(seconds)

    def missed(self) -> None:
        """A list showed a change that the watch had not brought."""
        self._missed.inc()

    def restarted(self, task: str) -> None:
        """A task beside the passes ended and is begun anew."""
        self._restarts.labels(task).inc()

    def watch(self, is_leading: Callable[[], bool], num_services: Callable[[], int]) -> None:
        """Where the gauges of the operator itself look when they are read."""
        self._leading.set_function(lambda: float(is_leading()))
        self._services.set_function(lambda: float(num_services()))

    def _started(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Count the starts that the status has and did not have before."""
        recent = (status.get("startup") or {}).get("recent") or ()
        if not recent:
            self._newest_start.setdefault(key, ("", ""))
            return
        # What an operator finds in a status when it begins was counted by the one before it.
        newest = self._newest_start.get(key, (recent[0]["readyAt"], recent[0]["replica"]))
        for one in recent:  # the newest first
            if (one["readyAt"], one["replica"]) == newest:
                break
            for stage, field in START_STAGES.items():
                if field in one:
                    self._starts.labels(stage).observe(one[field])
        self._newest_start[key] = (recent[0]["readyAt"], recent[0]["replica"])
        for stage, field in START_STAGES.items():
            if field in recent[0]:
                self._start_latest.labels(key.namespace, key.name, stage).set(recent[0][field])

    def passed(self, outcome: Outcome, seconds: float) -> None:
        """A pass went through, perhaps with steps that failed."""
        key = outcome.key
        labels = (key.namespace, key.name)
        self._seconds.labels("problems" if outcome.problems else "success").observe(seconds)
        self._refused.labels(*labels).set(any(one.step == READ_STEP for one in outcome.problems))
        for problem in outcome.problems:
            if problem.step != READ_STEP:
                self._errors.labels(*labels, problem.kind_of_step, problem.error).inc()
        if outcome.decision is not None:
            self._decide(key, outcome.decision)
        if outcome.observed is not None:
            num_ready = sum(replica.phase == "ready" for replica in outcome.observed.replicas)
            self._ready.labels(*labels).set(num_ready)
            self._judge(key, outcome.gate)
        self._started(key, outcome.status)
        if outcome.rollout is not None:
            self._given_up.labels(*labels).set(bool(outcome.rollout.given_up))
            self._weight.labels(*labels).set(outcome.rollout.record.weight)

    def _decide(self, key: ServiceKey, decision: Decision) -> None:
        labels = (key.namespace, key.name)
        self._decisions.labels(*labels, decision.cause).inc()
        self._wanted.labels(*labels).set(decision.replicas)
        replicas, blocker = self._last.get(key, (decision.replicas, ""))
        if decision.replicas != replicas:
            self._scalings.labels(*labels, "up" if decision.replicas > replicas else "down").inc()
        if blocker and blocker != decision.blocker:
            _remove(self._blocked, *labels, blocker)
        if decision.blocker:
            self._blocked.labels(*labels, decision.blocker).set(1)
        self._last[key] = decision.replicas, decision.blocker

    def _judge(self, key: ServiceKey, gate: Gate | None) -> None:
        labels = (key.namespace, key.name)
        if gate is None:
            _remove(self._verified, *labels)
        else:
            self._verified.labels(*labels).set(gate.is_open)
        judgement = None if gate is None else gate.judgement
        if gate is not None and gate.is_news and judgement is not None:
            self._judgements.labels(*labels, judgement.reason).inc()
        checks = () if judgement is None else judgement.checks
        for check in checks:
            self._limit.labels(*labels, check.name).set(check.limit)
            self._measured.labels(*labels, check.name).set(math.nan if check.value is None else check.value)
        now = frozenset(check.name for check in checks)
        for gone in self._checks.get(key, frozenset()) - now:
            _remove(self._limit, *labels, gone)
            _remove(self._measured, *labels, gone)
        self._checks[key] = now

    def failed(self, key: ServiceKey, reason: str, seconds: float) -> None:
        """A pass ended early."""
        self._seconds.labels("failed").observe(seconds)
        self._errors.labels(key.namespace, key.name, WHOLE_PASS, reason).inc()

    def forget(self, key: ServiceKey) -> None:
        """Drop what is told of a service that is gone."""
        self._checks.pop(key, None)
        self._last.pop(key, None)
        self._newest_start.pop(key, None)
        own = {"namespace": key.namespace, "name": key.name}
        for metric in self._of_services:
            metric.remove_by_labels(own)


def _remove(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # it was never set
        gauge.remove(*labels)
