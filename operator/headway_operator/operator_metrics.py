"""The operator's own metrics, for Prometheus. The controller reads none of them."""

import contextlib
import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headway_operator.quality import Gate
from headway_operator.reconcile import Outcome
from headway_operator.state import ServiceKey

LABELS = ("namespace", "name")


class OperatorMetrics:
    """One registry per operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "headway_operator_reconcile_seconds",
            "Duration of a pass over one service",
            registry=self.registry,
        )
        self._errors = Counter(
            "headway_operator_reconcile_errors",
            "Passes or steps of a pass that failed, by cause",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._decisions = Counter(
            "headway_operator_decisions",
            "Decisions of the controller, by cause",
            (*LABELS, "cause"),
            registry=self.registry,
        )
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
        self._checks: dict[ServiceKey, frozenset[str]] = {}

    def passed(self, outcome: Outcome, seconds: float) -> None:
        """A pass went through, perhaps with steps that failed."""
        key = outcome.key
        labels = (key.namespace, key.name)
        self._seconds.observe(seconds)
        for step, _ in outcome.problems:
            self._errors.labels(*labels, step.split()[0]).inc()
        if outcome.decision is not None:
            self._decisions.labels(*labels, outcome.decision.cause).inc()
            self._wanted.labels(*labels).set(outcome.decision.replicas)
        if outcome.observed is not None:
            num_ready = sum(replica.phase == "ready" for replica in outcome.observed.replicas)
            self._ready.labels(*labels).set(num_ready)
            self._judge(key, outcome.gate)

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

    def failed(self, key: ServiceKey, reason: str) -> None:
        """A pass ended early."""
        self._errors.labels(key.namespace, key.name, reason).inc()

    def forget(self, key: ServiceKey) -> None:
        """Drop the gauges of a service that is gone."""
        self._judge(key, None)
        del self._checks[key]
        for gauge in (self._wanted, self._ready):
            _remove(gauge, key.namespace, key.name)


def _remove(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # it was never set
        gauge.remove(*labels)
