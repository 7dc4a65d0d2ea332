"""What a replica or a gateway had counted when it was last sampled, and what all of them counted since then.

A pass reads a hundred replicas, so numbers lie side by side in tuples and are subtracted and summed by
functions that loop in C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import sub
from typing import Any

from headway_operator.samples import GatewaySample, Histogram, ReplicaSample, Targets
from headway_operator.slo import histogram

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
# Of requests: number, sum and sum of squares of tokens. Of steps: sequences, and what they attended to; and
# the time between two tokens, which each step tells once for each sequence. Of gaps, what requests saw of it.
_MOMENT_TOTALS = (
    *("prompts", "prompt_sum", "prompt_squares"),
    *("answers", "answer_sum", "answer_squares"),
    *("decoded", "attended", "told_milliseconds", "told_count"),
    *("gaps", "gap_milliseconds"),
)
REPLICA_TOTALS = (*_COUNTERS, *_PART_TOTALS, *_MOMENT_TOTALS)
GATEWAY_TOTALS = ("gateway_rejected", "gateway_received")

_NO_HISTOGRAMS: tuple[histogram.Dense, ...] = ((),) * len(LATENCIES)
_NO_COUNTS, _NO_MOMENTS = (0,) * len(_COUNTERS), (0.0,) * len(_MOMENT_TOTALS)
_REJECTED = REPLICA_TOTALS.index("rejected")
# A replica counts whom it turns away among these; see `window`.
_MISSED_AND_REFUSED = tuple(REPLICA_TOTALS.index(name) for name in ("ttft_missed", "e2e_missed"))
_JUDGED_PLACES = tuple(tuple(REPLICA_TOTALS.index(name) for name in pair) for pair in JUDGED)
_DECODED, _ATTENDED, _TOLD = 2, 3, 12

NO_TARGETS = Targets()

Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The totals of one replica or gateway when it was last sampled.

    totals: in the order of REPLICA_TOTALS or GATEWAY_TOTALS. counts: of LATENCIES, on our grid; () where it
    has none. limits: that it ran with then. steps: its sums over steps, without and with prompts (`Moments`).
    """

    instance: str
    totals: Sums
    targets: Targets = NO_TARGETS
    counts: tuple[histogram.Dense, ...] = ()
    limits: tuple[int, int] | None = None
    steps: tuple[Sums, Sums] | None = None

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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Baseline":
        """The reverse of `to_dict`."""
        limits, steps, totals = data["limits"], data["steps"], data["totals"]
        is_gateway = GATEWAY_TOTALS[0] in totals
        return cls(
            data["instance"],
            tuple(totals.get(name, 0) for name in (GATEWAY_TOTALS if is_gateway else REPLICA_TOTALS)),
            Targets(*data["targets"]),
            () if is_gateway else tuple(_dense(data["counts"].get(name)) for name in LATENCIES),
            None if limits is None else (limits[0], limits[1]),
            None if steps is None else (tuple(steps[0]), tuple(steps[1])),
        )


def of_gateway(one: GatewaySample) -> Baseline:
    """What it has counted."""
    return Baseline(one.instance, (one.counters.get("rejected", 0), one.counters.get("received", 0)))


def of_replica(one: ReplicaSample) -> Baseline:
    """What it has counted."""
    histograms, moments = one.histograms, one.moments
    totals: list[float] = [*map(one.counters.get, _COUNTERS, _NO_COUNTS)]
    for name in _PARTS:
        part = histograms.get(name)
        totals += (0.0, 0) if part is None else (part.sum_milliseconds, part.num)
    counts = tuple(map(_on_grid, map(histograms.get, LATENCIES)))
    limits = (one.limits.max_num_seqs, one.limits.max_num_batched_tokens)
    if moments is None:
        return Baseline(one.instance, (*totals, *_NO_MOMENTS), one.targets, counts, limits)
    decode, prompt = steps = moments.decode_steps, moments.prompt_steps
    totals += (*moments.prompts, *moments.answers)
    decoded = decode[_DECODED] + prompt[_DECODED]
    totals += (decoded, decode[_ATTENDED] + prompt[_ATTENDED], decode[_TOLD] + prompt[_TOLD], decoded)
    totals += moments.gaps
    return Baseline(one.instance, tuple(totals), one.targets, counts, limits, steps)


@dataclass(frozen=True, slots=True)
class Growth:
    """What one counted since it was last sampled: totals, and counts now and then, as in `Baseline`."""

    totals: Sums
    counts: tuple[histogram.Dense, ...]
    counts_before: tuple[histogram.Dense, ...]


def growth(before: Baseline | None, now: Baseline, targets: Targets) -> Growth:
    """Since `before`; everything where it is None, of another instance, or more. Exact counters count only
    where `targets` are what the replica judges by."""
    grown = now.totals
    if before is not None and before.instance == now.instance:
        grown = tuple(map(sub, now.totals, before.totals))
        if min(grown) < 0:
            before, grown = None, now.totals
    else:
        before = None
    if not now.counts:
        return Growth(grown, (), ())
    if now.targets != targets or (before is not None and before.targets != targets):
        grown = _judged(grown, now, before, targets)
    rejected = grown[_REJECTED]
    if rejected:
        others = [*grown]
        for place in _MISSED_AND_REFUSED:
            others[place] = max(0, others[place] - rejected)
        grown = tuple(others)
    return Growth(grown, now.counts, _NO_HISTOGRAMS if before is None else before.counts)


def summed(grown: Sequence[Growth]) -> tuple[dict[str, float], dict[str, dict[int, int]]]:
    """Totals that are not 0 by name, and counts by latency and bucket."""
    totals: dict[str, float] = {}
    for size in {len(one.totals) for one in grown}:
        rows = [one.totals for one in grown if len(one.totals) == size]
        sums = map(sum, zip(*rows, strict=True))
        totals |= {name: value for name, value in zip(_names(rows[0]), sums, strict=True) if value}
    replicas = [one for one in grown if one.counts]
    counts = {
        name: histogram.increments(
            [one.counts[index] for one in replicas], [one.counts_before[index] for one in replicas]
        )
        for index, name in enumerate(LATENCIES)
    }
    return totals, counts if replicas else {}


def _judged(totals: Sums, now: Baseline, before: Baseline | None, targets: Targets) -> Sums:
    """The totals without what was judged by other targets than these."""
    kept = [*totals]
    then = now if before is None else before
    for places, wanted, judged_by, judged_by_then in zip(
        _JUDGED_PLACES, astuple(targets), astuple(now.targets), astuple(then.targets), strict=True
    ):
        for place in places:
            if wanted is None or judged_by != wanted:
                kept[place] = 0
            elif judged_by_then != judged_by:
                # New targets restart the exact counters.
                kept[place] = now.totals[place]
    return tuple(kept)


def _on_grid(one: Histogram | None) -> histogram.Dense:
    return () if one is None else histogram.on_grid(one.edges, one.counts)


def _names(totals: Sums) -> tuple[str, ...]:
    """Of the totals of a gateway, or of a replica."""
    return GATEWAY_TOTALS if len(totals) == len(GATEWAY_TOTALS) else REPLICA_TOTALS


def _dense(counts: Mapping[str, int] | None) -> histogram.Dense:
    if counts is None:
        return ()
    return tuple(counts.get(str(bucket), 0) for bucket in range(histogram.NUM_BUCKETS))
