"""What `/admin/sample` of a replica and of a gateway look like on the wire, version 1, and how each is read.

Pure. A sample is taken whole or not at all: one of another version, or that contradicts itself, is refused by
name, so that the controller holds instead of deciding on half a truth.
"""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from headway_operator.errors import ScrapeError
from headway_operator.samples import (
    LATENCY_EDGES,
    GatewaySample,
    Histogram,
    Limits,
    Moments,
    ReplicaSample,
    RevisionTotals,
    Routing,
    Targets,
)

SAMPLE_VERSION = 1
REPLICA_COUNTERS = frozenset(
    (
        *("received", "finished", "aborted", "rejected", "errors"),
        *("ttft_met", "ttft_missed", "tpot_met", "tpot_missed"),
        *("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"),
    )
)
GATEWAY_COUNTERS = frozenset(
    ("received", "forwarded", "finished", "rejected", "retried", "failed", "client_aborted")
)
END_TO_END_COUNTERS, END_TO_END_HISTOGRAMS = frozenset(("e2e_met", "e2e_missed")), frozenset(("e2e",))
HISTOGRAMS = frozenset(("ttft", "queue", "prefill", "tpot", "step"))

Wire = TypeVar("Wire")
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
StepSums = Annotated[list[Amount], Meta(min_length=15, max_length=15)]
RequestSums = Annotated[list[Amount], Meta(min_length=3, max_length=3)]
GapSums = Annotated[list[Amount], Meta(min_length=2, max_length=2)]


class _Limits(Struct, frozen=True):
    max_num_seqs: Positive
    max_num_batched_tokens: Positive


class _Targets(Struct, frozen=True):
    epoch: Count
    ttft_milliseconds: Annotated[float, Meta(gt=0)] | None = None
    tpot_milliseconds: Annotated[float, Meta(gt=0)] | None = None
    # Absent from a replica of before there was such a target, which may serve for long.
    e2e_milliseconds: Annotated[float, Meta(gt=0)] | UnsetType | None = UNSET


class _ReplicaGauges(Struct, frozen=True):
    running: Count
    waiting: Count
    oldest_waiting_seconds: Amount
    kv_blocks_used: Count
    kv_blocks_total: Positive


class _Edges(Struct, frozen=True):
    first_milliseconds: Annotated[float, Meta(gt=0)]
    ratio: Annotated[float, Meta(gt=1)]
    count: Annotated[int, Meta(ge=1, le=1000)]


class _Histogram(Struct, frozen=True):
    first: Count
    counts: list[Count]
    sum: Amount


class _Moments(Struct, frozen=True):
    decode_steps: StepSums
    prompt_steps: StepSums
    prompts: RequestSums
    answers: RequestSums
    # Absent from replicas of earlier versions.
    gaps: GapSums = field(default_factory=lambda: [0.0, 0.0])


class _ReplicaWire(Struct, frozen=True):
    instance: Annotated[str, Meta(min_length=1, max_length=64)]
    uptime_seconds: Amount
    limits: _Limits
    envelope: _Limits
    targets: _Targets
    draining: bool
    gauges: _ReplicaGauges
    counters: dict[str, Count]
    edges: _Edges
    histograms: dict[str, _Histogram]
    # Absent from a replica of before there were any, which an upgrade of the operator leaves as it is.
    moments: _Moments | None = None


class _GatewayGauges(Struct, frozen=True):
    waiting: Count
    oldest_waiting_seconds: Amount
    in_flight: Count
    backends: Count
    backends_ready: Count


class _Routing(Struct, frozen=True):
    revisions: list[str]
    weights: dict[str, Count]
    max_waiting: Count
    waiting_timeout_seconds: Amount
    suspended: bool


class _RevisionTotals(Struct, frozen=True):
    requests: Count
    errors: Count
    client_aborted: Count = 0  # absent from a gateway of before it was counted


class _GatewayWire(Struct, frozen=True):
    kind: Literal["gateway"]
    instance: Annotated[str, Meta(min_length=1, max_length=64)]
    uptime_seconds: Amount
    gauges: _GatewayGauges
    counters: dict[str, Count]
    # Absent from a gateway of before there was a routing, which may stand before a service for long.
    routing: _Routing | None = None
    revisions: dict[str, _RevisionTotals] = {}


class _Version(Struct, frozen=True):
    version: int


def parse_replica_sample(body: bytes, taken_at: float) -> ReplicaSample:
    """Read a replica's sample, version 1. Raises ScrapeError for anything else."""
    wire = _decode(body, _ReplicaWire)
    _require_names("counters", wire.counters, REPLICA_COUNTERS)
    _require_names("histograms", wire.histograms, HISTOGRAMS)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        live, most = getattr(wire.limits, name), getattr(wire.envelope, name)
        if live > most:
            raise ScrapeError(f"sample: limits.{name} is {live}, above its envelope's {most}")
    gauges = wire.gauges
    if gauges.kv_blocks_used > gauges.kv_blocks_total:
        raise ScrapeError(
            f"sample: gauges.kv_blocks_used is {gauges.kv_blocks_used}, "
            f"more than kv_blocks_total {gauges.kv_blocks_total}"
        )
    end_to_end = wire.targets.e2e_milliseconds
    judges_end_to_end = not isinstance(end_to_end, UnsetType)
    if judges_end_to_end:
        _require_names("counters", wire.counters, END_TO_END_COUNTERS)
        _require_names("histograms", wire.histograms, END_TO_END_HISTOGRAMS)
    names = sorted(HISTOGRAMS | END_TO_END_HISTOGRAMS if judges_end_to_end else HISTOGRAMS)
    edges = _edges(wire.edges.first_milliseconds, wire.edges.ratio, wire.edges.count)
    return ReplicaSample(
        instance=wire.instance,
        taken_at=taken_at,
        limits=Limits(wire.limits.max_num_seqs, wire.limits.max_num_batched_tokens),
        envelope=Limits(wire.envelope.max_num_seqs, wire.envelope.max_num_batched_tokens),
        targets=_targets(
            wire.targets.ttft_milliseconds,
            wire.targets.tpot_milliseconds,
            None if isinstance(end_to_end, UnsetType) else end_to_end,
        ),
        running=gauges.running,
        waiting=gauges.waiting,
        oldest_waiting_seconds=gauges.oldest_waiting_seconds,
        kv_blocks_used=gauges.kv_blocks_used,
        kv_blocks_total=gauges.kv_blocks_total,
        draining=wire.draining,
        counters=wire.counters,
        histograms={name: _histogram(name, wire.histograms[name], edges) for name in names},
        moments=None if wire.moments is None else _moments(wire.moments),
        judges_end_to_end=judges_end_to_end,
    )


def _moments(wire: _Moments) -> Moments:
    return Moments(
        tuple(wire.decode_steps),
        tuple(wire.prompt_steps),
        tuple(wire.prompts),
        tuple(wire.answers),
        tuple(wire.gaps),
    )


def parse_gateway_sample(body: bytes, taken_at: float) -> GatewaySample:
    """Read a gateway's sample, version 1. Raises ScrapeError for anything else."""
    wire = _decode(body, _GatewayWire)
    _require_names("counters", wire.counters, GATEWAY_COUNTERS)
    return GatewaySample(
        instance=wire.instance,
        taken_at=taken_at,
        waiting=wire.gauges.waiting,
        oldest_waiting_seconds=wire.gauges.oldest_waiting_seconds,
        in_flight=wire.gauges.in_flight,
        counters=wire.counters,
        routing=None if wire.routing is None else _routing(wire.routing),
        revisions={
            name: RevisionTotals(one.requests, one.errors, one.client_aborted)
            for name, one in wire.revisions.items()
        },
    )


def _routing(wire: _Routing) -> Routing:
    return Routing(
        max_waiting=wire.max_waiting,
        waiting_timeout_seconds=wire.waiting_timeout_seconds,
        revisions=tuple(wire.revisions),
        weights=wire.weights,
        is_suspended=wire.suspended,
    )


class _Demand(Struct, frozen=True):
    waiting: Count


def parse_demand(body: bytes) -> int:
    """Requests that wait, as a gateway tells it. Raises ScrapeError for anything else."""
    try:
        return msgspec.json.decode(body, type=_Demand).waiting
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScrapeError(f"demand: {error}") from error


def routing_body(routing: Routing) -> dict[str, Any]:
    """The body of `PUT /admin/routing`."""
    return {
        "revisions": list(routing.revisions),
        "weights": dict(routing.weights),
        "max_waiting": routing.max_waiting,
        "waiting_timeout_seconds": routing.waiting_timeout_seconds,
        "suspended": routing.is_suspended,
    }


def _decode(body: bytes, wire_type: type[Wire]) -> Wire:
    try:
        # The version first: fields of another version may mean something else.
        version = msgspec.json.decode(body, type=_Version).version
        if version != SAMPLE_VERSION:
            raise ScrapeError(f"sample: version is {version}, this operator reads {SAMPLE_VERSION}")
        return msgspec.json.decode(body, type=wire_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScrapeError(f"sample: {error}") from error


def _require_names(field: str, got: Mapping[str, object], want: frozenset[str]) -> None:
    missing = sorted(want - got.keys())
    if missing:
        raise ScrapeError(f"sample: {field} lacks {', '.join(missing)}")


def _histogram(name: str, wire: _Histogram, edges: tuple[float, ...]) -> Histogram:
    num_buckets = len(edges) + 1
    if wire.first + len(wire.counts) > num_buckets:
        raise ScrapeError(
            f"sample: histograms.{name} reaches bucket {wire.first + len(wire.counts)}, "
            f"its edges allow {num_buckets}"
        )
    if not math.isfinite(wire.sum) or (wire.sum > 0 and not any(wire.counts)):
        raise ScrapeError(f"sample: histograms.{name}.sum is {wire.sum!r} over no observation")
    after = num_buckets - wire.first - len(wire.counts)
    return Histogram(edges, (0,) * wire.first + tuple(wire.counts) + (0,) * after, sum(wire.counts), wire.sum)


@functools.lru_cache(maxsize=1024)
def _targets(ttft: float | None, tpot: float | None, e2e: float | None) -> Targets:
    """The same object for the same ones."""
    return Targets(ttft, tpot, e2e)


@functools.lru_cache(maxsize=16)
def _edges(first_milliseconds: float, ratio: float, count: int) -> tuple[float, ...]:
    edges = tuple(first_milliseconds * ratio**i for i in range(count))
    return LATENCY_EDGES if edges == LATENCY_EDGES else edges
