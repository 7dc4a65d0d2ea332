"""From samples of ever-growing totals to what happened in the last minutes, summed over replicas.

Each pass adds what every replica counted since the last one. A replica that restarted (other `instance`)
counts from zero again, so all it shows is new; one that died leaves behind what it had added. A replica met
for the first time counts from zero if it was made after this memory began, else its past is unknown and
only marks a beginning; so does everything after a long time without a pass. Exact counters count only while
the replica judges by the targets asked of it now.

A replica counts whom it turns away as missed, but another one may serve that request. So refusals are kept
apart from `ttft_missed`, as `refused`, and taken from the gateways, who know how each request ended; from the
replicas only where no gateway gave a sample. So are arrivals, as `arrived`; a slice in which one of those who
count them gave no sample is marked `blind`: what came in it shows in the next.
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
# Of requests: number, sum and sum of squares of tokens (`Moments`).
_REQUEST_SUMS = {
    "prompts": ("prompts", "prompt_sum", "prompt_squares"),
    "answers": ("answers", "answer_sum", "answer_squares"),
}
# Of these the mean is enough.
_PARTS = ("queue", "prefill")

NO_TARGETS = Targets()

Numbers = Mapping[str, float]
Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The totals of one replica or gateway when it was last sampled.

    limits: that it ran with then. steps: its sums over steps, without and with prompts (`Moments`).
    """

    instance: str
    targets: Targets = NO_TARGETS
    totals: Numbers = field(default_factory=dict)
    counts: Mapping[str, histogram.Counts] = field(default_factory=dict)
    limits: tuple[int, int] | None = None
    steps: tuple[Sums, Sums] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "instance": self.instance,
            "targets": [*astuple(self.targets)],
            "totals": dict(self.totals),
            "counts": {name: _text_keys(counts) for name, counts in self.counts.items()},
            "limits": None if self.limits is None else list(self.limits),
            "steps": None if self.steps is None else [list(sums) for sums in self.steps],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Baseline":
        """The reverse of `to_dict`."""
        counts = {name: _number_keys(c) for name, c in data["counts"].items()}
        limits, steps = data["limits"], data["steps"]
        return cls(
            data["instance"],
            Targets(*data["targets"]),
            dict(data["totals"]),
            counts,
            None if limits is None else (limits[0], limits[1]),
            None if steps is None else (tuple(steps[0]), tuple(steps[1])),
        )


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
    new = replace(_with_arrivals(joined(added), sample), start=now if is_gap else last_end, end=now)
    return _append(slices, new, changed_at), after


def step_increments(
    before: Mapping[str, Baseline], after: Mapping[str, Baseline], names: Iterable[str]
) -> list[tuple[Sums, Sums]]:
    """Sums over the steps that these replicas took since the last pass, with the same limits all the time."""
    found = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or old.steps is None or new.steps is None or old.steps == new.steps:
            continue
        if old.instance == new.instance and old.limits == new.limits:
            decode, prompt = (
                tuple(now - then for now, then in zip(*pair, strict=True))
                for pair in zip(new.steps, old.steps, strict=True)
            )
            found.append((decode, prompt))
    return found


def _with_arrivals(one: Slice, sample: Sample) -> Slice:
    """Refusals and arrivals as the gateways count them, else as the replicas do; see the header."""
    is_gateway_sampled = any(gateway is not None for gateway in sample.gateways.values())
    refused = one.totals.get("gateway_rejected" if is_gateway_sampled else "rejected", 0)
    arrived = one.totals.get("gateway_received" if sample.gateways else "received", 0)
    counters = sample.gateways if sample.gateways else sample.replicas
    is_blind = any(source is None for source in counters.values())
    told = {"refused": refused, "arrived": arrived, "blind": float(is_blind)}
    dropped = (*_REFUSALS, "gateway_received")
    totals = {name: value for name, value in one.totals.items() if name not in dropped}
    return replace(one, totals={**totals, **{name: value for name, value in told.items() if value}})


def _append(slices: tuple[Slice, ...], new: Slice, changed_at: float) -> tuple[Slice, ...]:
    kept = tuple(one for one in slices if one.end > new.end - LONGEST_SECONDS)
    if kept and new.end - kept[-1].start <= SLICE_SECONDS and changed_at <= kept[-1].start:
        whole = joined((kept[-1], new))
        # What the first part did not see, the second counts.
        blind = new.totals.get("blind", 0.0)
        totals = {name: value for name, value in whole.totals.items() if name != "blind"}
        return (*kept[:-1], replace(whole, totals={**totals, "blind": blind} if blind else totals))
    return (*kept, new)


def _is_present(name: str, sample: Sample, observed: Observed) -> bool:
    return (
        name in sample.replicas or name in sample.gateways or any(r.name == name for r in observed.replicas)
    )


def _baseline(one: ReplicaSample | GatewaySample) -> Baseline:
    if isinstance(one, GatewaySample):
        return Baseline(
            one.instance,
            totals={f"gateway_{name}": one.counters.get(name, 0) for name in ("rejected", "received")},
        )
    exact = [name for met, missed, _ in _EXACT.values() for name in (met, missed)]
    totals: dict[str, float] = {name: one.counters.get(name, 0) for name in (*_COUNTERS, *exact)}
    counts = {}
    for name, latencies in one.histograms.items():
        if name in _LATENCIES:
            counts[name] = histogram.on_grid(latencies.edges, latencies.counts)
        elif name in _PARTS:
            totals[f"{name}_milliseconds"] = latencies.sum_milliseconds
            totals[f"{name}_count"] = sum(latencies.counts)
    limits = (one.limits.max_num_seqs, one.limits.max_num_batched_tokens)
    if one.moments is None:
        return Baseline(one.instance, one.targets, totals, counts, limits)
    for name, parts in _REQUEST_SUMS.items():
        totals.update(zip(parts, getattr(one.moments, name), strict=True))
    steps = (one.moments.decode_steps, one.moments.prompt_steps)
    totals["decoded"], totals["attended"] = (sum(kind[i] for kind in steps) for i in (2, 3))
    return Baseline(one.instance, one.targets, totals, counts, limits, steps)


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
