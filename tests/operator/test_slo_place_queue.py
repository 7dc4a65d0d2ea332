"""Few places on each replica, and the queue for them, as the law tells it."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Limits, Targets
from headway_operator.slo.best_limits import best_capacity, highest_rate
from headway_operator.slo.capacity import Replica
from headway_operator.slo.place_queue import queue_for_places
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.step_fit import StepModel
from headway_operator.slo.target import Target

LONG_PROMPTS = Replica(
    StepModel(base=19.0, prefill=1.6, sequence=0.9, kv=0.0), Workload(450.0, 3.4e5, 43.0, 400.0, 0.01), 95.0
)
PLAIN = Factors()


@pytest.fixture
def target(build: Any) -> Target:
    target: Target = build.target(targets=Targets(700.0, 26.0), initial=Limits(64, 2048))
    return target


def test_few_places_serve_more_where_prompts_would_stop_each_other(target: Target) -> None:
    """A prompt takes as long as its answer, and TPOT is no more than half as much again as that of one that
    is alone: requests take turns, if TTFT has the time."""
    fleet = replace(LONG_PROMPTS, fleet=12)
    patient = replace(target, targets=Targets(2900.0, 33.0))
    found = best_capacity(fleet, patient, PLAIN)
    assert found.limits == Limits(1, patient.highest.max_num_batched_tokens)
    assert found.full_num_seqs == 1
    assert found.per_second > 1.2 * highest_rate(fleet, patient, patient.highest, PLAIN)
    turns = fleet.latencies(found.per_second, found.limits, PLAIN)
    assert turns.tpot == pytest.approx(19.9)
    assert turns.running < 1.0
    assert fleet.latencies(found.per_second, patient.highest, PLAIN).tpot > 33.0
    hasty = replace(target, targets=Targets(1700.0, 33.0))
    assert best_capacity(fleet, hasty, PLAIN).per_second < 0.7 * found.per_second
    # One replica alone has a queue of its own for all.
    assert best_capacity(LONG_PROMPTS, patient, PLAIN).per_second < 0.6 * found.per_second


def test_who_waits_for_a_place_waits_longer_the_more_they_are_held() -> None:
    waits = [queue_for_places(held, 1000.0, 1, 12) for held in (0.5, 0.7, 0.9)]
    shares, seconds = zip(*(one for one in waits if one is not None), strict=True)
    assert len(shares) == 3
    assert shares == tuple(sorted(shares))
    assert seconds == (500.0, 500.0, pytest.approx(1000.0 / 1.2))
    # One server of its own: M/G/1.
    alone = queue_for_places(0.5, 1000.0, 1, 1)
    assert alone is not None
    assert alone == pytest.approx((0.5, 2000.0))
    assert queue_for_places(0.98, 1000.0, 1, 12) is None
