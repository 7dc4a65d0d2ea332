"""What one engine has counted since it started: plain integers, fixed-edge histograms, exact SLO counters.

Owned by the engine process and touched by its one thread only. Knows neither Prometheus nor JSON: the
server reads a `MetricsSnapshot` and renders it. Times come in as seconds and are kept as milliseconds.

Two things here are decided on purpose:

- TTFT met/missed counts every request that an overloaded server turned away or failed before the first
  byte as a miss, and every one that its client gave up when the target had passed already; a request that
  was the client's own fault, or that was given up before, is neither.
- Setting targets that differ from the current ones restarts the met/missed counters and moves `epoch`,
  so that a reader never subtracts counts taken against different targets.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from headway_runtime.config import Targets
from headway_runtime.request import FinishReason

FIRST_EDGE_MILLISECONDS = 1.0
EDGE_RATIO = 1.12
NUM_EDGES = 105
# Bucket i counts values <= EDGES_MILLISECONDS[i]; one more bucket, index NUM_EDGES, lies above all edges.
EDGES_MILLISECONDS = tuple(FIRST_EDGE_MILLISECONDS * EDGE_RATIO**i for i in range(NUM_EDGES))
assert all(high <= low * 1.15 for low, high in pairwise(EDGES_MILLISECONDS))


class RejectReason(StrEnum):
    """Why a request was turned away before it was accepted."""

    QUEUE_FULL = "queue_full"  # max_waiting requests wait already
    CONTEXT_LENGTH = "context_length"  # the prompt can never fit
    INVALID = "invalid"  # any other fault of the client's


# The server's own fault: these are TTFT misses, and `rejected` in a sample. The rest are answered 4xx and
# would only mislead whoever scales by these numbers.
OVERLOAD_REASONS = frozenset({RejectReason.QUEUE_FULL})


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts per bucket (NUM_EDGES + 1 of them) and the sum of all values in milliseconds."""

    counts: tuple[int, ...]
    sum_milliseconds: float


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything counted so far, at one instant.

    counters: see `EngineMetrics.snapshot`. rejected, finished: requests by reason, all reasons present.
    histograms: by the names in `HISTOGRAM_NAMES`.
    """

    targets: Targets
    targets_epoch: int
    counters: dict[str, int]
    rejected: dict[str, int]
    finished: dict[str, int]
    histograms: dict[str, HistogramSnapshot]


HISTOGRAM_NAMES = ("ttft", "queue", "prefill", "tpot", "inter_token", "e2e", "step")


class Histogram:
    """Counts of values in the fixed buckets."""

    __slots__ = ("_counts", "_sum_milliseconds")

    def __init__(self) -> None:
        self._counts = [0] * (NUM_EDGES + 1)
        self._sum_milliseconds = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` values of `seconds` each; a clock's negative rounding counts as 0."""
        milliseconds = max(0.0, seconds * 1000.0)
        self._counts[bisect_left(EDGES_MILLISECONDS, milliseconds)] += count
        self._sum_milliseconds += milliseconds * count

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(tuple(self._counts), self._sum_milliseconds)


class EngineMetrics:
    """The one place where an engine's numbers live. The engine calls it as things happen."""

    def __init__(self, targets: Targets | None = None) -> None:
        self._targets = targets or Targets()
        self._targets_epoch = 1
        self._ttft_met = self._ttft_missed = self._tpot_met = self._tpot_missed = 0
        self._received = self._preemptions = self._steps = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._prefill_step_tokens = self._decode_step_sequences = 0
        self._rejected = dict.fromkeys(RejectReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._histograms = {name: Histogram() for name in HISTOGRAM_NAMES}
        self._inter_token = self._histograms["inter_token"]
        self._step = self._histograms["step"]

    @property
    def targets(self) -> Targets:
        return self._targets

    @property
    def targets_epoch(self) -> int:
        return self._targets_epoch

    def set_targets(self, targets: Targets) -> None:
        """Count met/missed against `targets` from now on; the same targets again change nothing."""
        if targets == self._targets:
            return
        self._targets = targets
        self._targets_epoch += 1
        self._ttft_met = self._ttft_missed = self._tpot_met = self._tpot_missed = 0

    def received(self) -> None:
        """A request has arrived; exactly one of `rejected` and `finished` follows."""
        self._received += 1

    def rejected(self, reason: RejectReason | str) -> None:
        """A request was turned away. ValueError for a reason that is not a `RejectReason`."""
        reason = RejectReason(reason)
        self._rejected[reason] += 1
        if reason in OVERLOAD_REASONS:
            self.first_byte_missed()

    def scheduled(self, queue_seconds: float) -> None:
        """A request was scheduled for the first time, `queue_seconds` after it was received."""
        self._histograms["queue"].observe(queue_seconds)

    def prefilled(self, prefill_seconds: float) -> None:
        """A request's whole prompt is computed, `prefill_seconds` after it was first scheduled."""
        self._histograms["prefill"].observe(prefill_seconds)

    def first_byte(self, ttft_seconds: float) -> None:
        """The HTTP process wrote the first byte of an answer, `ttft_seconds` after the request came."""
        self._histograms["ttft"].observe(ttft_seconds)
        target = self._targets.ttft_milliseconds
        if target is None:
            return
        if ttft_seconds * 1000.0 <= target:
            self._ttft_met += 1
        else:
            self._ttft_missed += 1

    def first_byte_missed(self) -> None:
        """A request failed, through no act of its client, before its first byte."""
        if self._targets.ttft_milliseconds is not None:
            self._ttft_missed += 1

    def abandoned(self, waited_seconds: float) -> None:
        """A client left before its first byte: a miss if the target had passed, else nobody can say."""
        target = self._targets.ttft_milliseconds
        if target is not None and waited_seconds * 1000.0 > target:
            self._ttft_missed += 1

    def tokens(self, prompt_computed: int = 0, cached: int = 0, generated: int = 0) -> None:
        """Tokens by kind. A token recomputed after a preemption counts in none of them."""
        self._prompt_tokens += prompt_computed
        self._cached_tokens += cached
        self._generated_tokens += generated

    def preempted(self) -> None:
        """A running sequence lost its blocks and waits again."""
        self._preemptions += 1

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` gaps of `seconds` each between consecutive tokens of one request."""
        self._inter_token.observe(seconds, count)

    def step(self, seconds: float, num_prefill_tokens: int, num_decode_seqs: int) -> None:
        """One step took `seconds` and computed that much."""
        self._steps += 1
        self._prefill_step_tokens += num_prefill_tokens
        self._decode_step_sequences += num_decode_seqs
        self._step.observe(seconds)

    def finished(self, reason: FinishReason, e2e_seconds: float, tpot_seconds: float | None) -> None:
        """An accepted request ended. `tpot_seconds` is None with fewer than two generated tokens.

        Times of aborted and failed requests are not observed: they say when the client left, not how
        fast the engine is.
        """
        self._finished[reason] += 1
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        self._histograms["e2e"].observe(e2e_seconds)
        if tpot_seconds is None:
            return
        self._histograms["tpot"].observe(tpot_seconds)
        target = self._targets.tpot_milliseconds
        if target is None:
            return
        if tpot_seconds * 1000.0 <= target:
            self._tpot_met += 1
        else:
            self._tpot_missed += 1

    def snapshot(self) -> MetricsSnapshot:
        """A copy of everything.

        received = finished + aborted + errors + rejected for any reason + requests still live. Among the
        counters `rejected` is the overload reasons only: what more capacity would have served.
        """
        finished = self._finished
        counters = {
            "received": self._received,
            "finished": finished[FinishReason.STOP] + finished[FinishReason.LENGTH],
            "aborted": finished[FinishReason.ABORT],
            "rejected": sum(self._rejected[reason] for reason in OVERLOAD_REASONS),
            "errors": finished[FinishReason.ERROR],
            "ttft_met": self._ttft_met,
            "ttft_missed": self._ttft_missed,
            "tpot_met": self._tpot_met,
            "tpot_missed": self._tpot_missed,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "generated_tokens": self._generated_tokens,
            "preemptions": self._preemptions,
            "steps": self._steps,
            "prefill_step_tokens": self._prefill_step_tokens,
            "decode_step_sequences": self._decode_step_sequences,
        }
        return MetricsSnapshot(
            targets=self._targets,
            targets_epoch=self._targets_epoch,
            counters=counters,
            rejected={str(reason): count for reason, count in self._rejected.items()},
            finished={str(reason): count for reason, count in finished.items()},
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )
