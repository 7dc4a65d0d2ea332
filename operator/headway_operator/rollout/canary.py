"""Whether a candidate that gets a share of the requests does as well as it must, at 90% confidence or more.

Three rules, each on what was counted since the step began:

errors    given up when its share of failed requests is above that of the stable revision, from 3 failed
          requests on; one that its client left before an answer began counts as failed here, for a candidate
          that hangs has hardly any other
targets   given up when it violates a target (`slo.verdict`) and misses it more often than the stable one;
          where that may be chance, the load may be at fault, and the step lasts on
latency   given up when more of its requests than the percentile allows take longer than 1.25 times what the
          stable revision needs at that percentile (bucket edges alone lie 1.12 apart), and longer by what
          anybody notices: 20 ms of TTFT, 2 ms of TPOT; needs no target, waits until the step could end, and
          must be found again when the step has been repeated

Each only counts where chance does not explain the difference: Fisher's exact test, one-sided (Fisher 1935). A
percentile of some fifty requests is a guess, so one of two sides that are alike looks slower than the other
soon. And it is asked at every pass: while the step has to last on anyway, only what is beyond doubt ends it,
at an error probability of 0.001; once it could end 0.05 is enough (Haybittle 1971, Peto et al. 1976).
Latencies of the same few seconds are no independent witnesses, as whatever else the machine does delays them
all, and a replica that has just come does everything for the first time, its caches empty. That breaks no
promise, so it is asked of the whole step alone, and again of its repetition, which leaves the first out.

Evidence that says nothing speaks for the candidate once the step could end. Pure.
"""

from dataclasses import dataclass
from math import exp, lgamma
from typing import Literal

from headway_operator.rollout.evidence import CanaryEvidence, Side
from headway_operator.rollout.record import Slowness
from headway_operator.samples import RevisionTotals
from headway_operator.slo import histogram
from headway_operator.slo.target import Target
from headway_operator.slo.verdict import LEAST_MISSES, verdict

CHANCE, EARLY_CHANCE = 0.05, 0.001
# Of what a repetition finds once more: both together happen by chance once in a hundred steps.
CHANCE_AGAIN = 0.2
SLOWER = 1.25
# A fresh replica of a small model is a few milliseconds slower than one that has served for long.
NOTICEABLE_MILLISECONDS = {"ttft": 20.0, "tpot": 2.0}
# Fewer requests have no percentile worth comparing with.
LEAST_COMPARED = 20
_NAMES: tuple[Literal["ttft", "tpot"], ...] = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Finding:
    """reason: of giving the candidate up, or "" where it only may not be promoted yet. is_repeated_first:
    the candidate is given up only if a repetition of the step finds it, too."""

    reason: str
    message: str
    is_repeated_first: bool = False


def judge(
    evidence: CanaryEvidence, target: Target, *, is_last: bool, slowness: Slowness = ""
) -> Finding | None:
    """What speaks against the candidate; None when nothing does.

    is_last: whether the step could end now, had nothing been found. slowness: whether the step is repeated,
    and then whether the question has been answered; it is asked once, as each time it is asked chance may
    answer.
    """
    asks_slower, is_repetition = is_last and slowness != "cleared", slowness == "suspected"
    sides = evidence.candidate, evidence.stable
    chance = CHANCE if is_last else EARLY_CHANCE
    found = [
        _errors(*sides, chance),
        *(_against_target(name, *sides, target, chance, is_last=is_last) for name in _NAMES),
        *(_slower(name, *sides, target, is_repetition=is_repetition) for name in _NAMES if asks_slower),
    ]
    against = [finding for finding in found if finding is not None]
    return next((finding for finding in against if finding.reason), against[0] if against else None)


def _errors(candidate: Side, stable: Side, chance: float) -> Finding | None:
    mine, others = candidate.answered, stable.answered
    (failed, num), (failed_others, num_others) = _failed(mine), _failed(others)
    if failed < LEAST_MISSES:
        return None
    if chance_of(failed, num, failed_others, num_others) > chance:
        return None
    left = f" ({mine.client_aborted} were left by their clients unanswered)" if mine.client_aborted else ""
    words = f"{failed} of its {num} requests failed{left}, against {failed_others} of {num_others}"
    return Finding("CanaryErrors", words)


def _failed(totals: RevisionTotals) -> tuple[int, int]:
    """Requests that failed, of how many; those that were left before an answer are in both."""
    return totals.errors + totals.client_aborted, totals.requests + totals.client_aborted


def _against_target(
    name: Literal["ttft", "tpot"],
    candidate: Side,
    stable: Side,
    target: Target,
    chance: float,
    *,
    is_last: bool,
) -> Finding | None:
    milliseconds = getattr(target.targets, f"{name}_milliseconds")
    mine, others = _judged(name, candidate), _judged(name, stable)
    if milliseconds is None or verdict(*mine, target.percentile) != "violated":
        return None
    words = (
        f"{mine[1]} of its {sum(mine)} requests missed the {name.upper()} target of {milliseconds:g} ms, "
        f"against {others[1]} of {sum(others)}"
    )
    # A stable revision that hardly anybody asks will not tell, however long the step lasts.
    will_tell = not is_last or sum(others) >= LEAST_COMPARED
    if will_tell and chance_of(mine[1], sum(mine), others[1], sum(others)) > chance:
        is_load = verdict(*others, target.percentile) == "violated"
        why = "the load is too high to judge" if is_load else "it may be chance"
        return Finding("", f"{why}: {words}")
    return Finding(f"Canary{name.upper()}Violated", words)


def _slower(
    name: Literal["ttft", "tpot"], candidate: Side, stable: Side, target: Target, *, is_repetition: bool
) -> Finding | None:
    mine, others = candidate.counted.counts.get(name, {}), stable.counted.counts.get(name, {})
    reference = histogram.percentile(others, target.percentile)
    if reference is None or sum(others.values()) < LEAST_COMPARED:
        return None
    limit = histogram.bucket_of(max(SLOWER * reference, reference + NOTICEABLE_MILLISECONDS[name]))
    (slow, num), (slow_others, num_others) = _above(limit, mine), _above(limit, others)
    # What has been shown before need not be shown as clearly again.
    if not is_repetition and verdict(num - slow, slow, target.percentile) != "violated":
        return None
    if chance_of(slow, num, slow_others, num_others) > (CHANCE_AGAIN if is_repetition else CHANCE):
        return None
    measured = histogram.percentile(mine, target.percentile) or 0.0
    words = f"its P{target.percentile} {name.upper()} is {measured:.0f} ms, against {reference:.0f} ms"
    return Finding(f"Canary{name.upper()}Slower", words, is_repeated_first=True)


def _above(limit: int, counts: histogram.Counts) -> tuple[int, int]:
    """How many lie in buckets above `limit`, and of how many."""
    return sum(count for bucket, count in counts.items() if bucket > limit), sum(counts.values())


def _judged(name: Literal["ttft", "tpot"], side: Side) -> tuple[int, int]:
    totals = side.counted.totals
    return int(totals.get(f"{name}_met", 0)), int(totals.get(f"{name}_missed", 0))


def chance_of(mine_bad: int, mine: int, others_bad: int, others: int) -> float:
    """How likely at least `mine_bad` of `mine` would be if both sides were alike: Fisher's exact test.

    The number on one side is hypergeometric once both sums are given; summed from `mine_bad` up.
    """
    bad, total = mine_bad + others_bad, mine + others
    whole = _log_choose(total, mine)
    tail = sum(
        exp(_log_choose(bad, k) + _log_choose(total - bad, mine - k) - whole)
        for k in range(mine_bad, min(bad, mine) + 1)
        if mine - k <= total - bad
    )
    return min(1.0, tail)


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
