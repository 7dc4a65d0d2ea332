"""A few replicas that break the promise while the others keep it and have room: what is wrong is theirs.

A throttled device, a noisy neighbour or a hung engine is not mended by more replicas, and smaller limits
would slow those that are well. So nothing is moved for such misses, and who it is gets told.

Each replica is judged by its own exact counters since a mark of one to two minutes ago, and after the last
one joined, with what has waited there for too long: limits and trust are the same for all. Sick is one whose
count is a violation, where such are at most MOST_SHARE of all (or one), the others together keep the
objective, on LEAST_OTHERS requests or more, and could take the whole load.
"""

from collections.abc import Mapping, Sequence

from headway_operator.samples import ReplicaSample, Sample
from headway_operator.slo import marks
from headway_operator.slo.evidence import num_late, sampled_replicas
from headway_operator.slo.forecast import Forecast
from headway_operator.slo.memory import Memory
from headway_operator.slo.sizing import Sizing
from headway_operator.slo.target import Target
from headway_operator.slo.verdict import verdict

MOST_SHARE = 0.25
LEAST_OTHERS = 20
# Of what the others can do, by the model; without one, of their places.
MOST_LOAD, MOST_PLACES = 0.7, 0.7

# Requests that met a target, and that missed it.
Judged = tuple[int, int]


def sick(
    target: Target,
    memory: Memory,
    sample: Sample,
    found: Sizing | None,
    expected: Forecast,
    broken: Sequence[str],
    since: float,
    now: float,
) -> str:
    """Which replicas, what they miss and what to do, in a sentence; "" where none is sick.

    broken: of "ttft" and "tpot", what all together miss. since: when the last of them joined.
    """
    mark = marks.usable(memory.marks, now, since)
    if not broken or mark is None:
        return ""
    fresh = {name: one for name, one in sampled_replicas(sample).items() if not one.draining}
    for latency in broken:
        counts = _counts(target, memory, mark, fresh, latency)
        ill = [name for name, one in counts.items() if verdict(*one, target.percentile) == "violated"]
        if not ill or len(ill) > max(1, int(MOST_SHARE * len(fresh))):
            continue
        others = {name: one for name, one in fresh.items() if name not in ill}
        if _is_kept(target, [counts[name] for name in others if name in counts]) and _have_room(
            others, fresh, found, expected
        ):
            return _words(latency, {name: counts[name] for name in ill}, len(others), now - mark.at)
    return ""


def _counts(
    target: Target, memory: Memory, mark: marks.Mark, fresh: Mapping[str, ReplicaSample], latency: str
) -> dict[str, Judged]:
    counts = {}
    for name, one in fresh.items():
        baseline = memory.baselines.get(name)
        if baseline is None:
            continue
        told = marks.counted_since(mark, name, baseline, target.targets)
        if told is None:
            continue
        missed = told[f"{latency}_missed"]
        if latency == "ttft":
            # Whom it turned away another may have served.
            missed = max(0.0, missed - told["rejected"])
            missed += num_late(one.waiting, one.oldest_waiting_seconds, target)
        counts[name] = (int(told[f"{latency}_met"]), int(missed))
    return counts


def _is_kept(target: Target, others: list[Judged]) -> bool:
    met, missed = (sum(one[place] for one in others) for place in (0, 1))
    return met + missed >= LEAST_OTHERS and 100 * missed <= (100 - target.percentile) * (met + missed)


def _have_room(
    others: Mapping[str, ReplicaSample],
    fresh: Mapping[str, ReplicaSample],
    found: Sizing | None,
    expected: Forecast,
) -> bool:
    if any(one.waiting > 1 for one in others.values()):
        return False
    if found is not None:
        return expected.now <= MOST_LOAD * len(others) * found.per_second
    places = sum(one.limits.max_num_seqs for one in others.values())
    return sum(one.running + one.waiting for one in fresh.values()) <= MOST_PLACES * places


def _words(latency: str, ill: Mapping[str, Judged], num_others: int, seconds: float) -> str:
    each = ", ".join(f"{name} in {missed} of {met + missed}" for name, (met, missed) in sorted(ill.items()))
    verb = "misses" if len(ill) == 1 else "miss"
    rest = "the other one keeps it" if num_others == 1 else f"the other {num_others} keep it"
    return (
        f"{each} requests of the last {seconds:.0f} s {verb} the {latency.upper()} target while {rest} with "
        "room for the whole load: look at the node, the device and the log, or delete the pod"
    )
