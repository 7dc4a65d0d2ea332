"""Trust: what broken promises cost of it, and how fast it comes back on what evidence."""

import pytest
from tests.operator.law_fleet import CAPACITY, NOW, Fleet

from headway_operator.samples import Targets
from headway_operator.slo.memory import Cut, Memory


def test_a_promise_broken_without_a_reason_takes_a_tenth_of_the_trust(fleet: Fleet) -> None:
    fleet.violated("tpot")
    _, memory = fleet.decide()
    assert memory.kappa == pytest.approx(0.9)
    # And not again on the same evidence.
    fleet.memory = memory._replace(limits_changed_at=NOW - 60)
    assert fleet.decide(NOW)[1].kappa >= 0.9


@pytest.mark.parametrize(
    ("told_then", "seconds", "want"),
    [
        pytest.param(1.05, 20.0, 0.945, id="a part of it"),
        pytest.param(1.3, 20.0, 1.0, id="more than was cut"),
        pytest.param(1.3, 60.0, 1.0, id="just in time"),
        pytest.param(0.9, 20.0, 0.9, id="the model tells more by now"),
        pytest.param(1.3, 61.0, 0.9, id="too late"),
    ],
)
def test_a_cut_that_the_model_comes_to_explain_is_taken_back(
    fleet: Fleet, told_then: float, seconds: float, want: float
) -> None:
    """told_then: of one replica, at the cut, over what the model tells now."""
    now_told = fleet.decide()[0].evidence["capacity_per_second"]
    cut = Cut(1.0, 0.9, told_then * now_told)
    fleet.memory = fleet.memory._replace(kappa=0.9, kappa_at=NOW, kappa_cut_at=NOW - seconds, cut=cut)
    for _ in range(3):
        _, fleet.memory = fleet.decide()
        assert fleet.memory.kappa == pytest.approx(want, rel=0.002)
    assert (fleet.memory.cut is None) == (seconds > 60.0)


def test_what_was_cut_is_known_until_it_may_no_longer_be_explained(fleet: Fleet) -> None:
    fleet.violated("tpot")
    decision, memory = fleet.decide()
    assert memory.cut is not None
    assert memory.cut.before == 1.0
    assert memory.cut.after == pytest.approx(0.9)
    assert memory.cut.per_second == pytest.approx(decision.evidence["capacity_per_second"], rel=0.01)
    assert Memory.from_dict(memory.to_dict(), NOW).cut is None


def test_a_promise_broken_by_too_few_replicas_says_nothing_of_the_model(fleet: Fleet) -> None:
    fleet.violated("tpot", "ttft")
    fleet.per_second = 40.0
    assert fleet.decide()[1].kappa == 1.0


@pytest.mark.parametrize(
    ("excused", "want"),
    [
        pytest.param(None, 0.9, id="of no crowd"),
        pytest.param(0.0, 1.0, id="the last of the crowd was answered just now"),
        pytest.param(61.0, 0.9, id="a minute ago, and they are missed since"),
    ],
)
def test_who_became_late_for_want_of_replicas_costs_no_trust_when_answered(
    fleet: Fleet, excused: float | None, want: float
) -> None:
    """They yielded to others, and were answered when replicas were enough."""
    fleet.violated("ttft")
    fleet.now_totals = {}
    fleet.memory = fleet.memory._replace(excused_at=None if excused is None else NOW - excused)
    decision, memory = fleet.decide()
    assert decision.ttft.verdict == "violated"
    assert memory.kappa == pytest.approx(want)


@pytest.mark.parametrize(
    ("late", "short", "excused", "before", "want"),
    [
        pytest.param(True, True, None, None, 0.0, id="late, and too few"),
        pytest.param(True, False, None, None, None, id="late, of enough"),
        pytest.param(False, True, None, None, None, id="too few, and nobody late"),
        pytest.param(True, False, 5.0, 5.0, 0.0, id="still late, though enough by now"),
        pytest.param(False, False, 5.0, 5.0, 0.0, id="answered since the last pass"),
        pytest.param(False, False, 5.0, 10.0, 5.0, id="answered before it"),
        pytest.param(True, False, 10.0, 5.0, 10.0, id="late again, of enough"),
    ],
)
def test_a_crowd_is_excused_until_the_last_of_it_is_answered(
    fleet: Fleet, *, late: bool, short: bool, excused: float | None, before: float | None, want: float | None
) -> None:
    """excused, before: how long ago misses were excused, and somebody late. want: likewise afterwards."""
    fleet.per_second = 40.0 if short else 10.0
    fleet.gauges |= {"waiting": 1, "oldest_waiting_seconds": 1.0} if late else {}
    fleet.memory = fleet.memory._replace(
        kappa_at=NOW - 5.0,
        excused_at=None if excused is None else NOW - excused,
        late_at=None if before is None else NOW - before,
    )
    memory = fleet.decide()[1]
    assert memory.excused_at == (None if want is None else NOW - want)
    assert Memory.from_dict(memory.to_dict(), NOW).excused_at == memory.excused_at
    older = memory.to_dict()
    del older["excused_at"]
    assert Memory.from_dict(older, NOW).excused_at is None


@pytest.mark.parametrize(
    ("met", "missed", "want"),
    [
        pytest.param(4000, 0, 0.84, id="nothing missed"),
        pytest.param(3950, 50, 0.824, id="a quarter of what may be missed"),
        pytest.param(3900, 100, 0.808, id="half of what may be missed"),
        pytest.param(3820, 180, 0.808, id="kept as far as counted"),
        pytest.param(3790, 210, 0.8, id="more missed than allowed, though nothing proves it"),
        pytest.param(40, 0, 0.8, id="too few requests to tell"),
    ],
)
def test_trust_comes_back_on_evidence_by_a_hundredth_a_minute_or_five(
    fleet: Fleet, met: int, missed: int, want: float
) -> None:
    fleet.memory = fleet.memory._replace(kappa=0.8, kappa_at=NOW - 60)
    fleet.totals |= {"ttft_met": met, "ttft_missed": missed}
    decision, memory = fleet.decide()
    assert decision.ttft.verdict != "violated"
    assert memory.kappa == pytest.approx(want)


def test_what_a_crowd_missed_makes_no_later_cut_larger(fleet: Fleet) -> None:
    """It missed a thousand; since then 30 of 400, where 20 may be."""
    fleet.memory = fleet.memory._replace(excused_at=NOW - 30.0)
    totals = {"ttft_met": 0.0, "ttft_missed": 1000.0 / 54.0, "tpot_met": 60.0}
    crowd = [one.with_totals({**one.totals, **totals}) for one in fleet.slices()[:-6]]
    totals = {"ttft_met": 370.2 / 6.0, "ttft_missed": 30.2 / 6.0, "tpot_met": 60.0}
    since = [one.with_totals({**one.totals, **totals}) for one in fleet.slices()[-6:]]
    fleet.slices = lambda: (*crowd, *since)  # type: ignore[method-assign]
    decision, memory = fleet.decide()
    assert decision.ttft.verdict == "violated"
    assert memory.kappa == pytest.approx(0.9 ** (30.2 / 400.4 / 0.05 - 1), rel=0.002)


def test_a_promise_broken_for_half_a_minute_costs_no_trust(fleet: Fleet) -> None:
    """By a verdict that chance explains: over five minutes less was missed than may be."""
    fleet.now_totals = {"ttft_missed": 60.0}
    decision, memory = fleet.decide()
    assert decision.ttft.verdict == "violated"
    assert memory.kappa >= 1.0
    fleet.now_totals = {"ttft_missed": 300.0}
    # 6.98% of them, where 5% may be missed: not the whole tenth.
    assert fleet.decide()[1].kappa == pytest.approx(0.9 ** (300 / 4300 / 0.05 - 1))


@pytest.mark.parametrize("targets", [Targets(None, 26.0), Targets(700.0, 26.0)])
def test_a_queue_that_stands_or_is_turned_away_costs_trust_as_well(fleet: Fleet, targets: Targets) -> None:
    """Without a TTFT target by its age; with one by the refusals that it causes."""
    fleet.promise(targets)
    if targets.ttft_milliseconds is None:
        fleet.gauges |= {"waiting": 13, "oldest_waiting_seconds": 20.0}
    else:
        fleet.totals |= {"refused": 600.0}
        fleet.now_totals = {"refused": 30.0, "ttft_missed": 1.0}
    assert fleet.decide()[1].kappa == pytest.approx(0.9)


def test_trust_that_was_lost_comes_back_where_its_loss_brought_replicas(fleet: Fleet) -> None:
    """Each does less than three quarters of what it is trusted with, and will."""
    fleet.per_second = 4 * 0.6 * 0.5 * CAPACITY
    for kappa, comes_back in ((0.5, True), (1.0, False)):
        fleet.memory = fleet.memory._replace(kappa=kappa, kappa_at=NOW - 60.0)
        after = fleet.decide()[1].kappa
        assert after == pytest.approx(kappa * 1.01 if comes_back else kappa)


@pytest.mark.parametrize(("kappa", "want"), [(1.1, 1.1 * 0.99), (1.005, 1.0)])
def test_more_trust_than_the_models_word_goes_while_it_is_not_tried(
    fleet: Fleet, kappa: float, want: float
) -> None:
    fleet.per_second = 4 * 0.5 * CAPACITY
    fleet.memory = fleet.memory._replace(kappa=kappa, kappa_at=NOW - 60.0)
    assert fleet.decide()[1].kappa == pytest.approx(want)


@pytest.mark.parametrize(
    ("kappa", "per_second", "want"),
    [
        pytest.param(1.1, 20.0, 1.0, id="down to the model's word"),
        pytest.param(1.1, 30.0, 1.1, id="more load than replicas for it"),
        pytest.param(1.0, 20.0, 1.0 + 0.01, id="no trust of one's own"),
    ],
)
def test_more_trust_than_the_models_word_is_lost_to_a_crowd(
    fleet: Fleet, kappa: float, per_second: float, want: float
) -> None:
    """Its misses come all together, and five minutes may well have room for them."""
    fleet.per_second = per_second
    fleet.memory = fleet.memory._replace(kappa=kappa, kappa_at=NOW - 60.0)
    fleet.gauges |= {"waiting": 3, "oldest_waiting_seconds": 3.0}
    fleet.now_totals = {"received": 200.0}
    decision, memory = fleet.decide()
    assert decision.evidence["late"] > 10
    assert memory.kappa == pytest.approx(want)


def test_as_many_as_may_be_late_take_no_trust(fleet: Fleet) -> None:
    """Of a hundred replicas somebody is late at any time."""
    fleet.per_second = 4 * CAPACITY
    fleet.memory = fleet.memory._replace(kappa=1.1, kappa_at=NOW - 60.0)
    fleet.gauges |= {"waiting": 1, "oldest_waiting_seconds": 1.0}
    fleet.now_totals = {"received": 200.0}
    decision, memory = fleet.decide()
    assert 0 < decision.evidence["late"] <= 10
    assert memory.kappa == pytest.approx(1.1)


@pytest.mark.parametrize(("milliseconds", "want"), [(700.0, 1.0), (60_000.0, 1.1)])
def test_of_those_who_may_wait_long_more_may_be_late_at_any_time(
    fleet: Fleet, milliseconds: float, want: float
) -> None:
    """A hundred came in ten seconds, and six hundred in a minute."""
    fleet.per_second = 4 * CAPACITY
    fleet.promise(Targets(milliseconds, 26.0))
    fleet.memory = fleet.memory._replace(kappa=1.1, kappa_at=NOW - 60.0)
    fleet.totals["received"] = 3000.0
    fleet.gauges |= {"waiting": 4, "oldest_waiting_seconds": 600.0}
    decision, memory = fleet.decide()
    assert 5 < decision.evidence["late"] <= 25
    assert memory.kappa == pytest.approx(want)


def test_trust_that_was_lost_to_a_crowd_is_not_taken_back_with_an_earlier_cut(fleet: Fleet) -> None:
    now_told = fleet.decide()[0].evidence["capacity_per_second"]
    cut = Cut(1.08, 0.972, 1.2 * now_told)
    fleet.memory = fleet.memory._replace(kappa=0.972, kappa_at=NOW, kappa_cut_at=NOW - 10.0, cut=cut)
    fleet.gauges |= {"waiting": 3, "oldest_waiting_seconds": 3.0}
    fleet.now_totals = {"received": 200.0}
    for _ in range(3):
        _, fleet.memory = fleet.decide()
        assert fleet.memory.kappa <= 1.0


def test_a_queue_that_stands_costs_the_rest_in_the_same_pass(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(kappa=1.1, kappa_at=NOW - 60.0)
    fleet.totals |= {"refused": 600.0}
    fleet.now_totals = {"refused": 30.0, "ttft_missed": 1.0}
    assert fleet.decide()[1].kappa == pytest.approx(0.99)


def test_trust_is_never_more_than_a_tenth_beyond_the_models_word(fleet: Fleet) -> None:
    fleet.per_second = 4 * CAPACITY
    fleet.memory = fleet.memory._replace(kappa=1.09, kappa_at=NOW - 60.0)
    assert fleet.decide()[1].kappa == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("targets", "want"), [(Targets(700.0, 26.0), 0.808), (Targets(700.0, None), 0.84), (Targets(), 0.8)]
)
def test_of_targets_that_there_are_the_one_that_is_missed_more_says_how_fast(
    fleet: Fleet, targets: Targets, want: float
) -> None:
    fleet.promise(targets)
    fleet.memory = fleet.memory._replace(kappa=0.8, kappa_at=NOW - 60)
    fleet.totals |= {"tpot_met": 3850.0, "tpot_missed": 150.0}
    assert fleet.decide()[1].kappa == pytest.approx(want)


@pytest.mark.parametrize(("per_second", "want"), [(4 * 0.8 * 0.8, 0.84), (4 * 0.7 * 0.8, 0.808)])
def test_trust_comes_back_fast_only_while_replicas_do_most_of_what_they_are_trusted_with(
    fleet: Fleet, per_second: float, want: float
) -> None:
    """That nothing is missed says little where a cut has just brought more of them."""
    fleet.per_second = per_second * CAPACITY
    fleet.memory = fleet.memory._replace(kappa=0.8, kappa_at=NOW - 60)
    assert fleet.decide()[1].kappa == pytest.approx(want)


def test_trust_does_not_come_back_fast_while_somebody_is_late(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(kappa=0.8, kappa_at=NOW - 60)
    fleet.gauges |= {"waiting": 1, "oldest_waiting_seconds": 2.0}
    decision, memory = fleet.decide()
    assert decision.evidence["late"] > 0
    assert memory.kappa == pytest.approx(0.808)


def test_refusals_are_misses_of_which_trust_comes_back_more_slowly(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(kappa=0.8, kappa_at=NOW - 60)
    fleet.totals |= {"ttft_met": 3900.0, "refused": 100.0}
    assert fleet.decide()[1].kappa == pytest.approx(0.808)


def test_less_trust_is_more_replicas(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(kappa=0.6)
    assert fleet.decide()[0].replicas > 4
