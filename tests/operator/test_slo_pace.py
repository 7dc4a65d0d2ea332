"""How slow steps are by what requests saw, and what of that is believed."""

import json
from typing import Any

import pytest

from headway_operator.slo.clock import with_clock
from headway_operator.slo.crowd import with_revision
from headway_operator.slo.histogram import bucket_of
from headway_operator.slo.memory import Memory
from headway_operator.slo.pace import AS_TOLD, Pace, pace
from headway_operator.slo.slices import Slice
from headway_operator.slo.window import Recent
from headway_operator.state import Observed, Revision

NOW = 100_000.0
TOLD = 20.0


ANSWERS = ("answers", "answer_sum", "answer_squares")
# A hundred answers of 81 tokens.
ALIKE = (100, 8100, 656_100)


def happened(
    seen: float,
    requests: dict[float, int],
    *,
    told: float = TOLD,
    tokens: int = 8000,
    answers: tuple[int, int, int] = ALIKE,
) -> Recent:
    """seen: the mean time between tokens as replicas tell it. requests: how many had which TPOT. answers:
    their number, and the sums of their tokens and of the squares of these."""
    totals = {
        "generated_tokens": float(tokens),
        "told_count": float(tokens),
        "told_milliseconds": told * tokens,
        "gaps": float(tokens),
        "gap_milliseconds": seen * tokens,
        **{name: float(value) for name, value in zip(ANSWERS, answers, strict=True)},
    }
    counts = {bucket_of(milliseconds): count for milliseconds, count in requests.items()}
    return Recent([Slice(NOW - 100.0, NOW - 95.0, totals, {"tpot": counts})])


def even(milliseconds: float) -> dict[float, int]:
    """A hundred requests, in ten steps from 0.7 to 1.4 times as long between tokens."""
    return {milliseconds * 0.7 * 2 ** (number / 9): 10 for number in range(10)}


DOUBTED = Pace(1.7, NOW - 250.0)


@pytest.mark.parametrize("before", [AS_TOLD, DOUBTED])
@pytest.mark.parametrize(
    ("seen", "requests", "want"),
    [
        pytest.param(20.0, even(20.0), AS_TOLD, id="all agree"),
        pytest.param(40.0, even(40.0), Pace(2.0), id="steps are told half as long"),
        pytest.param(20.0, even(40.0), Pace(1.98, NOW), id="tokens as well"),
        pytest.param(20.0, even(10.0), Pace(0.5, NOW), id="both twice as long"),
        pytest.param(20.0, even(4.0), Pace(0.4, NOW), id="no faster than that"),
        pytest.param(20.0, even(90.0), Pace(3.0, NOW), id="no slower than that"),
    ],
)
def test_tokens_are_believed_where_requests_saw_the_same(
    seen: float, requests: dict[float, int], want: Pace, before: Pace
) -> None:
    found = pace(happened(seen, requests), NOW, before)
    assert found.doubted_at == want.doubted_at
    assert found.times == pytest.approx(want.times, rel=0.05)


@pytest.mark.parametrize(
    ("long", "is_doubted"),
    [
        pytest.param((0, 81), (True, True), id="all alike"),
        pytest.param((4, 405), (True, True), id="few that are longer"),
        # Lengths vary by 82 of 80 tokens and TPOT by 6.8 ms, of which 1.2 times are more than 27.8 - 20.
        pytest.param((1, 900), (False, True), id="next to what can be"),
        pytest.param((10, 729), (False, False), id="most tokens may be of few"),
    ],
)
def test_what_may_be_is_believed(long: tuple[int, int], is_doubted: tuple[bool, bool]) -> None:
    """Three quarters of the requests are slower than tokens are told to be; these may be of the others."""
    number, tokens = long
    others = (8100 - number * tokens) / (100 - number)
    squares = number * tokens**2 + (100 - number) * others**2
    seen = happened(20.0, {17.0: 25, 31.0: 75}, answers=(100, 8100, int(squares)))
    assert tuple(pace(seen, NOW, one).doubted_at is not None for one in (AS_TOLD, DOUBTED)) == is_doubted


def test_what_nobody_can_tell_stays_doubted_for_as_long_as_tokens_are_looked_at() -> None:
    nothing = Recent([Slice(NOW - 100.0, NOW - 95.0, {}, {})])
    assert pace(nothing, NOW, AS_TOLD) == AS_TOLD
    assert pace(nothing, NOW, DOUBTED) == DOUBTED
    assert pace(nothing, NOW + 50.1, DOUBTED) == AS_TOLD


@pytest.mark.parametrize("before", [AS_TOLD, DOUBTED])
@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param({"requests": {40.0: 19}}, id="few requests"),
        pytest.param({"tokens": 199}, id="few tokens"),
        pytest.param({"tokens": 6000}, id="a load that has fallen, or guesses"),
        pytest.param({"tokens": 11_000}, id="a load that has risen"),
        pytest.param({"tokens": 60_000, "answers": (100, 60_100, 36_120_100)}, id="answers that take long"),
        pytest.param({"answers": (100, 100, 100)}, id="answers of a token"),
        pytest.param({"answers": (0, 0, 0)}, id="none"),
    ],
)
def test_what_is_not_of_the_same_requests_is_not_compared(unlike: dict[str, Any], before: Pace) -> None:
    arguments = {"seen": 20.0, "requests": even(40.0), **unlike}
    assert pace(happened(**arguments), NOW, before) == before


def test_where_guesses_make_most_tokens_all_is_as_told() -> None:
    assert pace(happened(20.0, even(40.0), told=0.0), NOW, AS_TOLD) == AS_TOLD


def test_a_checkpoint_remembers_what_is_doubted() -> None:
    memory = Memory(began_at=1.0, pace=DOUBTED)
    written = json.loads(json.dumps(memory.to_dict()))
    assert Memory.from_dict(written, NOW).pace == DOUBTED
    assert with_clock(memory._replace(kappa_at=NOW), NOW - 1000.0).pace == Pace(1.7, NOW - 1000.0)
    del written["pace"]  # as earlier versions wrote it
    assert Memory.from_dict(written, NOW).pace == AS_TOLD


def test_another_revision_is_not_doubted() -> None:
    memory = Memory(began_at=1.0, pace=DOUBTED, revision="1a2b3c4d")
    for newest, want in (("1a2b3c4d", DOUBTED), ("another", AS_TOLD)):
        observed = Observed((Revision("demo", newest, 1, NOW),), ())
        assert with_revision(memory, observed).pace == want
