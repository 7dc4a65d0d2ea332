"""The operator's own metrics, for Prometheus. The controller reads none of them."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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

    def failed(self, key: ServiceKey, reason: str) -> None:
        """A pass ended early."""
        self._errors.labels(key.namespace, key.name, reason).inc()

    def forget(self, key: ServiceKey) -> None:
        """Drop the gauges of a service that is gone."""
        for gauge in (self._wanted, self._ready):
            with contextlib.suppress(KeyError):  # it never had a pass
                gauge.remove(key.namespace, key.name)
