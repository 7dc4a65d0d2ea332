"""Whether a candidate that gets a share of the requests does as well as it must, at 90% confidence or more.

Three rules, each on what was counted since the step began:

errors    given up when its share of failed requests is above that of the stable revision by more than chance:
          Fisher's exact test, one-sided (Fisher 1935), error probability 0.05, from 3 failed requests on
targets   given up when it violates a target (`slo.verdict`), unless the stable revision violates it as well
          and chance may explain the difference: then the load is at fault, and the step lasts on
latency   given up when more of its requests than the percentile allows take longer than 1.25 times what the
          stable revision needs at that percentile (bucket edges alone lie 1.12 apart), and longer by what
          anybody notices: 20 ms of TTFT, 2 ms of TPOT; needs no target

Evidence that says nothing yet keeps the step going. Pure.
"""

from dataclasses import dataclass
from math import exp, lgamma
from typing import Literal

from headway_operator.rollout.evidence import CanaryEvidence, Side
from headway_operator.slo import histogram
from headway_operator.slo.target import Target
from headway_operator.slo.verdict import LEAST_MISSES, verdict

CHANCE = 0.05
SLOWER = 1.25
# A fresh replica of a small model is a few milliseconds slower than one that has served for long.
NOTICEABLE_MILLISECONDS = {"ttft": 20.0, "tpot": 2.0}
# Fewer requests have no percentile worth comparing with.
LEAST_COMPARED = 20
_NAMES: tuple[Literal["ttft", "tpot"], ...] = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Finding:
    """reason: of giving the candidate up, or "" where it only may not be promoted yet."""

    reason: str
    message: str


def judge(evidence: CanaryEvidence, target: Target) -> Finding | None:
    """What speaks against the candidate; None when nothing does."""
    sides = evidence.candidate, evidence.stable
    found = [
        _errors(*sides),
        *(_against_target(name, *sides, target) for name in _NAMES),
        *(_slower(name, *sides, target) for name in _NAMES),
    ]
    against = [finding for finding in found if finding is not None]
    return next((finding for finding in against if finding.reason), against[0] if against else None)


def _errors(candidate: Side, stable: Side) -> Finding | None:
    mine, others = candidate.answered, stable.answered
    if mine.errors < LEAST_MISSES:
        return None
    if chance_of(mine.errors, mine.requests, others.errors, others.requests) > CHANCE:
        return None
    beside = f"{others.errors} of {others.requests}"
    words = f"{mine.errors} of its {mine.requests} requests failed, against {beside}"
    return Finding("CanaryErrors", words)


def _against_target(
    name: Literal["ttft", "tpot"], candidate: Side, stable: Side, target: Target
) -> Finding | None:
    milliseconds = getattr(target.targets, f"{name}_milliseconds")
    mine, others = _judged(name, candidate), _judged(name, stable)
    if milliseconds is None or verdict(*mine, target.percentile) != "violated":
        return None
    words = (
        f"{mine[1]} of its {sum(mine)} requests missed the {name.upper()} target of {milliseconds:g} ms, "
        f"against {others[1]} of {sum(others)}"
    )
    is_load = verdict(*others, target.percentile) == "violated"
    if is_load and chance_of(mine[1], sum(mine), others[1], sum(others)) > CHANCE:
        return Finding("", words)
    return Finding(f"Canary{name.upper()}Violated", words)


def _slower(name: Literal["ttft", "tpot"], candidate: Side, stable: Side, target: Target) -> Finding | None:
    mine, others = candidate.counted.counts.get(name, {}), stable.counted.counts.get(name, {})
    reference = histogram.percentile(others, target.percentile)
    if reference is None or sum(others.values()) < LEAST_COMPARED:
        return None
    limit = histogram.bucket_of(max(SLOWER * reference, reference + NOTICEABLE_MILLISECONDS[name]))
    slow = sum(count for bucket, count in mine.items() if bucket > limit)
    if verdict(sum(mine.values()) - slow, slow, target.percentile) != "violated":
        return None
    measured = histogram.percentile(mine, target.percentile) or 0.0
    words = f"its P{target.percentile} {name.upper()} is {measured:.0f} ms, against {reference:.0f} ms"
    return Finding(f"Canary{name.upper()}Slower", words)


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
