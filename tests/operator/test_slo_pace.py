"""How long steps take, by what they tell, by the time between tokens, and by what single requests saw."""

from collections import Counter

import pytest

from headway_operator.slo import histogram
from headway_operator.slo.histogram import bucket_of
from headway_operator.slo.sizing import pace
from headway_operator.slo.slices import Slice
from headway_operator.slo.window import Recent

NOW = 1000.0


def told(steps: float, gaps: float, requests: list[float], num_tokens: int = 10_000) -> Recent:
    """Means in milliseconds, of steps and of the time between tokens; and of single requests."""
    totals = {
        "told_count": num_tokens,
        "told_milliseconds": steps * num_tokens,
        "gaps": num_tokens,
        "gap_milliseconds": gaps * num_tokens,
        "generated_tokens": num_tokens,
    }
    return Recent([Slice(NOW - 60.0, NOW, totals, {"tpot": Counter(map(bucket_of, requests))})])


def spread(middle: float) -> list[float]:
    return [middle * (0.8 + 0.004 * number) for number in range(100)]


@pytest.mark.parametrize(
    ("steps", "gaps", "requests", "want"),
    [
        pytest.param(10.0, 10.0, spread(10.0), 1.0, id="all agree"),
        pytest.param(10.0, 11.0, spread(10.0), 1.0, id="tokens come a little later"),
        pytest.param(10.0, 20.0, spread(20.0), 2.0, id="steps are told wrong"),
        pytest.param(10.0, 10.0, spread(20.0), 2.0, id="both are told half as long"),
        pytest.param(20.0, 20.0, spread(10.0), 0.5, id="both are told twice as long"),
        pytest.param(10.0, 10.0, spread(20.0)[:59], 1.0, id="too few requests to say so"),
        pytest.param(
            10.0, 11.0, [11.0] * 50 + [100.0] * 50, 1.0, id="short answers wait, most tokens do not"
        ),
    ],
)
def test_what_most_requests_saw_is_believed_before_sums_that_cannot_be(
    steps: float, gaps: float, requests: list[float], want: float
) -> None:
    assert pace(told(steps, gaps, requests), NOW) == pytest.approx(want, rel=0.05)


def test_a_mean_of_counts_lies_in_the_middle_of_its_bucket() -> None:
    values = [3.0 + 0.11 * number for number in range(400)]
    assert histogram.mean(Counter(map(bucket_of, values))) == pytest.approx(sum(values) / 400, rel=0.02)
    assert histogram.mean({}) == 0.0
