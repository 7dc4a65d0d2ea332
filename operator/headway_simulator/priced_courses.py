"""Steps 3 and 4 of the oracle: the cheapest courses that miss, by their tables, no more than a share of what
the objective leaves, for one share after another.

For a price of a miss, `courses` has the cheapest course: of replica time, cold starts and priced misses. The
price is bisected, without a simulation. Tables know nothing of queues that are carried from one interval into
the next, so that a course that is run whole may miss more, or less, than they say; which share is right is
found out by running some.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from headway_simulator.courses import Costs, Table, cheapest_course, missed
from headway_simulator.descent import Course
from headway_simulator.schedules import INTERVAL_SECONDS

# Courses tried, where one of them attains the objective.
NUM_COURSES = 4
# Prices tried: enough to tell apart any two courses that matter.
NUM_PRICES = 24
# Bounds of the price of a miss, in replica-seconds.
LEAST_PRICE, MOST_PRICE = 0.01, 10_000.0
# Shares: what it begins with, and the largest and smallest tried.
FIRST_SHARE, MOST_SHARE, LEAST_SHARE = 0.5, 4.0, 0.01
# Shares closer than this ratio are not told apart.
SHARE_RESOLUTION = 1.05
# Where not even a course without predicted misses attains it, so many replicas more are had all the time.
MARGINS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class PricedCourses:
    """tables, num_arrivals: by interval. lowest, most: numbers of replicas. allowed: to miss in all. found:
    courses by share."""

    tables: Sequence[Table]
    num_arrivals: Sequence[int]
    lowest: int
    most: int
    cold_start_seconds: float
    allowed: float
    found: dict[float, Course] = field(default_factory=dict, repr=False, compare=False)

    def in_turn(self) -> Generator[Course | None, bool, None]:
        """One after another, each sent back whether it attains the objective; then None."""
        share, attaining, failing = FIRST_SHARE, 0.0, math.inf
        num_tried = 1
        is_attained = yield self.of(share)
        if not is_attained:
            failing, num_tried = share, 2
            is_attained = yield self.of(0.0)
            for margin in () if is_attained else MARGINS:
                if (yield self.of(0.0, margin)):
                    break
        else:
            attaining = share
        while is_attained and num_tried < NUM_COURSES:
            num_tried += 1
            if failing == math.inf:
                share = min(MOST_SHARE, 2 * attaining)
            else:
                share = math.sqrt(max(attaining, LEAST_SHARE) * failing)
            if share <= max(attaining, LEAST_SHARE) * SHARE_RESOLUTION:
                break
            if (yield self.of(share)):
                attaining = share
            else:
                failing = share
        yield None

    def of(self, share: float, margin: int = 0) -> Course:
        """The cheapest found that misses at most this share of what may be missed, and `margin` replicas more
        all the time."""
        if share not in self.found:
            self.found[share] = self._cheapest(share)
        return tuple(min(self.most, number + margin) for number in self.found[share])

    def _cheapest(self, share: float) -> Course:
        numbers = range(self.lowest, max(max(table) for table in self.tables) + 1)
        low, high = math.log(LEAST_PRICE), math.log(MOST_PRICE)
        best: Course | None = None
        for _ in range(NUM_PRICES):
            price = high if best is None else (low + high) / 2
            costs = Costs(INTERVAL_SECONDS, self.cold_start_seconds, math.exp(price))
            course = cheapest_course(self.tables, self.num_arrivals, numbers, costs)
            if best is None:
                best = course
            elif sum(map(missed, self.tables, course, self.num_arrivals)) <= share * self.allowed:
                best, high = course, price
            else:
                low = price
        assert best is not None
        return best
