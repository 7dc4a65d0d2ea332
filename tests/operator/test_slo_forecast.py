"""The load to come: steps are seen at once, noise is not followed, bursts are measured."""

import json
import random
from typing import Any

import pytest

from headway_operator.slo.forecast import DAY_SECONDS, Course, arrivals, forecast, watched
from headway_operator.slo.persistence import Persistence
from headway_operator.slo.rate_change import Span
from headway_operator.slo.slices import Slice

NOW = 100_000.0


def spans(rates: list[float], seconds: float = 5.0) -> list[Span]:
    """Evenly coming requests, the last of them up to now."""
    start = NOW - seconds * len(rates)
    return [
        Span(start + i * seconds, start + (i + 1) * seconds, rate * seconds) for i, rate in enumerate(rates)
    ]


def test_a_steady_load_is_expected_to_go_on() -> None:
    found = forecast(Course(), spans([10.0] * 60), NOW, 60.0)
    assert found.now == pytest.approx(10.0)
    assert found.ahead == pytest.approx(10.0)


def test_no_traffic_is_no_load() -> None:
    found = forecast(Course(), [], NOW, 60.0)
    assert (found.now, found.ahead) == (0.0, 0.0)


def test_a_step_is_seen_within_ten_seconds() -> None:
    found = forecast(Course(), spans([10.0] * 58 + [30.0] * 2), NOW, 60.0)
    assert found.now > 20.0


def test_a_single_odd_slice_of_a_poisson_load_moves_little() -> None:
    found = forecast(Course(), spans([10.0] * 59 + [13.0]), NOW, 60.0)
    assert found.ahead < 10.6


def test_a_burst_of_ten_seconds_is_no_step() -> None:
    """Conversations come in such bursts; a replica for one would be ready when it is over."""
    found = forecast(Course(idc=1.5), spans([3.6] * 58 + [6.5] * 2), NOW, 60.0)
    assert found.now < 4.0


@pytest.mark.parametrize(
    ("rates", "seconds", "is_seen"),
    [
        pytest.param([2.0] * 58 + [4.6] * 2, 0.7, True, id="nobody may wait"),
        pytest.param([2.0] * 58 + [4.6] * 2, 32.0, False, id="all of it may"),
        pytest.param([2.0] * 52 + [4.5] * 8, 64.0, True, id="the first of it may not"),
        pytest.param([2.0] * 50 + [4.5] * 10, 600.0, True, id="however long they may, it has lasted"),
    ],
)
def test_a_burst_that_may_wait_is_no_step(rates: list[float], seconds: float, *, is_seen: bool) -> None:
    found = forecast(Course(), spans(rates), NOW, 60.0, seconds)
    assert (found.now > 3.0) == is_seen


def test_chance_is_of_the_time_that_was_seen() -> None:
    """A slice that began a little too early counts whole, so that ten seconds are not judged by five."""
    late = [Span(one.start - 0.1, one.end - 0.1, one.count) for one in spans([3.6] * 59 + [8.0])]
    assert forecast(Course(), late, NOW, 60.0).now < 4.0


def test_a_trend_is_followed_as_far_as_chance_does_not_explain_it() -> None:
    rates = [20.0 + 0.5 * i for i in range(60)]
    found = forecast(Course(), spans(rates), NOW, 60.0)
    assert rates[-24] < found.now < found.ahead
    # The line, 0.1 requests/s per second, is at 55.5 a minute from now.
    assert found.ahead < 57.0


def test_a_step_is_not_taken_for_a_trend() -> None:
    found = forecast(Course(), spans([10.0] * 48 + [30.0] * 12), NOW, 60.0)
    assert 27.0 < found.ahead < 36.0


def test_the_same_time_yesterday_counts_where_it_was_seen() -> None:
    course = Course()
    for minute in range(20):
        at = NOW - DAY_SECONDS + 60 * minute
        seen = [Span(at - 60, at, 60 * (50.0 if minute > 10 else 5.0))]
        course = watched(course, seen, at, 60.0)
    found = forecast(course, spans([5.0] * 60), NOW, 900.0)
    assert found.ahead == pytest.approx(50.0, rel=0.2)
    assert forecast(Course(), spans([5.0] * 60), NOW, 900.0).ahead == pytest.approx(5.0)
    assert forecast(course, spans([5.0] * 60), NOW + DAY_SECONDS, 900.0).ahead == pytest.approx(5.0, rel=0.01)


def test_of_ten_minutes_yesterday_the_mean_counts() -> None:
    """Eight quiet minutes and two loud ones, of which the level is seen two minutes long."""
    course, start = Course(), NOW - NOW % 600
    for second in range(0, 600, 5):
        at = start - DAY_SECONDS + second
        rate = 5.0 if 300 <= second < 420 else 1.0
        course = watched(course, [Span(at - 5, at, 5 * rate)], at, 60.0)
    found = forecast(course, spans([0.5] * 60), start, 60.0)
    assert found.ahead == pytest.approx(1.8)
    assert Course.from_dict(json.loads(json.dumps(course.to_dict()))) == course
    earlier = {"idc": 1.0, "idc_at": 0.0, "day": {"7": [3, 2.5]}}
    assert Course.from_dict(earlier).day == {7: (3, 2.5, 1)}


@pytest.mark.parametrize(("size", "low", "high"), [(1, 0.5, 2.2), (20, 8.0, 45.0)])
def test_bursts_show_in_the_index_of_dispersion(size: int, low: float, high: float) -> None:
    """Poisson arrivals of groups of `size` have exactly that index; 600 bins of 15 s, weight 0.05."""
    chance, course = random.Random(5), Course()
    history: list[Span] = []
    for k in range(1800):
        groups = sum(chance.random() < 0.02 for _ in range(500))
        end = NOW + 5.0 * (k + 1)
        history = [*history[-8:], Span(end - 5.0, end, float(groups * size))]
        course = watched(course, history, end, 60.0)
    assert low < course.idc < high


def test_what_nobody_told_is_spread_over_the_time_until_somebody_did() -> None:
    slices = [
        Slice(0.0, 5.0, {"arrived": 10.0}),
        Slice(5.0, 10.0, {"blind": 1.0}),
        Slice(10.0, 15.0, {"arrived": 30.0}),
    ]
    assert arrivals(slices) == [Span(0.0, 5.0, 10.0), Span(5.0, 15.0, 30.0)]


def test_the_course_survives_a_checkpoint() -> None:
    course = watched(Course(), spans([7.0] * 60), NOW, 60.0)
    assert Course.from_dict(course.to_dict()) == course


def learnt(rates: list[float], lead_seconds: float = 60.0) -> tuple[Course, list[Span]]:
    """The course, pass by pass, and what is kept of the load at its end."""
    course, history = Course(), spans(rates)
    for k in range(60, len(history)):
        course = watched(course, history[k - 60 : k], history[k - 1].end, lead_seconds)
    return course, history[-60:]


QUIET, BURST = [20.0] * 60, [40.0] * 6
BURSTS = (BURST + QUIET[:54]) * 3


def test_bursts_that_are_over_before_a_replica_is_ready_are_followed_less_each_time() -> None:
    """Half a minute of twice as much, every five minutes; a replica takes one minute."""
    aheads = [
        forecast(*learnt(QUIET + (BURST + QUIET[:54]) * before + BURST), NOW, 60.0).ahead
        for before in (0, 1, 4)
    ]
    assert aheads[0] > 38.0
    assert aheads[1] < 30.0
    assert aheads[2] < aheads[1]
    assert forecast(*learnt(QUIET + BURST), NOW, 60.0).now > 38.0


def test_a_step_is_seen_after_bursts_that_were_smaller() -> None:
    """The share of a difference that is doubted is of one no larger than half as much again as they were."""
    course, kept = learnt(QUIET + BURSTS + [100.0] * 6)
    assert course.persistence.share < 0.2
    assert 50.0 < forecast(course, kept, NOW, 60.0).ahead < 90.0


def test_steps_that_stay_are_followed_whole() -> None:
    rates = [rate for rate in (10.0, 20.0, 40.0, 80.0) for _ in range(90)]
    course, kept = learnt(rates + [120.0] * 6)
    assert course.persistence.share > 0.9
    assert forecast(course, kept, NOW, 60.0).ahead > 110.0


def test_how_long_a_rise_lasts_is_judged_by_what_a_replica_takes_to_be_ready() -> None:
    """Of three minutes of twice as much most is left for a replica that takes 20 s, and none after four."""
    waves = ([40.0] * 36 + QUIET[:48]) * 4
    quick, slow = (learnt(QUIET + waves, lead)[0].persistence for lead in (20.0, 240.0))
    assert quick.number > 4
    assert slow.number > 4
    assert quick.share > slow.share + 0.3


@pytest.mark.parametrize("per_second", [2.0, 40.0])
def test_noise_keeps_nobody_from_seeing_a_step(per_second: float) -> None:
    """Two hours of Poisson arrivals, then three times as many for half a minute."""
    chance = random.Random(3)
    rates = [sum(chance.random() < per_second / 100.0 for _ in range(500)) / 5.0 for _ in range(1440)]
    course, kept = learnt(rates + [3.0 * per_second] * 6)
    assert forecast(course, kept, NOW, 60.0).ahead > 2.3 * per_second


def test_a_trend_goes_on_for_half_of_the_level_at_most() -> None:
    """A rise of a tenth a slice is three times as high within a minute."""
    found = forecast(Course(), spans([10.0] * 48 + [10.0 + 3.0 * k for k in range(12)]), NOW, 60.0)
    assert found.ahead == pytest.approx(1.5 * found.now)


def test_half_of_what_was_learnt_of_bursts_is_forgotten_in_half_an_hour() -> None:
    before, after = (learnt(QUIET + BURSTS + QUIET * hours)[0].persistence for hours in (1, 7))
    assert before.number > 4
    for name in ("number", "kept", "squares"):
        assert getattr(after, name) == pytest.approx(0.5 * getattr(before, name), rel=0.02)
    assert after.share > before.share


def test_a_lead_that_falls_is_learnt_of_at_once() -> None:
    """What was foretold for in half an hour says nothing of a minute."""
    course = Course()
    history = spans(QUIET + BURST)
    for k in range(60, len(history)):
        course = watched(course, history[k - 60 : k], history[k - 1].end, 1800.0)
    assert course.persistence.foretold[-1][0] > NOW + 1000
    later = Span(NOW, NOW + 15.0, 15 * 45.0)
    course = watched(course, [*history[-57:], later], NOW + 15.0, 60.0)
    assert [due for due, _, _ in course.persistence.foretold] == [NOW + 75.0]


def test_nothing_is_foretold_for_tomorrow() -> None:
    """A replica that waited a day for its node."""
    assert learnt(QUIET + BURST * 20, 86_400.0)[0].persistence.foretold == ()


def test_what_came_of_forecasts_survives_a_checkpoint() -> None:
    course, _ = learnt(QUIET + BURSTS + BURST)
    found = course.persistence
    assert found.foretold
    assert len({found.number, found.kept, found.squares, found.faded_at}) == 4
    assert Course.from_dict(json.loads(json.dumps(course.to_dict()))) == course


@pytest.mark.parametrize(
    "damage",
    [
        {"number": -1.0},
        {"squares": -0.1},
        {"kept": float("nan")},
        {"faded_at": float("inf")},
        {"number": "many"},
        {"foretold": [[NOW, 20.0, 20.0]]},
        {"foretold": [[NOW, 0.0, 20.0]]},
        {"foretold": [[NOW, 20.0]]},
    ],
)
def test_a_damaged_checkpoint_is_refused_when_it_is_read(damage: dict[str, Any]) -> None:
    data = {**Course().persistence.to_dict(), **damage}
    with pytest.raises((TypeError, ValueError)):
        Persistence.from_dict(data)
