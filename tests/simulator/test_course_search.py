"""Which courses are run whole, in which order, and which of them other processes begin with meanwhile."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from tests.simulator.test_table_processes import eventually, is_alive

from headway_simulator.course_search import Answers, CourseSearch, runs_ahead
from headway_simulator.descent import FAILED, Course, Ground, Tried
from headway_simulator.priced_courses import PricedCourses
from headway_simulator.schedules import asked_seconds

NUM_INTERVALS, AHEAD_SECONDS = 6, 20.0


def search_of(seed: int, budget: int) -> CourseSearch:
    chance = random.Random(seed)
    tables = [
        {number: max(0, chance.randrange(30, 60) - 12 * number) for number in range(1, 6)}
        for _ in range(NUM_INTERVALS)
    ]
    counts = [100] * NUM_INTERVALS
    courses = PricedCourses(tables, counts, 1, 8, AHEAD_SECONDS, allowed=30.0)
    return CourseSearch(courses, Ground(tables, counts, 1, AHEAD_SECONDS), budget)


def judged(course: Course, least: float) -> Tried:
    """As if so many replicas on average were needed."""
    spare = sum(course) - least * NUM_INTERVALS
    hours = asked_seconds(course, AHEAD_SECONDS) / 3600.0
    return Tried(hours, 0.0) if spare >= 0 else FAILED


@pytest.mark.parametrize("least", [1.5, 2.5, 3.5, 7.0, 20.0])
def test_what_comes_next_is_among_what_is_likely(least: float) -> None:
    """Where nothing is to spare, as it is guessed, it is always one of two."""
    search = search_of(seed=int(10 * least), budget=12)
    order: list[Course] = []
    likely: list[list[Course]] = []
    answers: Answers = {}

    def judge(course: Course) -> Tried:
        order.append(course)
        likely.append(list(search.likely(course, answers)))
        return judged(course, least)

    search.goes_through(answers, judge)
    assert order == list(answers)
    assert len(order) > 3
    assert all(len(some) <= 2 for some in likely)
    assert all(after in some for (_, after), some in zip(pairwise(order), likely, strict=False))


@pytest.mark.parametrize("budget", [1, 3, 100])
def test_it_ends_with_its_budget_or_with_what_there_is_to_try(budget: int) -> None:
    search, answers = search_of(seed=3, budget=budget), Answers()
    is_done = search.goes_through(answers, lambda course: judged(course, 2.5))
    assert is_done == (budget == 100)
    assert len(answers) == budget if budget < 100 else len(answers) < budget
    assert search.after(answers) is None


@dataclass(frozen=True)
class Runs:
    """folder: gets a file for each course that is begun, which says by whom. num_awaited: others that are
    begun before the one numbered 0 ends."""

    folder: Path
    seconds: float = 0.0
    num_awaited: int = 0

    def run(self, course: Course) -> tuple[Course, int]:
        (self.folder / str(course[0])).write_text(str(os.getpid()), encoding="utf-8")
        if course[0]:
            time.sleep(self.seconds)
        else:
            eventually(lambda: len(self.begun) > self.num_awaited)
        return course, os.getpid()

    @property
    def begun(self) -> dict[int, int]:
        written = {int(one.name): one.read_text(encoding="utf-8") for one in self.folder.iterdir()}
        return {number: int(process) for number, process in written.items() if process}


def numbered(*numbers: int) -> Iterator[Course]:
    return iter([(number,) for number in numbers])


def test_as_many_are_begun_as_there_are_processes(tmp_path: Path) -> None:
    runs = Runs(tmp_path, seconds=3600.0, num_awaited=2)
    with runs_ahead(runs, 3) as run:
        course, process = run((0,), numbered(1, 2, 3))
        assert course == (0,)
        assert process != os.getpid()
        assert set(runs.begun) == {0, 1, 2}
    assert not any(map(is_alive, runs.begun.values())), "nobody came to want them"


def test_what_was_begun_is_not_begun_again(tmp_path: Path) -> None:
    with runs_ahead(Runs(tmp_path, seconds=0.5, num_awaited=1), 2) as run:
        run((0,), numbered(1))
        (tmp_path / "1").unlink()
        assert run((1,), numbered())[0] == (1,)
    assert not (tmp_path / "1").exists()


def test_alone_nothing_is_begun_ahead(tmp_path: Path) -> None:
    with runs_ahead(Runs(tmp_path), 1) as run:
        assert run((0,), numbered(1)) == ((0,), os.getpid())
    assert set(Runs(tmp_path).begun) == {0}
