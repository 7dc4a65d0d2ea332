"""Steps 4 and 5 of the oracle: which course is run whole next, by what came of those before.

The search hangs on nothing but what came of each course. So while one runs, those that come next if it
attains the objective, and if it does not, are known, and other processes may begin with them: what is found
is the same, and found sooner.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from headway_simulator.descent import FAILED, Course, Ground, Tried, descend
from headway_simulator.priced_courses import PricedCourses
from headway_simulator.schedules import asked_seconds
from headway_simulator.table_processes import UnwantedError, processes, work_of

Answers = dict[Course, Tried]
# What may come after one: if it attains the objective, and if it does not.
NUM_LIKELY = 2


@dataclass(frozen=True, slots=True)
class CourseSearch:
    """budget: courses that may be run."""

    courses: PricedCourses
    ground: Ground
    budget: int

    def goes_through(self, answers: Answers, judge: Callable[[Course], Tried]) -> bool:
        """Whether all that there is to try has been; `judge` runs a course that `answers` has nothing of
        yet, and what it says is added there."""

        def tried(course: Course) -> Tried | None:
            if course not in answers:
                if len(answers) >= self.budget:
                    return None
                answers[course] = judge(course)
            return answers[course]

        turns = self.courses.in_turn()
        course = next(turns)
        while course is not None and (judged := tried(course)) is not None:
            course = turns.send(judged.spare >= 0)
        attaining = {one: found for one, found in answers.items() if found.spare >= 0}
        if not attaining:
            return course is None
        return descend(min(attaining, key=lambda one: attaining[one].replica_hours), self.ground, tried)

    def after(self, answers: Answers) -> Course | None:
        """The course that would be run next."""

        def unknown(course: Course) -> Tried:
            raise _UnknownError(course)

        try:
            self.goes_through(dict(answers), unknown)
        except _UnknownError as found:
            return found.course
        return None

    def likely(self, course: Course, answers: Answers) -> Iterator[Course]:
        """What may come after one that is being run: if it attains the objective, with nothing to spare, and
        if it does not."""
        hours = asked_seconds(course, self.ground.ahead_seconds) / 3600.0
        for outcome in (Tried(hours, 0.0), FAILED):
            following = self.after({**answers, course: outcome})
            if following is not None:
                yield following


class Runs(Protocol):
    """What runs whole courses; it is sent to each process, or inherited."""

    def run(self, course: Course) -> Any:
        """What comes of one."""
        ...


Run = Callable[[Course, Iterator[Course]], Any]


@contextmanager
def runs_ahead(search: Runs, num_processes: int) -> Iterator[Run]:
    """Yields what runs a course; with several processes those begin meanwhile with what may come next. What
    nobody came to want ends with the block. Raises SimulatorError where one of them was killed."""
    if num_processes <= 1:
        yield lambda course, likely: search.run(course)
        return
    num_processes = min(num_processes, 1 + NUM_LIKELY)
    with suppress(UnwantedError), processes(search, num_processes) as pool:
        begun: dict[Course, Future[Any]] = {}

        def begin(course: Course) -> Future[Any]:
            if course not in begun:
                begun[course] = pool.submit(work_of, partial(_run, course))
            return begun[course]

        def run(course: Course, likely: Iterator[Course]) -> Any:
            wanted = begin(course)
            # One process is always free for what is wanted.
            while not wanted.done() and sum(not one.done() for one in begun.values()) < num_processes:
                following = next(likely, None)
                if following is None:
                    break
                begin(following)
            return wanted.result()

        yield run
        if not all(one.done() for one in begun.values()):
            raise UnwantedError


def _run(course: Course, search: Runs) -> Any:
    return search.run(course)


class _UnknownError(Exception):
    """What comes of a course is not known."""

    def __init__(self, course: Course) -> None:
        self.course = course
