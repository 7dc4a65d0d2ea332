"""Clocks are set back: a little all the time, and once by hours."""

from dataclasses import replace

import pytest
from tests.operator.law_fleet import NOW, Fleet

from headway_operator.slo import Memory
from headway_operator.slo.clock import with_clock
from headway_operator.slo.memory import Regret
from headway_operator.slo.persistence import Persistence


def test_two_hours_back_cost_neither_trust_nor_what_was_learnt(fleet: Fleet) -> None:
    _, memory = fleet.decide()
    told = Persistence(4.0, 1.0, 0.5, NOW, ((NOW + 60.0, 10.0, 20.0),))
    memory = memory._replace(course=replace(memory.course, persistence=told), late_since=NOW - 30.0)
    assert with_clock(memory, NOW - 7200.0).late_since == NOW - 7200.0
    decision, after = fleet.decided_with(memory, NOW - 7200.0)
    assert after.course.persistence == replace(told, faded_at=NOW - 7200.0, foretold=())
    assert decision.replicas == 4
    assert after.kappa == memory.kappa
    assert after.fit.model == memory.fit.model
    assert [one.at for one in after.recommended] == [NOW - 7200.0]
    assert after.watched_since == NOW - 7200.0
    times = [after.limits_changed_at, after.replicas_raised_at, after.kappa_at, after.slices[-1].end]
    times += [after.factors_at, after.removed_at]
    assert memory.factors_at is not None
    assert all(at is None or at <= NOW - 7200.0 for at in times)


def test_patience_before_a_regret_was_moved_no_later_than_now() -> None:
    memory = Memory(kappa_at=NOW, patience=3.0, patience_at=NOW, regret=Regret(1.5, NOW - 60.0))
    assert with_clock(memory, NOW - 7200.0).regret == Regret(1.5, NOW - 7200.0)


def test_a_little_back_forgets_nothing(fleet: Fleet) -> None:
    _, memory = fleet.decide()
    _, after = fleet.decided_with(memory, NOW - 0.2)
    assert after.kappa == memory.kappa
    assert len(after.slices) >= len(memory.slices)
    assert all(one.start <= one.end for one in after.slices)


@pytest.mark.parametrize("kappa", [-0.4, 7.0])
def test_trust_out_of_range_is_brought_back_from_a_checkpoint(kappa: float) -> None:
    data = Memory(kappa=kappa).to_dict()
    assert 0.5 <= Memory.from_dict(data, NOW).kappa <= 1.1
