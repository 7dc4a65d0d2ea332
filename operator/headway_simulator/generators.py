"""Made-up courses of load: steady, bursty, a day's wave, a step, a flash crowd; all become rate windows.

| kind    | rate                                                                                      |
| ---     | ---                                                                                       |
| poisson | that, all the time; gaps exponential                                                      |
| gamma   | the same; gaps gamma-distributed, `variation` times as irregular                          |
| diurnal | that * (1 - s * cos(2 pi t / period)), from night to night; peak = `factor` * trough      |
| step    | that for the first third, then `factor` times as much                                     |
| flash   | that; after a third, `factor` times as much within FLASH_RISE_SECONDS, back by half-lives |

"That" is `requests_per_second`: the mean of poisson and gamma, and of whole waves of diurnal; of step and
flash what comes before the jump, so that their mean is higher.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from headway_simulator.errors import OptionsError
from headway_simulator.rates import Lengths, RateWindow, arrivals_of
from headway_simulator.trace import Trace

Kind = Literal["poisson", "gamma", "diurnal", "step", "flash"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Rates are constant for so long.
RESOLUTION_SECONDS = 1.0
LONGEST_SECONDS = 1e7
FLASH_RISE_SECONDS = 10.0
FLASH_HALF_LIFE_SECONDS = 120.0
JUMP_SHARE = 1 / 3
DAY_SECONDS = 86400.0
# A wave of fewer such steps is none.
LEAST_PERIOD_SECONDS = 10 * RESOLUTION_SECONDS
# As users give them.
FLAGS = {"requests_per_second": "rate"}


@dataclass(frozen=True, slots=True)
class Course:
    """requests_per_second: see the header. factor: of the jump, or peak over trough; at least 1.

    variation: standard deviation of the gaps over their mean; 1 is Poisson. period_seconds: of a wave.
    """

    kind: Kind
    requests_per_second: float
    duration_seconds: float
    factor: float = 4.0
    variation: float = 3.0
    period_seconds: float = DAY_SECONDS


def generated(course: Course, lengths: Lengths, seed: int) -> Trace:
    """The requests of a course. Raises OptionsError for one that cannot be."""
    _check(course)
    jump_at = course.duration_seconds * JUMP_SHARE
    rate = _RATES[course.kind](course, jump_at)
    count = math.ceil(course.duration_seconds / RESOLUTION_SECONDS)
    starts = [index * RESOLUTION_SECONDS for index in range(count)]
    windows = [
        RateWindow(start, min(start + RESOLUTION_SECONDS, course.duration_seconds), rate(start))
        for start in starts
    ]
    return arrivals_of(
        f"{course.kind} {course.requests_per_second:g}/s",
        windows,
        lengths,
        seed,
        variation=course.variation if course.kind == "gamma" else 1.0,
        step_at_seconds=jump_at if course.kind in ("step", "flash") else None,
    )


def before(course: Course, seconds: float) -> Course:
    """What a course may follow: the rate that it begins with, for so long."""
    _check(course)
    rate = _RATES[course.kind](course, course.duration_seconds * JUMP_SHARE)(0.0)
    kind: Kind = "gamma" if course.kind == "gamma" else "poisson"
    return replace(course, kind=kind, requests_per_second=rate, duration_seconds=seconds)


def _check(course: Course) -> None:
    for name in ("requests_per_second", "duration_seconds", "variation", "period_seconds"):
        if not 0 < getattr(course, name) < math.inf:
            raise OptionsError(f"{_told(course, name)} is not above 0 and finite; choose another")
    if course.duration_seconds > LONGEST_SECONDS:
        raise OptionsError(
            f"{_told(course, 'duration_seconds')} is more than {LONGEST_SECONDS:g}; choose less"
        )
    if not 1 <= course.factor < math.inf:
        raise OptionsError(f"{_told(course, 'factor')} is below 1 or not finite; choose 1 or more")
    if course.kind == "diurnal" and course.period_seconds < LEAST_PERIOD_SECONDS:
        raise OptionsError(
            f"{_told(course, 'period_seconds')} is less than {LEAST_PERIOD_SECONDS:g}, and rates are "
            f"constant for {RESOLUTION_SECONDS:g} s; choose more"
        )


def _told(course: Course, name: str) -> str:
    return f"--{FLAGS.get(name, name).replace('_', '-')}={getattr(course, name):g}"


def _steady(course: Course, jump_at: float) -> Callable[[float], float]:
    return lambda at: course.requests_per_second


def _diurnal(course: Course, jump_at: float) -> Callable[[float], float]:
    # (1 + s) / (1 - s) = factor
    swing = (course.factor - 1) / (course.factor + 1)
    turn = 2 * math.pi / course.period_seconds
    return lambda at: course.requests_per_second * (1 - swing * math.cos(turn * at))


def _step(course: Course, jump_at: float) -> Callable[[float], float]:
    return lambda at: course.requests_per_second * (course.factor if at >= jump_at else 1.0)


def _flash(course: Course, jump_at: float) -> Callable[[float], float]:
    top_at = jump_at + FLASH_RISE_SECONDS

    def rate(at: float) -> float:
        if at < jump_at:
            height = 0.0
        elif at < top_at:
            height = (at - jump_at) / FLASH_RISE_SECONDS
        else:
            height = 0.5 ** ((at - top_at) / FLASH_HALF_LIFE_SECONDS)
        return course.requests_per_second * (1 + (course.factor - 1) * height)

    return rate


_RATES: dict[Kind, Callable[[Course, float], Callable[[float], float]]] = {
    "poisson": _steady,
    "gamma": _steady,
    "diurnal": _diurnal,
    "step": _step,
    "flash": _flash,
}
