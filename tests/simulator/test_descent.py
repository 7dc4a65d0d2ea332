"""The descent from a schedule to one of which nothing can be taken, against loads that are sums."""

from collections.abc import Callable

import pytest

from headway_simulator.descent import Course, Ground, Tried, descend
from headway_simulator.schedules import asked_seconds

TABLE = {1: 50, 2: 8, 3: 0}


def ground_of(num_intervals: int, ahead: float = 0.0) -> Ground:
    return Ground([TABLE] * num_intervals, [100] * num_intervals, 1, ahead)


def judge(
    seen: dict[Course, Tried], needed: Course, ahead: float = 0.0, budget: int = 1000
) -> Callable[[Course], Tried | None]:
    """A schedule misses ten requests for each replica that it lacks in an interval, of which 15 may be."""

    def tried(course: Course) -> Tried | None:
        if course not in seen:
            if len(seen) >= budget:
                return None
            lacking = sum(max(0, want - number) for want, number in zip(needed, course, strict=True))
            seen[course] = Tried(asked_seconds(course, ahead), 15.0 - 10.0 * lacking)
        return seen[course]

    return tried


def test_what_no_interval_needs_is_taken_from_all_at_once() -> None:
    seen: dict[Course, Tried] = {}
    assert descend((3,) * 20, Ground([{1: 0}] * 20, [100] * 20, 1, 0.0), judge(seen, (2,) * 20))
    assert (2,) * 20 in seen
    # All at once, all once more, halves of that, and each alone at last.
    best = min((one for one in seen if seen[one].spare >= 0), key=lambda one: seen[one].replica_hours)
    assert sum(best) == 39  # one may lack
    assert len(seen) < 30


@pytest.mark.parametrize("ahead", [0.0, 30.0, 70.0, 190.0])
def test_no_step_is_left_that_would_cost_less(ahead: float) -> None:
    needed = (1, 2, 2, 3, 1, 1, 1, 2, 1, 1)
    seen: dict[Course, Tried] = {}
    ground = ground_of(10, ahead)
    assert descend((3,) * 10, ground, judge(seen, needed, ahead))
    best = min((one for one in seen if seen[one].spare >= 0), key=lambda one: seen[one].replica_hours)
    for index, number in enumerate(best):
        fewer = (*best[:index], number - 1, *best[index + 1 :])
        if number > 1 and asked_seconds(fewer, ahead) < asked_seconds(best, ahead):
            assert seen[fewer].spare < 0
    if ahead == 0.0:
        assert sum(best) == sum(needed) - 1


def test_it_says_that_it_would_have_gone_on() -> None:
    seen: dict[Course, Tried] = {}
    assert not descend((3,) * 20, ground_of(20), judge(seen, (2,) * 20, budget=4))
    assert len(seen) == 4


def test_one_interval_in_the_middle_of_a_long_cold_start_is_left_with_the_next() -> None:
    """Replicas are asked for 70 s ahead: one interval alone would have none fewer asked for."""
    found = list(ground_of(5, 70.0).steps((3, 3, 3, 3, 3)))
    assert [(one.first, one.last) for one in found] == [(0, 1), (1, 2), (2, 3), (4, 4)]
    assert all(asked_seconds(one.of((3,) * 5), 70.0) < 3 * 300.0 for one in found)
