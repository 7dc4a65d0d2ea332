"""The verdicts that a count of misses allows."""

from collections.abc import Iterator
from math import comb

import pytest

from headway_operator.slo import lognormal
from headway_operator.slo import verdict as verdicts
from headway_operator.slo.verdict import ERROR_PROBABILITY, verdict


@pytest.mark.parametrize(("num_requests", "most_misses"), [(59, 0), (124, 2), (200, 5), (400, 14)])
def test_p95_is_met_up_to_the_table_and_not_beyond(num_requests: int, most_misses: int) -> None:
    assert verdict(num_requests - most_misses, most_misses, 95) == "met"
    assert verdict(num_requests - most_misses - 1, most_misses + 1, 95) == "unknown"


@pytest.mark.parametrize(
    ("num_requests", "least_misses"), [(20, 3), (59, 6), (124, 10), (200, 15), (400, 27)]
)
def test_p95_is_violated_from_the_table_on_and_not_before(num_requests: int, least_misses: int) -> None:
    assert verdict(num_requests - least_misses, least_misses, 95) == "violated"
    assert verdict(num_requests - least_misses + 1, least_misses - 1, 95) == "unknown"


@pytest.mark.parametrize("percentile", [50, 75, 90, 99])
@pytest.mark.parametrize("num_requests", [1, 7, 40, 173])
def test_every_percentile_follows_the_exact_tails(percentile: int, num_requests: int) -> None:
    share = 1 - percentile / 100
    exactly = [
        comb(num_requests, k) * share**k * (1 - share) ** (num_requests - k) for k in range(num_requests + 1)
    ]
    for missed in range(num_requests + 1):
        got = verdict(num_requests - missed, missed, percentile)
        if sum(exactly[: missed + 1]) <= ERROR_PROBABILITY - 1e-9:
            assert got == "met", missed
        elif missed >= 3 and sum(exactly[missed:]) <= ERROR_PROBABILITY - 1e-9:
            assert got == "violated", missed
        else:
            assert got == "unknown", missed


def test_two_slow_requests_are_no_reason_to_act() -> None:
    assert verdict(0, 2, 95) == "unknown"
    assert verdict(0, 3, 95) == "violated"


def test_no_traffic_is_unknown_and_a_million_requests_do_not_overflow() -> None:
    assert verdict(0, 0, 95) == "unknown"
    assert verdict(960_000, 40_000, 95) == "met"
    assert verdict(940_000, 60_000, 95) == "violated"


@pytest.mark.parametrize("percentile", [50, 95, 99])
def test_a_verdict_takes_some_deviations_of_terms_however_many_requests_there_are(
    percentile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail is as many terms as misses: a busy service has tens of thousands in five minutes."""
    num_requests = 1_000_000
    expected = num_requests * (100 - percentile) // 100
    deviation = (expected * percentile / 100) ** 0.5

    class Counted:
        """A range that counts what is taken of it."""

        taken = 0

        def __init__(self, *bounds: int) -> None:
            self._range = range(*bounds)

        def __iter__(self) -> Iterator[int]:
            for one in self._range:
                Counted.taken += 1
                yield one

    monkeypatch.setattr(verdicts, "range", Counted, raising=False)
    for missed in (expected, expected + 1, int(expected + deviation), int(expected - deviation)):
        Counted.taken = 0
        assert verdict(num_requests - missed, missed, percentile) == "unknown"
        assert 0 < Counted.taken < 12 * deviation
    assert (
        verdict(num_requests - int(expected - 1.4 * deviation), int(expected - 1.4 * deviation), percentile)
        == "met"
    )
    more = int(expected + 1.4 * deviation)
    assert verdict(num_requests - more, more, percentile) == "violated"


def test_deviations_of_ever_new_percentiles_are_not_kept_for_ever() -> None:
    """What a promise is sized for moves with each pass of each service."""
    for number in range(2000):
        lognormal.deviations_of(95.0 + number / 1000.0)
    assert lognormal.deviations_of.cache_info().currsize <= 256
