"""The gateway's numbers for Prometheus, all `headway_gateway_*`; read from their owners when scraped."""

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Collection, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headway_gateway.connections import Connections
from headway_gateway.counters import Counters
from headway_gateway.held_bodies import BodyBudget
from headway_gateway.pool import BackendPool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a millisecond to two minutes, each edge half as much again as the one before.
_EDGES_SECONDS = tuple(round(0.001 * 1.5**index, 6) for index in range(30))
_EDGES_SHOWN = (*map(floatToGoString, _EDGES_SECONDS), "+Inf")


class Times:
    """How many times lay under each edge: plain integers, as one thread alone observes and reads them."""

    __slots__ = ("_began_at", "_numbers", "_seconds")

    def __init__(self) -> None:
        self._numbers = [0] * (len(_EDGES_SECONDS) + 1)
        self._seconds = 0.0
        self._began_at = time.time()

    def observe(self, seconds: float) -> None:
        """One more."""
        self._numbers[bisect_left(_EDGES_SECONDS, seconds)] += 1
        self._seconds += seconds

    def add_to(self, family: HistogramMetricFamily, **labels: str) -> None:
        """As Prometheus reads them. labels: by name, in the family's order."""
        below = accumulate(self._numbers)
        family.add_metric([*labels.values()], [*zip(_EDGES_SHOWN, below, strict=True)], self._seconds)
        family.add_sample(f"{family.name}_created", labels, self._began_at)


class Latencies(Collector):
    """The times that the gateway measures, in seconds."""

    def __init__(self) -> None:
        self.waited = Times()
        self.answered = Times()
        self._by_revision: dict[str, Times] = {}

    def of_revision(self, revision: str) -> Times:
        """What `answered` has of one."""
        times = self._by_revision.get(revision)
        if times is None:
            times = self._by_revision[revision] = Times()
        return times

    def keep_revisions(self, revisions: Collection[str]) -> None:
        """Drop the times of all others, but for what is of no revision."""
        for revision in self._by_revision.keys() - {*revisions, ""}:
            del self._by_revision[revision]

    def collect(self) -> Iterator[Metric]:
        """All families."""
        waited = HistogramMetricFamily(
            "headway_gateway_waited_seconds",
            "Request received to first attempt sent: how long the gateway itself kept it.",
        )
        self.waited.add_to(waited)
        answered = HistogramMetricFamily(
            "headway_gateway_response_head_seconds",
            "Request received to a replica's response head, waiting and failed attempts included.",
        )
        self.answered.add_to(answered)
        by_revision = HistogramMetricFamily(
            "headway_gateway_revision_response_head_seconds",
            "The same by the revision that answered; empty for a replica of none that the operator told.",
            labels=["revision"],
        )
        for revision, times in self._by_revision.items():
            times.add_to(by_revision, revision=revision)
        yield from (waited, answered, by_revision)


class StateCollector(Collector):
    """Counters and gauges as they stand at the moment of the scrape."""

    def __init__(
        self,
        counters: Counters,
        pool: BackendPool,
        bodies: BodyBudget,
        connections: Connections,
        *,
        version: str,
        instance: str,
    ) -> None:
        self._counters = counters
        self._pool = pool
        self._bodies = bodies
        self._connections = connections
        self._version = version
        self._instance = instance

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield InfoMetricFamily(
            "headway_gateway", "This gateway process.", {"version": self._version, "instance": self._instance}
        )
        counters = self._counters
        yield _counter("requests_received", "Requests read whole from clients.", counters.received)
        yield _counter(
            "requests_forwarded", "Requests whose answer by a replica was passed on.", counters.forwarded
        )
        yield _counter("requests_finished", "Answers passed on to their end.", counters.finished)
        yield _counter("requests_client_aborted", "Requests whose client went away.", counters.client_aborted)
        yield _tally(
            "requests_rejected", "Requests for which no replica's answer was passed on.", counters.rejected
        )
        yield _tally("requests_retried", "Attempts after the first.", counters.retried)
        yield _tally("requests_failed", "Answers that broke off after their head.", counters.failed)
        yield _counter(
            "backend_list_errors", "Backend lists that could not be read.", counters.backend_list_errors
        )
        yield GaugeMetricFamily(
            "headway_gateway_backend_list_age_seconds",
            "How long ago the backend list was known to be the current one.",
            time.monotonic() - counters.backend_list_seen_at,
        )
        yield from self._collect_bounds()
        yield from self._collect_revisions()
        yield from self._collect_pool()

    def _collect_bounds(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "headway_gateway_body_bytes", "Bytes of request bodies held in memory.", self._bodies.held_bytes
        )
        yield GaugeMetricFamily(
            "headway_gateway_body_bytes_limit",
            "Bytes that all of them may have together.",
            self._bodies.limit_bytes,
        )
        yield _counter("bodies_refused", "Requests refused because of that limit.", self._bodies.num_refused)
        connections = self._connections
        yield GaugeMetricFamily(
            "headway_gateway_connections", "Open connections of clients.", len(connections)
        )
        yield GaugeMetricFamily(
            "headway_gateway_connections_limit", "Those that may ask for an answer.", connections.limit
        )
        yield _counter(
            "connections_refused", "Requests refused because of that limit.", connections.num_refused
        )

    def _collect_revisions(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headway_gateway_revision_requests",
            "Requests that a replica of the revision accepted.",
            labels=["revision"],
        )
        errors = CounterMetricFamily(
            "headway_gateway_revision_errors",
            "Those of them with no answer, a 5xx, or an answer that broke off.",
            labels=["revision"],
        )
        aborted = CounterMetricFamily(
            "headway_gateway_revision_client_aborted",
            "Requests beside them whose client went away before the replica's answer began.",
            labels=["revision"],
        )
        for revision, counts in sorted(self._counters.by_revision.items()):
            requests.add_metric([revision], counts.requests)
            errors.add_metric([revision], counts.errors)
            aborted.add_metric([revision], counts.client_aborted)
        weights = GaugeMetricFamily(
            "headway_gateway_revision_weight",
            "Share of requests that the operator gives the revision.",
            labels=["revision"],
        )
        for revision, weight in sorted(self._pool.routing.weights.items()):
            weights.add_metric([revision], weight)
        yield from (requests, errors, aborted, weights)

    def _collect_pool(self) -> Iterator[Metric]:
        pool = self._pool
        yield GaugeMetricFamily("headway_gateway_waiting", "Requests held for a replica.", pool.num_waiting)
        yield GaugeMetricFamily(
            "headway_gateway_waiting_bytes", "Bytes of their bodies.", pool.num_waiting_bytes
        )
        yield GaugeMetricFamily(
            "headway_gateway_waiting_bytes_limit",
            "Bytes that the bodies of held requests may have together.",
            pool.max_waiting_bytes,
        )
        yield GaugeMetricFamily(
            "headway_gateway_oldest_waiting_seconds",
            "Age of the oldest held request.",
            pool.oldest_waiting_seconds(),
        )
        yield GaugeMetricFamily("headway_gateway_in_flight", "Requests at replicas.", pool.num_in_flight)
        states = GaugeMetricFamily(
            "headway_gateway_backends", "Backends of the latest list.", labels=["state"]
        )
        tally = Tally(backend.state for backend in pool.backends)
        for state in ("ready", "draining", "unready"):
            states.add_metric([state], tally[state])
        yield states
        loads = GaugeMetricFamily(
            "headway_gateway_backend_in_flight",
            "Requests at each backend of the latest list.",
            labels=["backend"],
        )
        for backend in pool.backends:
            loads.add_metric([backend.id], backend.in_flight)
        yield loads


class Metrics:
    """The registry, and the page made of it."""

    def __init__(self, state: StateCollector) -> None:
        self._registry = CollectorRegistry()
        self.latencies = Latencies()
        self._registry.register(self.latencies)
        self._registry.register(state)
        ProcessCollector(registry=self._registry)

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"headway_gateway_{name}", text, value)


def _tally(name: str, text: str, values: Tally[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"headway_gateway_{name}", text, labels=["reason"])
    for reason, value in sorted(values.items()):
        family.add_metric([reason], value)
    return family
