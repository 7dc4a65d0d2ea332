"""The cheapest course of replicas through intervals, at a price of a miss: a shortest path, found exactly.

A course has one number of replicas per interval. It costs their time, the cold start of each replica that an
interval has more than the one before it, and the price of each miss. The first interval's replicas were there
before. Letting replicas go costs nothing.

Misses stand in a table per interval, by number of replicas, without gaps. Beyond the last number tried
nothing gets better; below the first everything misses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Table = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Costs:
    """All in seconds of a replica. price: of one miss."""

    interval_seconds: float
    cold_start_seconds: float
    price: float


def missed(table: Table, replicas: int, num_arrivals: int) -> int:
    """How many of an interval's arrivals miss."""
    return table.get(min(replicas, max(table)), num_arrivals)


def cheapest_course(
    tables: Sequence[Table], num_arrivals: Sequence[int], numbers: range, costs: Costs
) -> tuple[int, ...]:
    """The course of least cost with all numbers out of `numbers`; of equals, one with few at the end."""
    cost = {number: _within(tables[0], number, num_arrivals[0], costs) for number in numbers}
    came_from: list[dict[int, int]] = []
    for table, count in zip(tables[1:], num_arrivals[1:], strict=True):
        before = {number: _best_before(number, cost, costs) for number in numbers}
        cost = {
            number: cost[before[number]]
            + _added(before[number], number, costs)
            + _within(table, number, count, costs)
            for number in numbers
        }
        came_from.append(before)
    course = [min(numbers, key=cost.__getitem__)]
    for before in reversed(came_from):
        course.append(before[course[-1]])
    return tuple(reversed(course))


def _best_before(number: int, cost: Mapping[int, float], costs: Costs) -> int:
    """From where `number` is reached most cheaply."""
    return min(cost, key=lambda before: cost[before] + _added(before, number, costs))


def _within(table: Table, number: int, count: int, costs: Costs) -> float:
    return number * costs.interval_seconds + costs.price * missed(table, number, count)


def _added(before: int, number: int, costs: Costs) -> float:
    return costs.cold_start_seconds * max(0, number - before)
