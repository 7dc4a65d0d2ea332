"""Removals that are taken back make the next ones wait longer."""

import json

import pytest

from headway_operator.slo.memory import Memory
from headway_operator.slo.patience import (
    CALM_SECONDS,
    MOST_SECONDS,
    Load,
    looked_back_seconds,
    with_calm,
    with_raise,
    with_removal,
    with_risen,
)

NOW = 50_000.0


def load(rate: float, per_second: float, level: float | None = None) -> Load:
    return Load(rate, per_second, rate if level is None else level)


@pytest.mark.parametrize(
    ("stabilization", "lead", "patience", "want"),
    [
        pytest.param(180.0, 60.0, 1.0, 180.0, id="at first"),
        pytest.param(180.0, 200.0, 1.0, 400.0, id="slow starts"),
        pytest.param(180.0, 60.0, 4.0, 720.0, id="after a regret or two"),
        pytest.param(180.0, 60.0, 64.0, MOST_SECONDS, id="half an hour at most"),
        pytest.param(3600.0, 60.0, 2.0, 3600.0, id="never less than asked for"),
    ],
)
def test_what_is_looked_back(stabilization: float, lead: float, patience: float, want: float) -> None:
    assert looked_back_seconds(Memory(patience=patience), stabilization, lead) == want


def test_a_removal_that_is_taken_back_triples_it_once() -> None:
    memory = with_raise(
        with_removal(Memory(), 13, load(20.0, 2.0), 180.0, NOW - 60), load(26.0, 2.0), 180.0, NOW
    )
    assert (memory.patience, memory.patience_at) == (3.0, NOW)
    assert with_raise(memory, load(26.0, 2.0), 540.0, NOW + 5).patience == 3.0


def test_a_rate_that_was_too_high_for_those_there_were_regrets_no_removal() -> None:
    memory = with_raise(
        with_removal(Memory(), 13, load(20.0, 2.0), 180.0, NOW - 60), load(68.0, 2.0), 180.0, NOW
    )
    assert (memory.patience, memory.removed_at, memory.removed_from) == (1.0, None, None)


@pytest.mark.parametrize(
    ("later", "rate", "per_second", "patience"),
    [
        pytest.param(60.0, 27.0, 2.0, 1.0, id="more than thirteen could take"),
        pytest.param(180.0, 27.0, 2.0, 1.0, id="at the end of what was looked back"),
        pytest.param(181.0, 27.0, 2.0, 3.0, id="too late"),
        pytest.param(60.0, 26.0, 2.0, 3.0, id="what thirteen could take"),
        pytest.param(60.0, 26.0, 1.5, 3.0, id="each is trusted with less by now"),
        pytest.param(60.0, 27.0, 2.5, 3.0, id="each is trusted with more by now"),
    ],
)
def test_a_regret_is_taken_back_where_the_rate_goes_on_to_rise(
    later: float, rate: float, per_second: float, patience: float
) -> None:
    """A few more come first, then more than there had been: that was no wrong removal, but a rising load."""
    memory = with_raise(
        with_removal(Memory(), 13, load(20.0, 2.0), 180.0, NOW - 60), load(26.0, 2.0), 180.0, NOW
    )
    assert memory == with_risen(memory, load(26.0, 2.0), 540.0, NOW)
    assert memory == Memory.from_dict(json.loads(json.dumps(memory.to_dict())), NOW)
    memory = with_raise(memory, load(26.0, 2.0), 540.0, NOW + 10)
    risen = with_risen(memory, load(rate, per_second), 540.0, NOW + later)
    assert risen.patience == patience
    assert (risen.regret is None) == (patience == 1.0 or later > 180.0)
    assert with_raise(risen, load(28.0, 2.0), 540.0, NOW + later + 10).patience == patience


def test_a_regret_that_is_taken_back_leaves_patience_as_it_was() -> None:
    """When it had been moved, too: an hour after that it is halved."""
    before = Memory(patience=3.0, patience_at=NOW - 3000)
    memory = with_raise(
        with_removal(before, 13, load(20.0, 2.0), 540.0, NOW - 60), load(26.0, 2.0), 540.0, NOW
    )
    assert (memory.patience, memory.patience_at) == (9.0, NOW)
    risen = with_risen(memory, load(27.0, 2.0), 1620.0, NOW + 60)
    assert (risen.patience, risen.patience_at) == (3.0, NOW - 3000)
    assert with_calm(risen, NOW + 600).patience == 1.5


@pytest.mark.parametrize(("rate", "patience"), [(26.0, 3.0), (26.5, 1.0)])
def test_that_each_is_trusted_with_less_since_the_removal_is_no_rise(rate: float, patience: float) -> None:
    memory = with_removal(Memory(), 13, load(20.0, 2.0), 180.0, NOW - 60)
    assert with_raise(memory, load(rate, 1.5), 180.0, NOW).patience == patience


def test_a_regret_that_is_over_is_not_taken_back_an_hour_later() -> None:
    memory = with_raise(
        with_removal(Memory(patience=3.0), 13, load(20.0, 2.0), 540.0, NOW - 60), load(26.0, 2.0), 540.0, NOW
    )
    for hour in (1, 2, 3):
        at = NOW + hour * CALM_SECONDS
        memory = with_calm(with_risen(memory, load(20.0, 2.0), 1620.0, at), at)
    assert with_risen(memory, load(50.0, 2.0), 540.0, NOW + 3 * CALM_SECONDS + 120).patience == 1.125


def test_a_removal_after_a_regret_is_one_of_its_own() -> None:
    memory = with_raise(
        with_removal(Memory(), 20, load(20.0, 2.0), 180.0, NOW - 60), load(26.0, 2.0), 180.0, NOW
    )
    memory = with_removal(memory, 13, load(20.0, 2.0), 540.0, NOW + 170)
    assert (memory.removed_from, memory.regret) == (13, None)
    assert with_raise(memory, load(26.0, 2.0), 540.0, NOW + 300).patience == 9.0


@pytest.mark.parametrize(("rate", "patience"), [(30.0, 3.0), (30.5, 1.0)])
def test_of_removals_one_after_another_all_are_taken_back(rate: float, patience: float) -> None:
    memory = Memory()
    for before in (15, 14, 13):
        memory = with_removal(memory, before, load(20.0, 2.0), 180.0, NOW - 10 * before)
    assert with_raise(memory, load(rate, 2.0), 180.0, NOW).patience == patience


@pytest.mark.parametrize(("rate", "patience"), [(30.0, 3.0), (30.5, 1.0)])
def test_of_removals_one_after_another_the_trust_at_the_first_counts(rate: float, patience: float) -> None:
    memory = Memory()
    for before, per_second in ((15, 2.0), (14, 1.8), (13, 1.6)):
        memory = with_removal(memory, before, load(20.0, per_second), 180.0, NOW - 10 * before)
    assert with_raise(memory, load(rate, 1.5), 180.0, NOW).patience == patience


def test_from_how_many_the_last_ones_went_does_not_count_for_ever() -> None:
    memory = with_removal(
        with_removal(Memory(), 40, load(20.0, 2.0), 180.0, NOW - 3000), 13, load(20.0, 2.0), 180.0, NOW - 10
    )
    assert with_raise(memory, load(40.0, 2.0), 180.0, NOW).patience == 1.0


def test_a_removal_of_an_earlier_version_is_regretted_as_it_was() -> None:
    assert with_raise(Memory(removed_at=NOW - 60), load(68.0, 2.0), 180.0, NOW).patience == 3.0


def test_an_hour_that_ends_between_hides_nothing() -> None:
    memory = with_removal(
        Memory(patience=3.0, patience_at=NOW - CALM_SECONDS), 5, load(20.0, 2.0), 270.0, NOW - 10
    )
    memory = with_raise(with_calm(memory, NOW), load(10.0, 2.0), 270.0, NOW + 60)
    assert memory.patience == 4.5


@pytest.mark.parametrize("removed_at", [None, NOW - 800])
def test_a_rise_long_after_a_removal_regrets_nothing(removed_at: float | None) -> None:
    memory = with_raise(Memory(removed_at=removed_at), load(10.0, 2.0), 180.0, NOW)
    assert (memory.patience, memory.removed_at) == (1.0, None)


def test_it_never_grows_beyond_what_half_an_hour_takes() -> None:
    memory = Memory()
    for number in range(20):
        at = NOW + 3000 * number
        looked_back = looked_back_seconds(memory, 180.0, 60.0)
        memory = with_raise(
            with_removal(memory, 5, load(20.0, 2.0), looked_back, at), load(10.0, 2.0), looked_back, at + 60
        )
    assert memory.patience == pytest.approx(MOST_SECONDS / 180.0)


def test_an_hour_of_calm_halves_it() -> None:
    memory = Memory(patience=4.0, patience_at=NOW)
    assert with_calm(memory, NOW + CALM_SECONDS - 1) == memory
    calm = with_calm(memory, NOW + CALM_SECONDS)
    assert (calm.patience, calm.patience_at) == (2.0, NOW + CALM_SECONDS)
    assert with_calm(with_calm(calm, NOW + 2 * CALM_SECONDS), NOW + 3 * CALM_SECONDS).patience == 1.0


def test_the_rise_that_was_regretted_is_measured_from_the_last_removal_in_replicas() -> None:
    """Of two removals, from what the load was worth at the second, however much each is trusted with then."""
    memory = with_removal(Memory(), 14, load(24.0, 2.0), 180.0, NOW - 90)
    memory = with_removal(memory, 13, load(20.0, 2.0), 180.0, NOW - 60)
    memory = with_raise(memory, load(25.0, 1.5, level=18.75), 180.0, NOW)
    assert memory.regretted_rise == pytest.approx(12.5 / 10.0 - 1.0)
    assert with_risen(memory, load(18.0, 1.5), 540.0, NOW + 10).regretted_rise == memory.regretted_rise
    risen = with_risen(memory, load(26.0, 2.0), 540.0, NOW + 20)
    assert risen.regretted_rise == pytest.approx(0.3), (
        "it goes on to rise, though no further than those could take"
    )
    assert with_risen(risen, load(26.0, 1.0), 540.0, NOW + 181).regretted_rise == risen.regretted_rise, (
        "too late to be one rise"
    )


def test_of_rises_that_were_regretted_the_largest_counts_until_nothing_was_for_long() -> None:
    memory = Memory()
    for at, rate, patience, rise in (
        (0.0, 26.0, 3.0, 0.3),
        (1000.0, 24.0, 9.0, 0.3),
        (2000.0, 28.0, 27.0, 0.4),
    ):
        memory = with_removal(memory, 14, load(20.0, 2.0), 30.0, NOW + at - 60)
        memory = with_raise(memory, load(rate, 2.0), 30.0, NOW + at)
        assert memory.patience == patience
        assert memory.regretted_rise == pytest.approx(rise)
    memory = memory._replace(patience=1.0)
    memory = with_removal(memory, 14, load(20.0, 2.0), 30.0, NOW + 9000)
    assert with_raise(memory, load(22.0, 2.0), 30.0, NOW + 9030).regretted_rise == pytest.approx(0.1)


def test_a_regret_that_is_taken_back_leaves_the_rise_as_it_was() -> None:
    before = Memory(patience=3.0, patience_at=NOW - 3000, regretted_rise=0.1)
    memory = with_raise(
        with_removal(before, 13, load(20.0, 2.0), 540.0, NOW - 60), load(26.0, 2.0), 540.0, NOW
    )
    assert memory.regretted_rise == pytest.approx(0.3)
    assert with_risen(memory, load(27.0, 2.0), 1620.0, NOW + 60).regretted_rise == 0.1


def test_of_a_removal_of_an_earlier_version_no_rise_is_known() -> None:
    assert with_raise(Memory(removed_at=NOW - 60), load(68.0, 2.0), 180.0, NOW).regretted_rise == 0.0
