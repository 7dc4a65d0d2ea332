"""How often a candidate is given up over a whole step, judged at every pass: by chance, and for cause."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from headway_operator.rollout.canary import Finding, judge
from headway_operator.rollout.evidence import CanaryEvidence, Side
from headway_operator.rollout.record import Slowness
from headway_operator.samples import RevisionTotals
from headway_operator.slo.histogram import bucket_of
from headway_operator.slo.slices import Slice
from headway_operator.slo.target import Target

STEPS = 100
# Latencies of requests spread as far as this, being exp of a normal variable with this deviation: prompts of
# all lengths, or two replicas on a busy machine.
WIDE = 1.0


@dataclass(slots=True)
class Answers:
    """What one revision has answered in a step; `ttft` and `tpot` are medians in milliseconds."""

    random: Random
    ttft: float = 100.0
    tpot: float = 20.0
    deviation: float = WIDE
    failing: float = 0.0
    counts: dict[str, dict[int, int]] = field(default_factory=lambda: {"ttft": {}, "tpot": {}})
    totals: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    errors: int = 0

    def more(self, requests: int, target: Target) -> None:
        self.requests += requests
        self.errors += sum(self.random.random() < self.failing for _ in range(requests))
        for name in ("ttft", "tpot"):
            promise = getattr(target.targets, f"{name}_milliseconds")
            for _ in range(requests):
                value = getattr(self, name) * self.random.lognormvariate(0.0, self.deviation)
                bucket, kept = bucket_of(value), "met" if promise is None or value <= promise else "missed"
                self.counts[name][bucket] = self.counts[name].get(bucket, 0) + 1
                self.totals[f"{name}_{kept}"] = self.totals.get(f"{name}_{kept}", 0.0) + 1

    def side(self) -> Side:
        return Side(Slice(0.0, 1.0, self.totals, self.counts), RevisionTotals(self.requests, self.errors))


def verdicts(
    candidate: Answers,
    stable: Answers,
    target: Target,
    passes: int,
    requests: int,
    *,
    is_repetition: bool = False,
) -> Iterator[Finding | None]:
    """One step, half of the requests to each side."""
    for number in range(1, passes + 1):
        for side in (candidate, stable):
            side.more(requests, target)
        seen = candidate.side(), stable.side()
        evidence = CanaryEvidence(("c", 0), 0.0, float(number), *seen)
        slowness: Slowness = "suspected" if is_repetition else ""
        yield judge(evidence, target, is_last=number == passes, slowness=slowness)


def share_given_up(
    build: Any, passes: int, requests: int, mine: dict[str, Any], others: dict[str, Any]
) -> float:
    random, target = Random(1), build.target()

    def is_given_up(*, is_repetition: bool = False) -> bool:
        sides = Answers(random, **mine), Answers(random, **others)
        step = verdicts(*sides, target, passes, requests, is_repetition=is_repetition)
        found = [one for one in step if one is not None and one.reason]
        if found and found[0].is_repeated_first and not is_repetition:
            return is_given_up(is_repetition=True)
        return bool(found)

    return sum(is_given_up() for _ in range(STEPS)) / STEPS


@pytest.mark.parametrize(
    ("passes", "requests", "alike", "most"),
    [
        pytest.param(5, 10, {"ttft": 25.0, "tpot": 5.0}, 0.01, id="ten seconds, latencies spread far"),
        pytest.param(30, 8, {"ttft": 25.0, "tpot": 5.0}, 0.01, id="minutes, latencies spread far"),
        pytest.param(30, 8, {"ttft": 210.0, "deviation": 0.25}, 0.08, id="both miss the target now and then"),
        pytest.param(60, 8, {"failing": 0.1, "deviation": 0.1}, 0.08, id="both fail now and then"),
    ],
)
def test_a_candidate_like_what_serves_beside_it_is_hardly_ever_given_up(
    build: Any, passes: int, requests: int, alike: dict[str, Any], most: float
) -> None:
    assert share_given_up(build, passes, requests, alike, alike) <= most


@pytest.mark.parametrize(
    ("passes", "mine", "others"),
    [
        pytest.param(30, {"ttft": 50.0}, {"ttft": 25.0}, id="twice as slow, latencies spread far"),
        pytest.param(
            30,
            {"tpot": 16.0, "deviation": 0.3},
            {"tpot": 10.0, "deviation": 0.3},
            id="slower by half, latencies spread little",
        ),
        pytest.param(
            10,
            {"ttft": 250.0, "deviation": 0.25},
            {"ttft": 190.0, "deviation": 0.25},
            id="misses the target, what serves beside it does not",
        ),
        pytest.param(10, {"failing": 0.2}, {"failing": 0.01}, id="fails"),
    ],
)
def test_a_worse_candidate_is_given_up(
    build: Any, passes: int, mine: dict[str, Any], others: dict[str, Any]
) -> None:
    assert share_given_up(build, passes, 8, mine, others) >= 0.9


@pytest.mark.parametrize(
    ("bad", "want"),
    [
        pytest.param({"ttft": 400.0}, "CanaryTTFTViolated", id="misses the target"),
        pytest.param({"failing": 0.5}, "CanaryErrors", id="fails"),
    ],
)
def test_a_broken_promise_beyond_doubt_does_not_wait_for_the_end_of_the_step(
    build: Any, bad: dict[str, Any], want: str
) -> None:
    random = Random(1)
    candidate, stable = Answers(random, **{"deviation": 0.1, **bad}), Answers(random, deviation=0.1)
    found = [
        finding.reason if finding else "" for finding in verdicts(candidate, stable, build.target(), 30, 8)
    ]
    assert want in found[:5]


def test_whether_it_is_slower_is_asked_at_the_end_of_the_step(build: Any) -> None:
    """What it looks like for a few seconds may be whatever else the machine does."""
    random, target = Random(1), build.target()
    candidate, stable = Answers(random, tpot=20.0, deviation=0.1), Answers(random, tpot=5.0, deviation=0.1)
    *early, last = verdicts(candidate, stable, target, 9, 8)
    assert not any(early)
    assert last is not None
    assert last.reason == "CanaryTPOTSlower"
