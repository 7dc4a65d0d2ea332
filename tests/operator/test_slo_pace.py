"""How slow steps are by what requests saw, and what of that is believed."""

import json

import pytest

from headway_operator.slo.histogram import bucket_of
from headway_operator.slo.memory import Memory
from headway_operator.slo.pace import AS_TOLD, Pace, pace
from headway_operator.slo.slices import Slice
from headway_operator.slo.window import Recent

NOW = 100_000.0
TOLD = 20.0


ANSWERS = ("answers", "answer_sum", "answer_squares")
# A hundred answers of 81 tokens, and of ten times as many for a tenth of them.
ALIKE, FEW_LONG = (100, 8100, 656_100), (100, 9 * 90 + 10 * 729, 90 * 81 + 10 * 729**2)


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
    """Of a hundred requests, each a little slower than the one before: from 0.7 to 1.4 times that."""
    return {milliseconds * 0.7 * 2 ** (number / 9): 10 for number in range(10)}


DOUBTED = Pace(1.7, is_doubted=True)


@pytest.mark.parametrize("before", [AS_TOLD, DOUBTED])
@pytest.mark.parametrize(
    ("seen", "requests", "want"),
    [
        pytest.param(20.0, even(20.0), AS_TOLD, id="all agree"),
        pytest.param(40.0, even(40.0), Pace(2.0, is_doubted=False), id="steps are told half as long"),
        pytest.param(20.0, even(40.0), Pace(1.98, is_doubted=True), id="tokens as well"),
        pytest.param(20.0, even(10.0), Pace(0.5, is_doubted=True), id="both twice as long"),
    ],
)
def test_tokens_are_believed_where_requests_saw_the_same(
    seen: float, requests: dict[float, int], want: Pace, before: Pace
) -> None:
    found = pace(happened(seen, requests), NOW, before)
    assert found.is_doubted == want.is_doubted
    assert found.times == pytest.approx(want.times, rel=0.05)


@pytest.mark.parametrize(("before", "times"), [(AS_TOLD, 1.0), (DOUBTED, 1.6)])
@pytest.mark.parametrize(("answers", "is_possible"), [(ALIKE, False), (FEW_LONG, True)])
def test_what_may_be_is_believed_but_after_a_doubt(
    before: Pace, times: float, answers: tuple[int, int, int], *, is_possible: bool
) -> None:
    """Four fifths of the requests are slow; where these are short, most tokens may be of the others."""
    found = pace(happened(20.0, {16.0: 20, 34.0: 80}, answers=answers), NOW, before)
    if not is_possible:
        before, times = DOUBTED, 1.6
    assert found.is_doubted is before.is_doubted
    assert found.times == pytest.approx(times, rel=0.05)


def test_answers_of_a_token_or_none_say_nothing() -> None:
    for answers in ((100, 100, 100), (0, 0, 0)):
        assert pace(happened(20.0, even(40.0), answers=answers), NOW, AS_TOLD) == AS_TOLD


@pytest.mark.parametrize("before", [AS_TOLD, DOUBTED])
def test_where_too_few_tell_what_was_doubted_stays_so(before: Pace) -> None:
    assert pace(Recent([Slice(NOW - 100.0, NOW - 95.0, {}, {})]), NOW, before) == before
    assert pace(happened(20.0, {40.0: 19}), NOW, before) == before
    assert pace(happened(20.0, even(20.0), tokens=199), NOW, before) == before
    assert pace(happened(20.0, even(40.0), told=0.0), NOW, before) == AS_TOLD


def test_a_checkpoint_remembers_what_is_doubted() -> None:
    memory = Memory(began_at=1.0, pace=DOUBTED)
    written = json.loads(json.dumps(memory.to_dict()))
    assert Memory.from_dict(written, NOW).pace == DOUBTED
    del written["pace"]  # as earlier versions wrote it
    assert Memory.from_dict(written, NOW).pace == AS_TOLD
