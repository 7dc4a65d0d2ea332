"""Places under more load than can be served: those with which most requests end within TPOT."""

from dataclasses import replace

import pytest
from tests.operator.law_fleet import MODEL

from headway_operator.samples import Limits
from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Capacity, Factors, Workload
from headway_operator.slo.saturation import places

# Prompts of 80 ms and answers of 150 tokens, as of recorded conversations.
WORK = Workload(1600.0, 5.7e6, 150.0, 1800.0, 0.0)
REPLICA = Replica(MODEL, WORK, 99.0, 8)


def found(full: int, best: int) -> Capacity:
    return Capacity(1.7, Limits(best, 2048), 8.0, full)


def test_where_as_many_as_keep_tpot_serve_most_there_are_no_more() -> None:
    replica, limit = replace(REPLICA, percent=95.0), 26.0
    full = max(taken for taken in range(1, 64) if replica.full_tpot(taken, Factors()) <= limit)
    assert full > 4
    assert replica.full_missing_tpot(full, Factors(), limit) <= 0.05
    assert full <= places(replica, found(full, 64), Factors(), limit) < 1.4 * full


def test_one_or_two_places_are_no_crowds_best() -> None:
    """Two keep a TPOT of 13 ms at P99, at little more than half of the rate that the best ones do."""
    assert REPLICA.full_tpot(2, Factors()) < 13.0 < REPLICA.full_tpot(3, Factors())
    chosen = places(REPLICA, found(2, 5), Factors(), 13.0)

    def served(taken: int) -> float:
        kept = 1.0 - REPLICA.full_missing_tpot(taken, Factors(), 13.0)
        return kept * REPLICA.full_per_second(taken, Factors())

    assert served(chosen) == max(map(served, range(2, 6)))
    assert served(chosen) > 1.5 * served(2)


@pytest.mark.parametrize(
    ("replica", "capacity", "tpot", "want"),
    [
        pytest.param(REPLICA, found(64, 64), None, 64, id="without a target"),
        pytest.param(REPLICA, found(5, 5), 13.0, 5, id="the model's best are no more"),
        pytest.param(REPLICA, found(12, 40), 13.0, 12, id="the longest step keeps it, whatever is guessed"),
        pytest.param(
            replace(REPLICA, workload=replace(WORK, kv_share=0.3)),
            found(1, 5),
            13.0,
            2,
            id="memory has room for two",
        ),
    ],
)
def test_it_has_bounds(replica: Replica, capacity: Capacity, tpot: float | None, want: int) -> None:
    assert places(replica, capacity, Factors(), tpot) == want


@pytest.mark.parametrize("taken", [1, 4])
def test_requests_end_as_fast_as_places_become_free(taken: int) -> None:
    """Each holds one for its prompt, and for its answer, at the mean TPOT of all places taken."""
    prompt, token = 0.05 * WORK.prompt, 0.25
    mean = 8.3 + taken * token + (taken - 1) * prompt / WORK.answer
    held = 8.3 + prompt + WORK.answer * mean
    assert REPLICA.full_per_second(taken, Factors()) == pytest.approx(1000.0 * taken / held)


@pytest.mark.parametrize("percent", [90.0, 95.0, 99.0])
@pytest.mark.parametrize("tpot", [9.0, 11.0, 13.0, 20.0, 40.0])
@pytest.mark.parametrize("square", [2.2, 5.0, 10.0])
def test_no_other_number_serves_more(percent: float, tpot: float, square: float) -> None:
    """square: of prompts, the mean over the square of the mean."""
    work = replace(WORK, answer=60.0, prompt_square=square * WORK.prompt**2)
    replica = replace(REPLICA, percent=percent, workload=work)
    full = max(taken for taken in range(1, 99) if taken == 1 or replica.full_tpot(taken, Factors()) <= tpot)

    def served(taken: int) -> float:
        kept = 1.0 - replica.full_missing_tpot(taken, Factors(), tpot)
        return kept * replica.full_per_second(taken, Factors())

    assert places(replica, found(full, 150), Factors(), tpot) == max(range(full, 151), key=served)
