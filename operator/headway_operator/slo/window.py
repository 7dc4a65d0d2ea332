"""From samples of ever-growing totals to what happened in the last minutes, summed over replicas.

Each pass adds what every replica counted since the last one. A replica that restarted (other `instance`)
counts from zero again, so all it shows is new; one that died leaves behind what it had added. A replica met
for the first time counts from zero if it was made after this memory began, else its past is unknown and
only marks a beginning; so does everything after a long time without a pass. Exact counters count only while
the replica judges by the targets asked of it now.

A replica counts whom it turns away as missed, but another one may serve that request. So refusals are kept
apart from `ttft_missed`, as `refused`, and taken from the gateways, who know how each request ended; from the
replicas only where no gateway gave a sample.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from headway_operator.slo import histogram
from headway_operator.state import (
    GatewaySample,
    Observed,
    ReplicaSample,
    Sample,
    Targets,
)

LONGEST_SECONDS = 300.0
# Passes closer together than this share a slice, which bounds the memory's size.
SLICE_SECONDS = 5.0
# After a longer time without a pass nobody can say when the requests in between came.
LONGEST_GAP_SECONDS = 60.0

_COUNTERS = ("preemptions", "prompt_tokens", "generated_tokens", "steps", "rejected", "received")
_EXACT = {
    "ttft": ("ttft_met", "ttft_missed", "ttft_milliseconds"),
    "tpot": ("tpot_met", "tpot_missed", "tpot_milliseconds"),
    "e2e": ("e2e_met", "e2e_missed", "e2e_milliseconds"),
}
_LATENCIES = ("ttft", "tpot", "e2e")
# Who counted refusals; of both only `refused` is kept.
_REFUSALS = ("gateway_rejected", "rejected")
# Of these the mean is enough.
_PARTS = ("queue", "prefill")

NO_TARGETS = Targets()

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The totals of one replica or gateway when it was last sampled."""

    instance: str
    targets: Targets = NO_TARGETS
    totals: Numbers = field(default_factory=dict)
    counts: Mapping[str, histogram.Counts] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "instance": self.instance,
            "targets": [*astuple(self.targets)],
            "totals": dict(self.totals),
            "counts": {name: _text_keys(counts) for name, counts in self.counts.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Baseline":
        """The reverse of `to_dict`."""
        counts = {name: _number_keys(c) for name, c in data["counts"].items()}
        return cls(data["instance"], Targets(*data["targets"]), dict(data["totals"]), counts)


@dataclass(frozen=True, slots=True)
class Slice:
    """What all replicas and gateways together counted in (start, end]."""

    start: float
    end: float
    totals: Numbers = field(default_factory=dict)
    counts: Mapping[str, histogram.Counts] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "span": [self.start, self.end],
            "totals": dict(self.totals),
            "counts": {name: _text_keys(counts) for name, counts in self.counts.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Slice":
        """The reverse of `to_dict`."""
        counts = {name: _number_keys(c) for name, c in data["counts"].items()}
        start, end = data["span"]
        return cls(start, end, dict(data["totals"]), counts)


def joined(slices: Iterable[Slice]) -> Slice:
    """Several slices as one."""
    parts = list(slices)
    if not parts:
        return Slice(0.0, 0.0)
    return Slice(
        min(part.start for part in parts),
        max(part.end for part in parts),
        _sum(part.totals for part in parts),
        {name: histogram.total(part.counts.get(name, {}) for part in parts) for name in _LATENCIES},
    )


def without_exact(one: Slice) -> Slice:
    """The slice without the exact counters, which were taken against targets that no longer hold."""
    judged = {name for met, missed, _ in _EXACT.values() for name in (met, missed)}
    return replace(one, totals={name: value for name, value in one.totals.items() if name not in judged})


def advance(
    slices: tuple[Slice, ...],
    baselines: Mapping[str, Baseline],
    sample: Sample,
    observed: Observed,
    targets: Targets,
    began_at: float,
    changed_at: float,
) -> tuple[tuple[Slice, ...], dict[str, Baseline]]:
    """The slices and baselines after one more pass.

    began_at: when this memory began. changed_at: when something was last changed; no slice spans that.
    """
    young = {replica.name for replica in observed.replicas if replica.created_at >= began_at}
    now = sample.taken_at
    last_end = slices[-1].end if slices else began_at
    is_gap = now - last_end > LONGEST_GAP_SECONDS
    after = {name: base for name, base in baselines.items() if _is_present(name, sample, observed)}
    added: list[Slice] = []
    present = {**sample.replicas, **sample.gateways}
    for name, one in present.items():
        if one is None:
            continue
        before = baselines.get(name)
        current = _baseline(one)
        after[name] = current
        if is_gap or (before is None and name not in young):
            continue
        added.append(_increment(before, current, targets, last_end, now))
    new = replace(_with_refused(joined(added), sample), start=now if is_gap else last_end, end=now)
    return _append(slices, new, changed_at), after


def _with_refused(one: Slice, sample: Sample) -> Slice:
    is_gateway_sampled = any(gateway is not None for gateway in sample.gateways.values())
    refused = one.totals.get("gateway_rejected" if is_gateway_sampled else "rejected", 0)
    totals = {name: value for name, value in one.totals.items() if name not in _REFUSALS}
    return replace(one, totals={**totals, "refused": refused} if refused else totals)


def _append(slices: tuple[Slice, ...], new: Slice, changed_at: float) -> tuple[Slice, ...]:
    kept = tuple(one for one in slices if one.end > new.end - LONGEST_SECONDS)
    if kept and new.end - kept[-1].start <= SLICE_SECONDS and changed_at <= kept[-1].start:
        return (*kept[:-1], joined((kept[-1], new)))
    return (*kept, new)


def _is_present(name: str, sample: Sample, observed: Observed) -> bool:
    return (
        name in sample.replicas or name in sample.gateways or any(r.name == name for r in observed.replicas)
    )


def _baseline(one: ReplicaSample | GatewaySample) -> Baseline:
    if isinstance(one, GatewaySample):
        return Baseline(one.instance, totals={"gateway_rejected": one.counters.get("rejected", 0)})
    exact = [name for met, missed, _ in _EXACT.values() for name in (met, missed)]
    totals: dict[str, float] = {name: one.counters.get(name, 0) for name in (*_COUNTERS, *exact)}
    counts = {}
    for name, latencies in one.histograms.items():
        if name in _LATENCIES:
            counts[name] = histogram.on_grid(latencies.edges, latencies.counts)
        elif name in _PARTS:
            totals[f"{name}_milliseconds"] = latencies.sum_milliseconds
            totals[f"{name}_count"] = sum(latencies.counts)
    return Baseline(one.instance, one.targets, totals, counts)


def _increment(before: Baseline | None, now: Baseline, targets: Targets, start: float, end: float) -> Slice:
    if before is None or before.instance != now.instance:
        before = Baseline(now.instance, now.targets)
    totals = {name: _grown(value, before.totals.get(name, 0)) for name, value in now.totals.items()}
    for met, missed, target in _EXACT.values():
        wanted, judged_by = getattr(targets, target), getattr(now.targets, target)
        for name in (met, missed):
            if name not in totals:
                continue
            if wanted is None or judged_by != wanted:
                del totals[name]
            elif getattr(before.targets, target) != judged_by:
                # New targets restart the exact counters.
                totals[name] = now.totals[name]
    for name in ("ttft_missed", "e2e_missed"):
        if name in totals:
            totals[name] = max(0, totals[name] - totals["rejected"])
    counts = {
        name: histogram.increments(now.counts.get(name, {}), before.counts.get(name, {}))
        for name in _LATENCIES
    }
    return Slice(start, end, {name: value for name, value in totals.items() if value}, counts)


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _sum(many: Iterable[Numbers]) -> dict[str, float]:
    result: dict[str, float] = {}
    for numbers in many:
        for name, value in numbers.items():
            result[name] = result.get(name, 0) + value
    return result


def _text_keys(counts: histogram.Counts) -> dict[str, int]:
    return {str(bucket): count for bucket, count in counts.items()}


def _number_keys(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(bucket): count for bucket, count in counts.items()}
