"""What replicas and gateways tell of themselves, as frozen values: the samples of one pass.

Pure data. Times are seconds since the epoch; latencies are milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """The live batch limits of a replica (`max_num_seqs`, `max_num_batched_tokens`)."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Targets:
    """SLO targets in milliseconds; None means none."""

    ttft_milliseconds: float | None = None
    tpot_milliseconds: float | None = None
    e2e_milliseconds: float | None = None


# Upper bounds of the buckets that replicas count latencies in, milliseconds. Whoever reads the same ones uses
# this object, so that nobody has to compare them edge by edge.
LATENCY_EDGES = tuple(1.0 * 1.12**i for i in range(105))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket since the replica started, with the edges the replica states (milliseconds).

    edges: upper bounds; counts has one more entry than edges, the last being those above every edge; num is
    their sum.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num: int
    sum_milliseconds: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums since a replica started, of products of (1, P, D, K) with each other and with milliseconds t.

    P: prompt tokens that a step computed, each counted by what it costs, which is the more the more tokens it
    attends to (docs/contract.md); D: sequences that it decoded for; K: tokens that these attended to.
    decode_steps, prompt_steps: n, P, D, K, PP, PD, PK, DD, DK, KK, t, tP, tD, tK, tt. prompts, answers:
    number, sum and sum of squares of tokens to compute, by cost, and of tokens generated, by request. gaps:
    between two tokens of a request, number and milliseconds; 0 from a replica that does not tell.
    """

    decode_steps: tuple[float, ...]
    prompt_steps: tuple[float, ...]
    prompts: tuple[float, ...]
    answers: tuple[float, ...]
    gaps: tuple[float, ...] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica's `/admin/sample`, version 1.

    instance: changes when its engine restarts (counters begin anew). counters: the named totals since start.
    histograms: ttft, queue, prefill, tpot, step. moments: None from a replica of before there were any.
    judges_end_to_end: whether it knows such a target, and has a histogram e2e; one of an earlier version does
    not.
    """

    instance: str
    taken_at: float
    limits: Limits
    envelope: Limits
    targets: Targets
    running: int
    waiting: int
    oldest_waiting_seconds: float
    kv_blocks_used: int
    kv_blocks_total: int
    draining: bool
    counters: Mapping[str, int]
    histograms: Mapping[str, Histogram]
    moments: Moments | None = None
    judges_end_to_end: bool = True


@dataclass(frozen=True, slots=True)
class Routing:
    """What a gateway goes by: its revisions, their shares of requests, who may wait and for how long.

    weights: revision -> share; empty: by load alone. is_suspended: every request is refused at once.
    """

    max_waiting: int
    waiting_timeout_seconds: float
    revisions: tuple[str, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)
    is_suspended: bool = False


@dataclass(frozen=True, slots=True)
class RevisionTotals:
    """What a gateway counted of one revision: requests that its replicas accepted, and those that failed.

    client_aborted: beside them, those whose client went away before a replica's answer began.
    """

    requests: int
    errors: int
    client_aborted: int = 0


@dataclass(frozen=True, slots=True)
class GatewaySample:
    """One gateway's `/admin/sample`: what waits or was refused before a replica accepted it.

    routing: None from a gateway of before there was one, which can be told nothing.
    """

    instance: str
    taken_at: float
    waiting: int
    oldest_waiting_seconds: float
    in_flight: int
    counters: Mapping[str, int]
    routing: Routing | None = None
    revisions: Mapping[str, RevisionTotals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """All samples of one pass. A ready replica without a usable sample maps to None; `errors` says why.

    start_stages: replica -> stage -> seconds of its start, as it tells them itself; empty where it tells
    none.
    """

    taken_at: float
    replicas: Mapping[str, ReplicaSample | None] = field(default_factory=dict)
    gateways: Mapping[str, GatewaySample | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    start_stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
