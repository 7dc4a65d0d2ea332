"""What a replica or a gateway had counted when it was last sampled.

A pass reads a hundred replicas, so numbers lie side by side in tuples, which `growth` subtracts and adds up
by functions that loop in C.
"""

from collections.abc import Mapping
from dataclasses import astuple
from operator import itemgetter
from typing import Any, NamedTuple

from headway_operator.samples import GatewaySample, Histogram, ReplicaSample, Targets
from headway_operator.slo import histogram
from headway_operator.slo.histogram import EDGES, on_grid

LATENCIES = ("ttft", "tpot", "e2e")
# Requests that met the target of each, and that missed it.
JUDGED = tuple((f"{name}_met", f"{name}_missed") for name in LATENCIES)
# Of these the mean is enough.
_PARTS = ("queue", "prefill")
_COUNTERS = (
    *("preemptions", "prompt_tokens", "generated_tokens", "steps", "rejected", "received"),
    *(name for pair in JUDGED for name in pair),
)
_PART_TOTALS = tuple(f"{name}_{kind}" for name in _PARTS for kind in ("milliseconds", "count"))
# Of all buckets of each of LATENCIES.
COUNTED = tuple(f"{name}_count" for name in LATENCIES)
# Of requests: number, sum and sum of squares of tokens. Of steps: sequences, and what they attended to; and
# the time between two tokens, which each step tells once for each sequence. Of gaps, what requests saw of it.
_MOMENT_TOTALS = (
    *("prompts", "prompt_sum", "prompt_squares"),
    *("answers", "answer_sum", "answer_squares"),
    *("decoded", "attended", "told_milliseconds", "told_count"),
    *("gaps", "gap_milliseconds"),
)
REPLICA_TOTALS = (*_COUNTERS, *_PART_TOTALS, *COUNTED, *_MOMENT_TOTALS)
GATEWAY_TOTALS = ("gateway_rejected", "gateway_received")

# Whole answers, of which the last two are, are counted only where they are promised.
_always_counted = itemgetter(*_COUNTERS[:-2])
_NO_HISTOGRAM = Histogram(EDGES, (), 0, 0.0)
_NO_MOMENTS = (0.0,) * len(_MOMENT_TOTALS)
_DECODED, _ATTENDED, _TOLD = 2, 3, 12

NO_TARGETS = Targets()

Sums = tuple[float, ...]


class Baseline(NamedTuple):
    """The totals of one replica or gateway when it was last sampled.

    totals: in the order of REPLICA_TOTALS or GATEWAY_TOTALS. counts: of LATENCIES, on our grid; () where they
    are not known. limits: that it ran with then. steps: its sums over steps, without and with prompts
    (`Moments`). at: when that was, in seconds since the epoch.
    """

    instance: str
    totals: Sums
    targets: Targets = NO_TARGETS
    counts: tuple[histogram.Dense, ...] = ()
    limits: tuple[int, int] | None = None
    steps: tuple[Sums, Sums] | None = None
    at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        counts = {
            name: {str(bucket): count for bucket, count in enumerate(own) if count}
            for name, own in zip(LATENCIES, self.counts, strict=False)
            if own
        }
        return {
            "instance": self.instance,
            "targets": [*astuple(self.targets)],
            "totals": dict(zip(_names(self.totals), self.totals, strict=True)),
            "counts": counts,
            "limits": None if self.limits is None else list(self.limits),
            "steps": None if self.steps is None else [list(sums) for sums in self.steps],
            "at": self.at,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Baseline":
        """The reverse of `to_dict`."""
        limits, steps, totals = data["limits"], data["steps"], data["totals"]
        is_gateway = GATEWAY_TOTALS[0] in totals
        counts = () if is_gateway else tuple(_dense(data["counts"].get(name)) for name in LATENCIES)
        return cls(
            data["instance"],
            tuple(totals.get(name, 0) for name in (GATEWAY_TOTALS if is_gateway else REPLICA_TOTALS)),
            Targets(*data["targets"]),
            counts,
            None if limits is None else (limits[0], limits[1]),
            None if steps is None else (tuple(steps[0]), tuple(steps[1])),
            # Checkpoints of earlier versions do not say when.
            data.get("at", 0.0),
        )


def of_gateway(one: GatewaySample) -> Baseline:
    """What it has counted."""
    totals = one.counters.get("rejected", 0), one.counters.get("received", 0)
    return Baseline(one.instance, totals, at=one.taken_at)


def of_replica(one: ReplicaSample) -> Baseline:
    """What it has counted."""
    histograms, moments, counters = one.histograms, one.moments, one.counters
    try:
        totals = _always_counted(counters)
    except KeyError:
        totals = tuple([counters.get(name, 0) for name in _COUNTERS[:-2]])
    judged = counters.get("e2e_met", 0), counters.get("e2e_missed", 0)
    told = histograms.get
    queue, prefill = told("queue", _NO_HISTOGRAM), told("prefill", _NO_HISTOGRAM)
    is_whole_judged = one.targets.e2e_milliseconds is not None
    ttft, tpot = told("ttft", _NO_HISTOGRAM), told("tpot", _NO_HISTOGRAM)
    whole = told("e2e", _NO_HISTOGRAM) if is_whole_judged else _NO_HISTOGRAM
    parts = queue.sum_milliseconds, queue.num, prefill.sum_milliseconds, prefill.num
    numbers = ttft.num, tpot.num, whole.num
    counts = (
        ttft.counts if ttft.edges is EDGES else on_grid(ttft.edges, ttft.counts),
        tpot.counts if tpot.edges is EDGES else on_grid(tpot.edges, tpot.counts),
        on_grid(whole.edges, whole.counts),
    )
    limits = (one.limits.max_num_seqs, one.limits.max_num_batched_tokens)
    if moments is None:
        row = (*totals, *judged, *parts, *numbers, *_NO_MOMENTS)
        return Baseline(one.instance, row, one.targets, counts, limits, None, one.taken_at)
    decode, prompt = steps = moments.decode_steps, moments.prompt_steps
    decoded = decode[_DECODED] + prompt[_DECODED]
    of_steps = decoded, decode[_ATTENDED] + prompt[_ATTENDED], decode[_TOLD] + prompt[_TOLD], decoded
    row = (*totals, *judged, *parts, *numbers, *moments.prompts, *moments.answers, *of_steps, *moments.gaps)
    return Baseline(one.instance, row, one.targets, counts, limits, steps, one.taken_at)


def _names(totals: Sums) -> tuple[str, ...]:
    """Of the totals of a gateway, or of a replica."""
    return GATEWAY_TOTALS if len(totals) == len(GATEWAY_TOTALS) else REPLICA_TOTALS


def _dense(counts: Mapping[str, int] | None) -> histogram.Dense:
    if counts is None:
        return ()
    return tuple(counts.get(str(bucket), 0) for bucket in range(histogram.NUM_BUCKETS))
