"""Made-up loads: their rates, irregularity and lengths, and those of published rates."""

import math
import random
from itertools import pairwise
from statistics import mean, stdev

import pytest

from headway_simulator.errors import OptionsError
from headway_simulator.generators import FLASH_RISE_SECONDS, Course, Kind, generated
from headway_simulator.rates import Lengths, RateWindow, arrivals_of, scaled_to_mean
from headway_simulator.trace import Arrival, Trace

LENGTHS = Lengths(None)


def test_irregular_gaps_bring_no_more_requests_than_the_rate_says() -> None:
    """Begun as if a request had just come, gaps this irregular would bring half as many more in a minute."""
    course = Course("gamma", 1.0, 60.0, variation=10.0)
    counts = []
    for seed in range(1000):
        try:
            counts.append(len(generated(course, LENGTHS, seed).arrivals))
        except OptionsError:
            counts.append(0)  # a minute within a gap
    assert mean(counts) == pytest.approx(60.0, rel=0.1)


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_a_steady_course_has_its_rate_and_its_irregularity(kind: Kind) -> None:
    trace = generated(Course(kind, 20.0, 2000.0, variation=3.0), LENGTHS, 5)
    want = 3.0 if kind == "gamma" else 1.0
    gaps = [b.at_seconds - a.at_seconds for a, b in pairwise(trace.arrivals)]
    assert trace.requests_per_second == pytest.approx(20.0, rel=0.08)
    assert stdev(gaps) / mean(gaps) == pytest.approx(want, rel=0.12)


def rate_in(trace: Trace, start: float, end: float) -> float:
    return sum(start <= one.at_seconds < end for one in trace.arrivals) / (end - start)


def test_a_step_multiplies_the_rate_after_a_third() -> None:
    trace = generated(Course("step", 10.0, 900.0, factor=4.0), LENGTHS, 6)
    assert trace.step_at_seconds == 300.0
    assert rate_in(trace, 0, 300) == pytest.approx(10.0, rel=0.1)
    assert rate_in(trace, 300, 900) == pytest.approx(40.0, rel=0.1)


def test_a_flash_crowd_comes_at_once_and_leaves_by_half_lives() -> None:
    trace = generated(Course("flash", 20.0, 1800.0, factor=6.0), LENGTHS, 7)
    top = 600.0 + FLASH_RISE_SECONDS
    assert rate_in(trace, 0, 600) == pytest.approx(20.0, rel=0.1)
    assert rate_in(trace, top, top + 12) == pytest.approx(120.0, rel=0.15)
    assert rate_in(trace, top + 114, top + 126) == pytest.approx(70.0, rel=0.15)
    assert rate_in(trace, 1600, 1800) == pytest.approx(20.0, rel=0.12)


def test_a_days_wave_has_its_mean_and_its_peak_over_trough() -> None:
    trace = generated(Course("diurnal", 20.0, 3600.0, factor=4.0, period_seconds=3600.0), LENGTHS, 8)
    assert trace.requests_per_second == pytest.approx(20.0, rel=0.05)
    assert rate_in(trace, 1650, 1950) / rate_in(trace, 0, 150) == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize(
    ("course", "want"),
    [
        (Course("poisson", 0.0, 10.0), "--rate=0 is not above 0"),
        (Course("step", 1.0, math.inf), "--duration-seconds=inf is not"),
        (Course("step", 1.0, 10.0, factor=0.5), "factor=0.5"),
        (Course("poisson", 1e-9, 10.0), "bring no request"),
    ],
)
def test_a_course_that_cannot_be_is_refused(course: Course, want: str) -> None:
    with pytest.raises(OptionsError, match=want):
        generated(course, LENGTHS, 0)


def test_rates_scaled_to_a_mean_keep_their_course_and_lengths_come_from_the_trace() -> None:
    windows = scaled_to_mean((RateWindow(0, 600, 100.0), RateWindow(600, 1800, 400.0)), 3.0)
    assert [one.requests_per_second for one in windows] == [pytest.approx(1.0), pytest.approx(4.0)]
    lent = Trace("lent", (Arrival(0, 11, 22), Arrival(1, 33, 44)), 2.0)
    trace = arrivals_of("rates", windows, Lengths(lent), seed=1)
    assert {(one.prompt_tokens, one.output_tokens) for one in trace.arrivals} == {(11, 22), (33, 44)}
    assert rate_in(trace, 0, 600) == pytest.approx(1.0, rel=0.15)
    assert rate_in(trace, 600, 1800) == pytest.approx(4.0, rel=0.1)


def test_a_thinned_process_has_the_variation_that_is_computed_for_it() -> None:
    """Each fourth request of a bursty process, chosen at random, against one made with that variation."""
    windows = (RateWindow(0, 4000, 20.0, 3.0),)
    (thinned,) = scaled_to_mean(windows, 5.0)
    chance = random.Random(9)
    kept = [
        one.at_seconds for one in arrivals_of("r", windows, LENGTHS, 2).arrivals if chance.random() < 0.25
    ]
    gaps = [b - a for a, b in pairwise(kept)]
    assert thinned.variation == pytest.approx(math.sqrt(3.0))
    assert stdev(gaps) / mean(gaps) == pytest.approx(math.sqrt(3.0), rel=0.06)
    # More of them are more users, each as bursty.
    assert scaled_to_mean(windows, 50.0)[0].variation == 3.0


def test_a_window_without_requests_stays_empty() -> None:
    trace = arrivals_of("r", (RateWindow(0, 10, 5), RateWindow(10, 50, 0), RateWindow(50, 60, 5)), LENGTHS, 1)
    assert rate_in(trace, 10, 50) == 0
    assert rate_in(trace, 50, 60) > 0


def test_lognormal_lengths_have_the_size_of_conversations() -> None:
    chance = random.Random(0)
    drawn = [LENGTHS.draw(chance) for _ in range(5000)]
    assert mean(prompt for prompt, _ in drawn) == pytest.approx(1155, rel=0.06)
    assert mean(output for _, output in drawn) == pytest.approx(211, rel=0.06)
