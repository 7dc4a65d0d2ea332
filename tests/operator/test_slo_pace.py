"""How slow steps are by what requests saw, and what of that is believed."""

import json
from collections import Counter
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
    at: float = NOW,
) -> Recent:
    """seen: the mean time between tokens as replicas tell it. requests: how many had which TPOT. answers:
    their number, and the sums of their tokens and of their squares. at: a minute after that."""
    totals = {
        "generated_tokens": float(tokens),
        "told_count": float(tokens),
        "told_milliseconds": told * tokens,
        "gaps": float(tokens),
        "gap_milliseconds": seen * tokens,
        **{name: float(value) for name, value in zip(ANSWERS, answers, strict=True)},
    }
    counts = Counter[int]()
    for milliseconds, count in requests.items():
        counts[bucket_of(milliseconds)] += count
    return Recent([Slice(at - 60.0, at - 55.0, totals, {"tpot": counts})])


def even(milliseconds: float) -> dict[float, int]:
    """A hundred requests, in ten steps from 0.7 to 1.4 times as long between tokens."""
    return {milliseconds * 0.7 * 2 ** (number / 9): 10 for number in range(10)}


DOUBTED = Pace(1.7, is_doubted=True, compared_at=NOW - 250.0, num=4)
BELIEVED = Pace(1.0, is_doubted=False, compared_at=NOW - 250.0)


@pytest.mark.parametrize(
    ("seen", "requests", "times", "is_doubted"),
    [
        pytest.param(20.0, even(20.0), 1.0, False, id="all agree"),
        pytest.param(40.0, even(40.0), 2.0, False, id="steps are told half as long"),
        pytest.param(20.0, even(40.0), 1.98, True, id="tokens as well"),
        pytest.param(20.0, even(10.0), 0.5, True, id="both twice as long"),
        pytest.param(20.0, even(4.0), 0.4, True, id="no faster than that"),
        pytest.param(20.0, even(90.0), 3.0, True, id="no slower than that"),
    ],
)
def test_what_is_found_first_counts_at_once(
    seen: float, requests: dict[float, int], times: float, *, is_doubted: bool
) -> None:
    found = pace(happened(seen, requests), NOW, AS_TOLD)
    assert (found.is_doubted, found.compared_at, found.contrary_since) == (is_doubted, NOW, None)
    assert found.times == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize(
    ("before", "seen", "other"), [(BELIEVED, 20.0, even(40.0)), (DOUBTED, 20.0, even(20.0))]
)
def test_the_contrary_counts_once_it_has_held_for_a_minute(
    before: Pace, seen: float, other: dict[float, int]
) -> None:
    found = before
    for second in range(0, 60, 5):
        found = pace(happened(seen, other, at=NOW + second), NOW + second, found)
        assert (found.times, found.is_doubted) == (before.times, before.is_doubted)
    contrary = happened(seen, other, at=NOW + 60)
    assert pace(contrary, NOW + 60, found).is_doubted is not before.is_doubted
    # A moment in which nobody can tell, or which agrees, and it begins anew.
    same = even(20.0 if before is BELIEVED else 40.0)
    for requests in (same, {40.0: 3}):
        again = pace(happened(seen, requests, at=NOW + 57), NOW + 57, found)
        assert pace(contrary, NOW + 60, again).is_doubted is before.is_doubted


def test_how_wrong_tokens_are_told_is_the_mean_of_what_was_found() -> None:
    """Requests tell 1.6 and 2.5 times as much in turns, as after jumps of the load."""
    found, seen = AS_TOLD, []
    for number in range(80):
        requests, at = even(50.0 if number % 2 else 32.0), NOW + 5.0 * number
        found = pace(happened(20.0, requests, at=at), at, found)
        seen.append(found.times)
    assert found.num == 80
    assert all(one == pytest.approx(2.0, rel=0.12) for one in seen[9:])
    # It goes by the time, not by the number of passes.
    later = pace(happened(20.0, even(50.0), at=NOW + 1000.0), NOW + 1000.0, found)
    assert later.times == pytest.approx(2.5, rel=0.06)


@pytest.mark.parametrize(
    ("long", "is_doubted"),
    [
        pytest.param((0, 81), True, id="all alike"),
        pytest.param((4, 405), True, id="few that are longer"),
        # Lengths vary by 82 of 80 tokens and TPOT by 6.8 ms, of which 1.2 times are more than 27.8 - 20.
        pytest.param((1, 900), False, id="next to what can be"),
        pytest.param((10, 729), False, id="most tokens may be of few"),
    ],
)
def test_what_may_be_is_believed(long: tuple[int, int], *, is_doubted: bool) -> None:
    """Three quarters of the requests are slower than tokens are told to be; these may be of the others."""
    number, tokens = long
    others = (8100 - number * tokens) / (100 - number)
    squares = number * tokens**2 + (100 - number) * others**2
    seen = happened(20.0, {17.0: 25, 31.0: 75}, answers=(100, 8100, int(squares)))
    assert pace(seen, NOW, AS_TOLD).is_doubted is is_doubted


def test_what_nobody_can_tell_stays_doubted_for_as_long_as_tokens_are_looked_at() -> None:
    nothing = Recent([Slice(NOW - 100.0, NOW - 95.0, {}, {})])
    assert pace(nothing, NOW, AS_TOLD) == AS_TOLD
    assert pace(nothing, NOW, DOUBTED) == DOUBTED
    assert pace(nothing, NOW + 50.1, DOUBTED) == AS_TOLD
    assert pace(nothing, NOW + 50.1, BELIEVED) == BELIEVED


@pytest.mark.parametrize("before", [AS_TOLD, DOUBTED, BELIEVED])
@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param({"requests": {40.0: 19}}, id="few requests"),
        pytest.param({"requests": {40.0: 89}}, id="many that left"),
        pytest.param({"requests": {1.0: 100}, "seen": 0.5, "told": 0.5}, id="the first bucket"),
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
    guessed = happened(20.0, even(40.0), told=20.0)
    totals = {**guessed.slices[0].totals, "told_count": 3900.0}
    seen = Recent([guessed.slices[0].with_totals(totals)])
    assert pace(seen, NOW, AS_TOLD) == AS_TOLD
    assert pace(seen, NOW, DOUBTED).times == 1.0
    assert pace(seen, NOW, DOUBTED).is_doubted


def test_a_checkpoint_remembers_what_is_doubted() -> None:
    memory = Memory(began_at=1.0, pace=DOUBTED)
    written = json.loads(json.dumps(memory.to_dict()))
    assert Memory.from_dict(written, NOW).pace == DOUBTED
    back = with_clock(memory._replace(kappa_at=NOW), NOW - 1000.0)
    assert back.pace == DOUBTED._replace(compared_at=NOW - 1000.0)
    del written["pace"]  # as earlier versions wrote it
    assert Memory.from_dict(written, NOW).pace == AS_TOLD


def test_another_revision_is_not_doubted() -> None:
    memory = Memory(began_at=1.0, pace=DOUBTED, revision="1a2b3c4d")
    for newest, want in (("1a2b3c4d", DOUBTED), ("another", AS_TOLD)):
        observed = Observed((Revision("demo", newest, 1, NOW),), ())
        assert with_revision(memory, observed).pace == want
