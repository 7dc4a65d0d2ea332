"""From samples of ever-growing totals to what happened in the last minutes, summed over replicas.

Each pass adds what every replica counted since the last one. A replica that restarted (other `instance`)
counts from zero again, so all it shows is new; one that died leaves behind what it had added. A replica met
for the first time counts from zero if it was made after this memory began, else its past is unknown and
only marks a beginning; so does everything after a long time without a pass, one that gave no sample for as
long, and one whose totals fell without a restart, which contradicts itself. Exact counters count only while
the replica judges by the targets asked of it now.

A replica counts whom it turns away as missed, but another one may serve that request. So refusals are kept
apart from `ttft_missed`, as `refused`, and taken from the gateways, who know how each request ended; from the
replicas only where no gateway gave a sample. So are arrivals, as `arrived`; a slice in which one of those who
count them gave no sample is marked `blind`: what came in it shows in the next. Where one of them has given
none for long, or contradicts itself, what it counted meanwhile never shows: such a slice is marked `lost`,
what came is what the replicas received, those that tell standing for the others, and what came in blind
slices before it is not known.

Of what is no counter, the sequences that ran at each sample are summed up as `ran`, the shares of KV caches
in use as `kv_held`, and the time of replicas that do not drain, whether or not they gave a sample, as
`replica_seconds`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import sub
from typing import TypeVar

from headway_operator.samples import Sample, Targets
from headway_operator.slo import histogram
from headway_operator.slo.baselines import (
    LATENCIES,
    Baseline,
    Sums,
    of_gateway,
    of_replica,
)
from headway_operator.slo.forecast import arrivals
from headway_operator.slo.growth import NO_COLUMNS, Columns, grown
from headway_operator.slo.rate_change import Span
from headway_operator.slo.slices import Numbers, Slice, counts_in, joined, summed_totals
from headway_operator.state import Observed

LONGEST_SECONDS = 300.0
# Passes closer together than this share a slice, which bounds the memory's size.
SLICE_SECONDS = 5.0
# How far apart passes are shows in the last of them, however long ago these were.
LEAST_SLICES = 2
# After a longer time without a pass, or without a sample of one, nobody can say when the requests in between
# came; unless passes are as far apart, or nearly, all the time.
LONGEST_GAP_SECONDS, LONGEST_GAP_PASSES = 60.0, 2.5

# Who counted refusals; of both only `refused` is kept.
_REFUSALS = ("gateway_rejected", "rejected")

Sum = TypeVar("Sum")


class Recent:
    """The latest slices, the oldest first, and their sums since a time, each worked out once.

    Since a time means all slices that did not begin before it, and the last `least` in any case. As a pass is
    later than its samples, the last ten seconds, asked for at one, are those of one slice of five.
    """

    __slots__ = ("_arrivals", "_counts", "_totals", "slices")

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = tuple(slices)
        self._arrivals: list[Span] | None = None
        self._totals: dict[int, Numbers] = {0: {}}
        self._counts: dict[str, dict[int, histogram.Counts]] = {name: {0: {}} for name in LATENCIES}

    @property
    def arrivals(self) -> list[Span]:
        """What came (`forecast`)."""
        if self._arrivals is None:
            self._arrivals = arrivals(self.slices)
        return self._arrivals

    def totals(self, start: float, *, least: int = 0) -> Numbers:
        """By name; what is not there is 0."""
        return self._extended(self._totals, self._number(start, least), summed_totals)

    def counts(self, name: str, start: float) -> histogram.Counts:
        """Of a latency."""

        def add(part: Sequence[Slice], before: histogram.Counts) -> histogram.Counts:
            return counts_in(part, name, before)

        return self._extended(self._counts[name], self._number(start), add)

    def seconds(self, start: float) -> float:
        """That the slices took."""
        part = self._last(self._number(start))
        return part[-1].end - part[0].start if part else 0.0

    def _number(self, start: float, least: int = 0) -> int:
        count = len(self.slices)
        return max(count - bisect_left(self.slices, start, key=_start), min(least, count))

    def _last(self, number: int) -> tuple[Slice, ...]:
        return self.slices[len(self.slices) - number :]

    def _extended(
        self, known: dict[int, Sum], number: int, add: Callable[[Sequence[Slice], Sum], Sum]
    ) -> Sum:
        """The sum of the last `number` slices, of which that of fewer is `known`."""
        if number not in known:
            most = max(one for one in known if one < number)
            part = self._last(number)[: number - most]
            known[number] = add(part, known[most])
        return known[number]


def _start(one: Slice) -> float:
    return one.start


def advance(
    slices: tuple[Slice, ...],
    baselines: Mapping[str, Baseline],
    sample: Sample,
    observed: Observed,
    targets: Targets,
    began_at: float,
    changed_at: float,
    known: Columns = NO_COLUMNS,
    longest_gap: float | None = None,
) -> tuple[tuple[Slice, ...], dict[str, Baseline], Columns, frozenset[str]]:
    """The slices and baselines after one more pass, what to hand in as `known` at the next one, and who
    contradicts what they told before.

    began_at: when this memory began. changed_at: when something was last changed; no slice spans that.
    longest_gap: seconds after which nobody can say when the requests in between came; None for what that is
    for passes as far apart as the last ones were.
    """
    young = {replica.name for replica in observed.replicas if replica.created_at >= began_at}
    last_end = slices[-1].end if slices else began_at
    # Clocks are set back by a little now and then.
    now = max(sample.taken_at, last_end)
    longest_gap = _longest_gap(slices) if longest_gap is None else longest_gap
    is_gap = now - last_end > longest_gap
    present = {*sample.replicas, *sample.gateways, *(replica.name for replica in observed.replicas)}
    after = {name: base for name, base in baselines.items() if name in present}
    current = {name: of_replica(one) for name, one in sample.replicas.items() if one is not None}
    current |= {name: of_gateway(one) for name, one in sample.gateways.items() if one is not None}
    pairs: list[tuple[Baseline | None, Baseline]] = []
    told_seconds: dict[str, float] = {}
    if not is_gap:
        for name, one in current.items():
            before = baselines.get(name)
            seconds = now - last_end if before is None else one.at - (before.at or last_end)
            if seconds <= longest_gap if before is not None else name in young:
                pairs.append((before, one))
                told_seconds[name] = seconds
    totals, counts, columns, fallen = grown(pairs, targets, known)
    contradicted = frozenset(
        name for name, one in (current.items() if fallen else ()) if any(one is it for it in fallen)
    )
    start = now if is_gap else last_end
    counters: Iterable[str] = () if is_gap else (sample.gateways or sample.replicas)
    is_lost = any(is_unseen(name, baselines, now - longest_gap) for name in counters)
    is_lost |= not contradicted.isdisjoint(counters)
    for name in contradicted:
        told_seconds.pop(name, None)
    told = _with_sampled(totals, sample, now - start, told_seconds if is_lost else None)
    new = Slice(start, now, told, counts)
    return _append(slices, new, changed_at), after | current, columns, contradicted


def _longest_gap(slices: Sequence[Slice]) -> float:
    """Between passes: one that was late, or an operator that was away, says nothing of the others."""
    last = [one.end for one in slices[-3:]]
    apart = min(last[1] - last[0], last[2] - last[1]) if len(last) > 2 else 0.0
    return max(LONGEST_GAP_SECONDS, LONGEST_GAP_PASSES * apart)


def is_unseen(name: str, baselines: Mapping[str, Baseline], since: float) -> bool:
    """Whether one that had given samples has given none since then."""
    seen = baselines.get(name)
    return seen is not None and 0.0 < seen.at < since


def step_increments(
    before: Mapping[str, Baseline], after: Mapping[str, Baseline], names: Iterable[str]
) -> list[tuple[Sums, Sums]]:
    """Sums over the steps that these replicas took since the last pass, with the same limits all the time."""
    found = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or old.instance != new.instance or old.limits != new.limits:
            continue
        if old.steps is not None and new.steps is not None and old.steps != new.steps:
            (decode_before, prompt_before), (decode, prompt) = old.steps, new.steps
            found.append((tuple(map(sub, decode, decode_before)), tuple(map(sub, prompt, prompt_before))))
    return found


def _with_sampled(
    totals: Numbers, sample: Sample, seconds: float, told_seconds: Mapping[str, float] | None
) -> Numbers:
    """Refusals and arrivals as the gateways count them, else as the replicas do; and what runs. See the
    header. told_seconds: where one that counts arrivals is lost, of each that is not, how long its counts
    are of; else None."""
    is_gateway_sampled = any(gateway is not None for gateway in sample.gateways.values())
    counters = sample.gateways if sample.gateways else sample.replicas
    replicas = [replica for replica in sample.replicas.values() if replica is not None]
    num_serving = sum(replica is None or not replica.draining for replica in sample.replicas.values())
    arrived = totals.get("gateway_received" if sample.gateways else "received", 0.0)
    is_blind = any(source is None for source in counters.values())
    if told_seconds is not None:
        times = [
            told_seconds[name]
            for name, one in sample.replicas.items()
            if name in told_seconds and one is not None and not one.draining
        ]
        is_blind = 2 * len(times) < num_serving or not sum(times)
        arrived = 0.0 if is_blind else totals.get("received", 0.0) * num_serving * seconds / sum(times)
    told = {
        "refused": totals.get("gateway_rejected" if is_gateway_sampled else "rejected", 0.0),
        "arrived": arrived,
        "blind": float(is_blind),
        "lost": float(told_seconds is not None),
        "ran": float(sum([replica.running for replica in replicas])),
        "kv_held": sum([replica.kv_blocks_used / (replica.kv_blocks_total or 1) for replica in replicas]),
        "replica_seconds": num_serving * seconds,
    }
    dropped = (*_REFUSALS, "gateway_received")
    kept = {name: value for name, value in totals.items() if name not in dropped}
    return {**kept, **{name: value for name, value in told.items() if value}}


def _append(slices: tuple[Slice, ...], new: Slice, changed_at: float) -> tuple[Slice, ...]:
    kept = tuple(one for one in slices if one.end > new.end - LONGEST_SECONDS)
    if len(kept) < LEAST_SLICES:
        kept = slices[-LEAST_SLICES:]
    if kept and new.end - kept[-1].start <= SLICE_SECONDS and changed_at <= kept[-1].start:
        whole = joined((kept[-1], new))
        # What the first part did not see, the second counts.
        blind = new.total("blind")
        totals = {name: value for name, value in whole.totals.items() if name != "blind"}
        return (*kept[:-1], whole.with_totals({**totals, "blind": blind} if blind else totals))
    return (*kept, new)
