"""Limits of two kinds that are nearly as good: those that are applied stay."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Limits, Targets
from headway_operator.slo.best_limits import best_capacity
from headway_operator.slo.capacity import Replica
from headway_operator.slo.leaning import LEANING, is_nearer
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.step_fit import StepModel

WORK = Workload(prompt=500.0, prompt_square=500_000.0, answer=200.0, context=1200.0, kv_share=0.002)
SHORT = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
LONG = StepModel(base=8.3, prefill=0.12, sequence=0.25, kv=0.0)
WHOLE, EVEN = Limits(40, 2048), Limits(40, 150)
PLAIN = Factors()


@pytest.mark.parametrize(
    ("applied", "want"),
    [
        pytest.param(None, False, id="none is"),
        pytest.param(Limits(6, 80), True, id="it is one of them"),
        pytest.param(Limits(6, 100), True, id="it is one of them, trimmed"),
        pytest.param(Limits(1, 2048), False, id="it is the other"),
        pytest.param(Limits(2, 1638), False, id="it is the other, trimmed"),
        pytest.param(Limits(64, 2048), False, id="it is neither"),
    ],
)
def test_what_is_applied_is_like_that_which_differs_less(
    applied: Limits | None,
    want: bool,  # noqa: FBT001 - a parameter
) -> None:
    assert is_nearer(applied, Limits(6, 80), Limits(1, 2048)) is want


@pytest.mark.parametrize(
    ("model", "ttft", "is_even"),
    [
        pytest.param(SHORT, 400.0, (False, False, False), id="short steps cost TTFT too much"),
        pytest.param(SHORT, 600.0, (False, True, False), id="next to that, what is applied stays"),
        pytest.param(LONG, 1200.0, (False, True, True), id="next to as many by few places, likewise"),
        pytest.param(LONG, 60_000.0, (True, True, True), id="short steps are worth it"),
    ],
)
def test_short_steps_stay_where_they_are_and_are_not_begun_for_little(
    build: Any, model: StepModel, ttft: float, is_even: tuple[bool, ...]
) -> None:
    target = build.target(targets=Targets(ttft, 26.0))
    replica = Replica(model, WORK, 95.0, 4)
    found = [best_capacity(replace(replica, applied=one), target, PLAIN) for one in (WHOLE, EVEN, None)]
    assert tuple(one.limits.max_num_batched_tokens < 512 for one in found) == is_even
    told = [one.per_second for one in found]
    assert min(told) >= 0.8 * LEANING * max(told)
