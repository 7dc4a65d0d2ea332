"""From a schedule that attains the objective down to one of which no replica can be taken.

A step takes one replica from one interval. Where a later one has it asked for all the same, ahead of its cold
start, that alone would save nothing; so a step goes on over as many intervals as it takes to save something.

Algorithm. Steps stand in order of the misses that tables predict of them, of equals the largest number first;
those that were in vain before stand last. As many as the misses left over allow are tried at once; where the
whole run of that attains the objective for less, the search goes on from there with up to twice as many,
else with half as many. It ends where each single step from the best schedule has been tried, or by what
`tried` refuses.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from headway_simulator.courses import Table, missed
from headway_simulator.schedules import asked_seconds

Course = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """A schedule run whole. spare: misses that the objective still allows; below 0 it is not attained."""

    replica_hours: float
    spare: float


# What does not attain it, whatever it costs.
FAILED = Tried(math.inf, -1.0)


@dataclass(frozen=True, slots=True)
class Step:
    """One replica fewer from interval `first` to `last`. misses: more of them, by the tables."""

    first: int
    last: int
    misses: int
    number: int

    def of(self, course: Course) -> Course:
        """What it leaves."""
        return tuple(number - (self.first <= index <= self.last) for index, number in enumerate(course))


@dataclass(frozen=True, slots=True)
class Ground:
    """What steps are made of: tables of misses, arrivals by interval, the least number, and how long before
    an interval its replicas are asked for."""

    tables: Sequence[Table]
    num_arrivals: Sequence[int]
    lowest: int
    ahead_seconds: float

    def steps(self, course: Course) -> Iterator[Step]:
        """All that make a schedule cheaper and have no part that does."""
        asked = asked_seconds(course, self.ahead_seconds)
        for first in range(len(course)):
            for last in range(first, len(course)):
                if course[last] <= self.lowest:
                    break
                step = self._step(course, first, last)
                if asked_seconds(step.of(course), self.ahead_seconds) < asked:
                    # Begun one later it would be shorter.
                    part = Step(first + 1, last, 0, 0).of(course)
                    if first == last or asked_seconds(part, self.ahead_seconds) == asked:
                        yield step
                    break

    def _step(self, course: Course, first: int, last: int) -> Step:
        within = range(first, last + 1)
        more = sum(
            missed(self.tables[index], course[index] - 1, self.num_arrivals[index])
            - missed(self.tables[index], course[index], self.num_arrivals[index])
            for index in within
        )
        return Step(first, last, more, max(course[index] for index in within))


def descend(course: Course, ground: Ground, tried: Callable[[Course], Tried | None]) -> bool:
    """Whether every step from the best schedule has been tried.

    course: attains the objective. tried: runs a schedule, or remembers it; None where it must not.
    """
    best = tried(course)
    assert best is not None
    assert best.spare >= 0, f"{course} does not attain the objective"
    most = len(course)
    failed: set[Course] = set()
    vain: set[tuple[int, int]] = set()
    while True:
        left = [one for one in ground.steps(course) if one.of(course) not in failed]
        if not left:
            return True
        group = _at_once(left, vain, best.spare, most)
        lowered = course
        for step in group:
            lowered = step.of(lowered)
        found = tried(lowered)
        if found is None:
            return False
        if found.spare >= 0 and found.replica_hours < best.replica_hours:
            course, best = lowered, found
            most = 2 * len(group)
            vain -= {(one.first, one.last) for one in group}
        elif len(group) == 1:
            failed.add(lowered)
            vain.add((group[0].first, group[0].last))
        else:
            most = len(group) // 2


def _at_once(steps: Sequence[Step], vain: Collection[tuple[int, int]], spare: float, most: int) -> list[Step]:
    """The first steps that together keep within the misses to spare; at least one; of those that were in
    vain before, one alone."""
    ordered = sorted(
        steps, key=lambda one: ((one.first, one.last) in vain, one.misses, -one.number, one.first)
    )
    chosen = ordered[:1]
    if (chosen[0].first, chosen[0].last) in vain:
        return chosen
    predicted = chosen[0].misses
    for step in ordered[1:]:
        if len(chosen) >= most or (step.first, step.last) in vain or predicted + step.misses > spare:
            break
        if all(step.last < one.first or one.last < step.first for one in chosen):
            chosen.append(step)
            predicted += step.misses
    return chosen
