"""The metrics of ModelCaches, beside the operator's own and on the same page."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client import Counter, Gauge

from headway_operator.operator_metrics import LABELS, WHOLE_PASS, OperatorMetrics
from headway_operator.passes import Outcome
from headway_operator.state import ServiceKey


class CacheMetrics:
    """One for all caches. operator: whose queue they share."""

    def __init__(self, operator: OperatorMetrics) -> None:
        self._operator = operator
        registry = operator.registry
        self._ready = Gauge(
            "headway_model_cache_ready",
            "Whether what a ModelCache asks for is there (1); absent while it is suspended",
            LABELS,
            registry=registry,
        )
        self._bytes = Gauge(
            "headway_model_cache_bytes",
            "Bytes of what a ModelCache asks for that are there, as far as they are known",
            LABELS,
            registry=registry,
        )
        self._seconds = Gauge(
            "headway_model_cache_fetch_seconds",
            "What the fetch of what is served took, pauses after failed attempts included",
            LABELS,
            registry=registry,
        )
        self._services = Gauge(
            "headway_model_cache_services",
            "InferenceServices that use a ModelCache",
            LABELS,
            registry=registry,
        )
        self._errors = Counter(
            "headway_model_cache_errors",
            "Steps of passes over a ModelCache that failed, or whole passes, by error",
            (*LABELS, "step", "reason"),
            registry=registry,
        )

    def queued(self) -> AbstractContextManager[None]:
        """A pass waits for its turn meanwhile."""
        return self._operator.queued()

    def waited(self, seconds: float) -> None:
        """A pass begins, so long after it was due."""
        self._operator.waited(seconds)

    def passed(self, outcome: Outcome, seconds: float) -> None:
        """A pass went through, perhaps with steps that failed."""
        labels = (outcome.key.namespace, outcome.key.name)
        for problem in outcome.problems:
            self._errors.labels(*labels, problem.kind_of_step, problem.error).inc()
        self._tell(labels, outcome.status)

    def failed(self, key: ServiceKey, reason: str, seconds: float) -> None:
        """A pass ended early."""
        self._errors.labels(key.namespace, key.name, WHOLE_PASS, reason).inc()

    def forget(self, key: ServiceKey) -> None:
        """Drop what is told of a cache that is gone."""
        own = {"namespace": key.namespace, "name": key.name}
        for metric in (self._ready, self._bytes, self._seconds, self._services, self._errors):
            metric.remove_by_labels(own)

    def _tell(self, labels: tuple[str, str], status: Mapping[str, Any]) -> None:
        own = dict(zip(LABELS, labels, strict=True))
        ready: Mapping[str, Any] = next(
            (one for one in status.get("conditions") or () if one["type"] == "Ready"), {}
        )
        if ready.get("reason") == "Suspended":
            self._ready.remove_by_labels(own)
        else:
            self._ready.labels(*labels).set(ready.get("status") == "True")
        fetched, progress = status.get("fetched") or {}, status.get("progress") or {}
        there = progress.get("bytes") if "progress" in status else fetched.get("bytes")
        self._bytes.labels(*labels).set(there or 0)
        self._services.labels(*labels).set(len(status.get("services") or ()))
        if "seconds" in fetched:
            self._seconds.labels(*labels).set(fetched["seconds"])
