"""What a request would wait for at a replica, and how long that takes."""

import pytest

from headway_gateway.load import (
    ASSUMED_PROMPTS_PER_PLACE,
    MOST_PROMPTS_PER_PLACE,
    UNANSWERED_WEIGHT,
    Pace,
    ReplicaLoad,
)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        pytest.param({"in_flight": 7}, 7, id="what decodes"),
        pytest.param({"in_flight": 7, "num_unanswered": 2}, 7 + 8 * 2, id="prompts"),
        pytest.param({"in_flight": 7, "num_unanswered": 5, "num_late": 4.0}, 3 + 8, id="late prompts"),
        pytest.param({"in_flight": 7, "num_unanswered": 2, "num_late": 4.5}, 2.5, id="more late ones"),
        pytest.param({"in_flight": 7, "max_num_seqs": 8}, 7, id="a place is free"),
        pytest.param({"in_flight": 8, "max_num_seqs": 8}, 8 + 8 * 5, id="no place is free"),
        pytest.param({"in_flight": 10, "max_num_seqs": 8, "num_unanswered": 2}, 10 + 8 * 7, id="two wait"),
        pytest.param({"in_flight": 10, "max_num_seqs": 8}, 10 + 8 * 7, id="two wait, not for a stream"),
        pytest.param({"in_flight": 10, "max_num_seqs": 8, "num_late": 3.0}, 7, id="who waits is late"),
    ],
)
def test_prompts_and_places_are_waited_for(fields: dict[str, float], want: float) -> None:
    assert UNANSWERED_WEIGHT == 8
    replica = ReplicaLoad(**fields)  # type: ignore[arg-type]
    # 20 s for an answer, of 8 at a time, are 2.5 s for a place.
    assert replica.load(Pace(prompt_seconds=0.5, answer_seconds=20.0)) == want


def test_what_answers_take_is_a_running_mean() -> None:
    pace = Pace()
    assert pace.prompts_per_place(8) == ASSUMED_PROMPTS_PER_PLACE
    pace.answered(2.0, 4)
    assert pace.prompts_per_place(8) == ASSUMED_PROMPTS_PER_PLACE
    pace.ended(20.0)
    assert (pace.prompt_seconds, pace.answer_seconds) == (0.5, 20.0)
    assert pace.prompts_per_place(8) == 5.0
    assert pace.prompts_per_place(40) == 1.0
    for _ in range(200):
        pace.answered(3.0, 3)
        pace.ended(8.0)
    assert (pace.prompt_seconds, pace.answer_seconds) == pytest.approx((1.0, 8.0), rel=1e-3)
    # A clock that stood still, and answers that take for ever.
    assert Pace(0.0, 20.0).prompts_per_place(8) == ASSUMED_PROMPTS_PER_PLACE
    assert Pace(1e-9, 20.0).prompts_per_place(8) == MOST_PROMPTS_PER_PLACE
