"""What one engine has counted since it started: plain integers, fixed-edge histograms, exact SLO counters.

Owned by the engine process and touched by its one thread only. Knows neither Prometheus nor JSON: the
server reads a `MetricsSnapshot` and renders it. Times come in as seconds and are kept as milliseconds.

Three things here are decided on purpose:

- TTFT met/missed counts every request that an overloaded server turned away or failed before the first
  byte as a miss, and every one that its client gave up when the target had passed already; a request that
  was the client's own fault, or that was given up before, is neither.
- End to end, every request that was turned away so or failed is a miss, and so is every one that its client
  gave up when the target had passed; one that was given up before is neither.
- Setting targets that differ from the current ones restarts the met/missed counters and moves `epoch`,
  so that a reader never subtracts counts taken against different targets.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headway_runtime.config import Targets
from headway_runtime.draft_metrics import DraftCounters, DraftSnapshot
from headway_runtime.histograms import Histogram, HistogramSnapshot, RateWindow, SizeHistogram, SizeSnapshot
from headway_runtime.offload.counters import OffloadCounters, OffloadSnapshot
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.request import FinishReason
from headway_runtime.step_moments import MomentsSnapshot, StepMoments

HISTOGRAM_NAMES = (
    *("ttft", "queue", "prefill", "delivery", "first_decode"),
    *("tpot", "inter_token", "e2e", "step"),
)
SIZE_NAMES = ("step_tokens", "step_sequences", "prompt_tokens", "generated_tokens")


class RejectReason(StrEnum):
    """Why a request was turned away before it was accepted."""

    QUEUE_FULL = "queue_full"  # max_waiting requests wait already
    CONTEXT_LENGTH = "context_length"  # the prompt can never fit
    INVALID = "invalid"  # any other fault of the client's in the body
    UNAUTHORIZED = "unauthorized"  # no API key, or a wrong one
    MODEL_NOT_FOUND = "model_not_found"  # no such model here
    TOO_LARGE = "too_large"  # the body or the headers are too long, or came too slowly
    CONNECTIONS = "connections"  # as many are open as may be
    UNAVAILABLE = "unavailable"  # the engine starts, stands still or has ended


# The server's own fault: these are TTFT misses, and `rejected` in a sample. The rest are answered 4xx and
# would only mislead whoever scales by these numbers.
OVERLOAD_REASONS = frozenset({RejectReason.QUEUE_FULL, RejectReason.CONNECTIONS, RejectReason.UNAVAILABLE})


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything counted so far, at one instant.

    counters: see `EngineMetrics.snapshot`. rejected, finished: requests by reason, all reasons present.
    histograms: times, by the names in `HISTOGRAM_NAMES`. sizes: by the names in `SIZE_NAMES`.
    rates: tokens per second, prompt and generated, over the last ten seconds.
    model_load_seconds: what loading the weights took; 0.0 where nobody said.
    start_seconds: what each stage of the start took, as `start_timeline.STAGES` names them.
    cuda_graph_bytes: memory of recorded decode steps; 0 where there are none.
    """

    targets: Targets
    targets_epoch: int
    counters: dict[str, int]
    rejected: dict[str, int]
    finished: dict[str, int]
    histograms: dict[str, HistogramSnapshot]
    sizes: dict[str, SizeSnapshot]
    rates: dict[str, float]
    model_load_seconds: float
    drafts: DraftSnapshot
    offload: OffloadSnapshot
    traffic: Traffic
    start_seconds: dict[str, float]
    cuda_graph_bytes: int
    moments: MomentsSnapshot


class EngineMetrics:
    """The one place where an engine's numbers live. The engine calls it as things happen.

    clock: seconds; only rates read it.
    """

    def __init__(self, targets: Targets | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._targets = targets or Targets()
        self._targets_epoch = 1
        self._start_judging()
        self._received = self._preemptions = self._steps = self._recorded_steps = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._cache_queried_tokens = 0
        self._prefill_step_tokens = self._decode_step_sequences = 0
        self._rejected = dict.fromkeys(RejectReason, 0)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._histograms = {name: Histogram() for name in HISTOGRAM_NAMES}
        self._inter_token = self._histograms["inter_token"]
        self._step = self._histograms["step"]
        self._sizes = {name: SizeHistogram() for name in SIZE_NAMES}
        self._step_tokens, self._step_sequences = self._sizes["step_tokens"], self._sizes["step_sequences"]
        self._prompt_rate, self._generated_rate = RateWindow(clock), RateWindow(clock)
        self._model_load_seconds = 0.0
        self._start_seconds: dict[str, float] = {}
        # Told by the engine, whenever it changes.
        self.cuda_graph_bytes = 0
        # Told by the loop of steps.
        self.moments = StepMoments()
        self.drafts = DraftCounters()
        self.offload = OffloadCounters()
        # Of the ranks that share the model; theirs to count.
        self.traffic = Traffic()

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
        self._start_judging()

    def _start_judging(self) -> None:
        self._ttft_met = self._ttft_missed = self._tpot_met = self._tpot_missed = 0
        self._e2e_met = self._e2e_missed = 0

    def model_loaded(self, seconds: float) -> None:
        """The weights are in place, `seconds` after loading began."""
        self._model_load_seconds = seconds

    def started(self, stage_seconds: Mapping[str, float]) -> None:
        """What stages of the start took, besides those already told."""
        self._start_seconds.update(stage_seconds)

    def received(self) -> None:
        """A request has arrived; exactly one of `rejected` and `finished` follows."""
        self._received += 1

    def rejected(self, reason: RejectReason | str) -> None:
        """A request was turned away. ValueError for a reason that is not a `RejectReason`."""
        reason = RejectReason(reason)
        self._rejected[reason] += 1
        if reason in OVERLOAD_REASONS:
            self.first_byte_missed()
            if self._targets.e2e_milliseconds is not None:
                self._e2e_missed += 1

    def scheduled(self, queue_seconds: float) -> None:
        """A request was scheduled for the first time, `queue_seconds` after it was received."""
        self._histograms["queue"].observe(queue_seconds)

    def prefilled(self, prefill_seconds: float) -> None:
        """A request's first token is computed, `prefill_seconds` after the request was first scheduled."""
        self._histograms["prefill"].observe(prefill_seconds)

    def first_decoded(self, seconds: float, count: int = 1) -> None:
        """The second tokens of `count` requests are computed, `seconds` after their first."""
        self._histograms["first_decode"].observe(seconds, count)

    def delivered(self, seconds: float) -> None:
        """The HTTP process wrote the first byte, `seconds` after the first token was computed."""
        self._histograms["delivery"].observe(seconds)

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
        if prompt_computed:
            self._prompt_rate.add(prompt_computed)
        if generated:
            self._generated_rate.add(generated)

    def cache_queried(self, num_tokens: int) -> None:
        """A new request's prompt of `num_tokens` was looked up in the prefix cache; its hits are `cached`."""
        self._cache_queried_tokens += num_tokens

    def preempted(self) -> None:
        """A running sequence lost its blocks and waits again."""
        self._preemptions += 1

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` gaps of `seconds` each between consecutive tokens of one request."""
        self._inter_token.observe(seconds, count)

    def inter_tokens(self, seconds: Iterable[float], count: int) -> None:
        """`inter_token` for each of these."""
        self._inter_token.observe_each(seconds, count)

    def step(
        self,
        seconds: float,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_prefill_seqs: int = 0,
        *,
        is_recorded: bool = False,
    ) -> None:
        """One step took `seconds` and computed that much. is_recorded: see `StepResult`."""
        self._steps += 1
        self._recorded_steps += is_recorded
        self._prefill_step_tokens += num_prefill_tokens
        self._decode_step_sequences += num_decode_seqs
        self._step.observe(seconds)
        self._step_tokens.observe(num_prefill_tokens + num_decode_seqs)
        self._step_sequences.observe(num_prefill_seqs + num_decode_seqs)

    def steps(
        self, seconds: Sequence[float], num_prefill_tokens: Sequence[int], num_decode_seqs: int
    ) -> None:
        """`step` for each of several steps of the same sequences, at least one, which a simulation knows all
        at once. num_prefill_tokens: of each step, all of them 0 or none."""
        num_steps, num_prefill_seqs = len(seconds), int(num_prefill_tokens[0] > 0)
        self._steps += num_steps
        self._prefill_step_tokens += sum(num_prefill_tokens)
        self._decode_step_sequences += num_steps * num_decode_seqs
        self._step.observe_each(seconds)
        for num_tokens, count in Counter(num_prefill_tokens).items():
            self._step_tokens.observe(num_tokens + num_decode_seqs, count)
        self._step_sequences.observe(num_prefill_seqs + num_decode_seqs, num_steps)

    def sizes(self, num_prompt: int, num_generated: int) -> None:
        """How long an accepted request's prompt was, and its answer when it ended, however it ended."""
        self._sizes["prompt_tokens"].observe(num_prompt)
        self._sizes["generated_tokens"].observe(num_generated)

    def finished(self, reason: FinishReason, e2e_seconds: float, tpot_seconds: float | None) -> None:
        """An accepted request ended. `tpot_seconds` is None with fewer than two generated tokens.

        Times of aborted and failed requests are not observed: they say when the client left, not how
        fast the engine is.
        """
        self._finished[reason] += 1
        self._judge_end(reason, e2e_seconds)
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

    def _judge_end(self, reason: FinishReason, e2e_seconds: float) -> None:
        target = self._targets.e2e_milliseconds
        if target is None:
            return
        is_late = e2e_seconds * 1000.0 > target
        if reason is FinishReason.ERROR or is_late:
            self._e2e_missed += 1
        elif reason is not FinishReason.ABORT:
            self._e2e_met += 1

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
            "e2e_met": self._e2e_met,
            "e2e_missed": self._e2e_missed,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "cache_queried_tokens": self._cache_queried_tokens,
            "generated_tokens": self._generated_tokens,
            "preemptions": self._preemptions,
            "steps": self._steps,
            "recorded_steps": self._recorded_steps,
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
            sizes={name: histogram.snapshot() for name, histogram in self._sizes.items()},
            rates={
                "prompt_tokens": self._prompt_rate.per_second(),
                "generated_tokens": self._generated_rate.per_second(),
            },
            model_load_seconds=self._model_load_seconds,
            drafts=self.drafts.snapshot(),
            offload=self.offload.snapshot(),
            traffic=self.traffic.snapshot(),
            start_seconds=dict(self._start_seconds),
            cuda_graph_bytes=self.cuda_graph_bytes,
            moments=self.moments.snapshot(),
        )
