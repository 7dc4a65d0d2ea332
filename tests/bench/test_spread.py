"""Distributions that flags name."""

import numpy
import pytest

from headway_bench.errors import OptionsError
from headway_bench.spread import parse_spread
from headway_bench.workload import random_stream


def drawn(text: str, count: int = 20_000) -> list[float]:
    spread, random = parse_spread(text), random_stream(1)
    return [spread.draw(random) for _ in range(count)]


def test_a_number_is_always_itself() -> None:
    assert set(drawn("128", 10)) == {128.0}
    assert parse_spread("128").is_fixed


def test_uniform_counts_reach_both_ends() -> None:
    spread, random = parse_spread("uniform:3:5", 1), random_stream(1)
    counts = numpy.bincount([spread.draw_count(random) for _ in range(3000)])
    assert counts[:3].sum() == 0
    assert counts[3:] == pytest.approx([1000] * 3, rel=0.1)


@pytest.mark.parametrize("text", ["normal:100:10", "lognormal:100:10", "lognormal:100:150"])
def test_mean_and_deviation_are_those_of_the_values(text: str) -> None:
    want = float(text.rpartition(":")[2])
    values = drawn(text)
    assert numpy.mean(values) == pytest.approx(100, rel=0.05)
    assert numpy.std(values) == pytest.approx(want, rel=0.15)


def test_a_range_cuts_the_distribution_without_heaping_at_its_ends() -> None:
    values = numpy.asarray(drawn("normal:100:50:80:120"))
    assert values.min() >= 80
    assert values.max() <= 120
    assert (values == 80).sum() == 0


def test_an_exponential_has_its_mean() -> None:
    assert numpy.mean(drawn("exponential:2.5")) == pytest.approx(2.5, rel=0.03)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "uniform:5",
        "uniform:9:3",
        "normal:1",
        "lognormal:0:1",
        "normal:5:-1",
        "zipf:2:3",
        "nan",
        "0",
    ],
)
def test_what_is_no_distribution_of_lengths_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionsError, match=repr(text).replace(".", r"\.")):
        parse_spread(text, 1)


def test_a_range_that_is_hardly_ever_hit_is_refused_instead_of_searched_for_ever() -> None:
    spread = parse_spread("normal:100:1:500:600")
    with pytest.raises(OptionsError, match="widen the range"):
        spread.draw(random_stream(0))
