"""Distributions that a flag can name, for lengths, turns and think times; knows nothing of what they are for.

128                           always 128
uniform:LOW:HIGH              whole numbers included at both ends when counts are drawn
normal:MEAN:STD[:LOW:HIGH]    values outside the range are drawn again
lognormal:MEAN:STD[:LOW:HIGH] mean and standard deviation of the values, not of their logarithms
exponential:MEAN[:LOW:HIGH]
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy

from headway_bench.errors import OptionsError

Kind = Literal["fixed", "uniform", "normal", "lognormal", "exponential"]
_NUM_PARAMETERS: dict[str, int] = {"uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
_DRAWS_BEFORE_GIVING_UP = 1000
_FORMS = "128, uniform:64:256, normal:128:32[:1:512], lognormal:128:64[:1:512] or exponential:2[:0:10]"


@dataclass(frozen=True, slots=True)
class Spread:
    """One distribution; `text` is how the user wrote it, `parameters` are its own, in the order above."""

    text: str
    kind: Kind
    parameters: tuple[float, ...]
    low: float = 0.0
    high: float = math.inf

    def draw(self, random: numpy.random.Generator) -> float:
        """One value, within [low, high]."""
        for _ in range(_DRAWS_BEFORE_GIVING_UP):
            value = self._draw_once(random)
            if self.low <= value <= self.high:
                return value
        raise OptionsError(
            f"{self.text!r} hardly ever lies within {self.low:g} to {self.high:g}; widen the range"
        )

    def draw_count(self, random: numpy.random.Generator) -> int:
        """One whole number, at least 1."""
        if self.kind == "uniform":
            low, high = self.parameters
            return max(1, int(random.integers(round(low), round(high) + 1)))
        return max(1, round(self.draw(random)))

    @property
    def is_fixed(self) -> bool:
        """Whether every draw gives the same value."""
        return self.kind == "fixed"

    def _draw_once(self, random: numpy.random.Generator) -> float:
        first, second = self.parameters[0], self.parameters[-1]
        if self.kind == "fixed":
            return first
        if self.kind == "uniform":
            return float(random.uniform(first, second))
        if self.kind == "normal":
            return float(random.normal(first, second))
        if self.kind == "exponential":
            return float(random.exponential(first))
        variance_of_log = math.log1p((second / first) ** 2)
        mean_of_log = math.log(first) - variance_of_log / 2
        return float(random.lognormal(mean_of_log, math.sqrt(variance_of_log)))


def fixed(value: float) -> Spread:
    """The distribution that always gives `value`."""
    return Spread(f"{value:g}", "fixed", (value,))


def parse_spread(text: str, minimum: float = 0.0) -> Spread:
    """The distribution that `text` names; every value it can give is at least `minimum`."""
    name, *rest = text.split(":")
    try:
        numbers = tuple(float(part) for part in rest) if rest else (float(name),)
    except ValueError as error:
        raise OptionsError(f"{text!r} is no distribution; write {_FORMS}") from error
    if not all(math.isfinite(number) for number in numbers):
        raise OptionsError(f"{text!r} is not finite; write {_FORMS}")
    if not rest:
        spread = fixed(numbers[0])
    elif name in _NUM_PARAMETERS and len(rest) in _allowed_lengths(name):
        spread = _with_parameters(text, name, numbers, minimum)
    else:
        raise OptionsError(f"{text!r} is no distribution; write {_FORMS}")
    if spread.kind in ("fixed", "uniform") and spread.parameters[0] < minimum:
        raise OptionsError(f"{text!r} goes below {minimum:g}, the least that makes sense here")
    return spread


def _allowed_lengths(name: str) -> tuple[int, ...]:
    own = _NUM_PARAMETERS[name]
    return (own,) if name == "uniform" else (own, own + 2)


def _with_parameters(text: str, name: str, numbers: tuple[float, ...], minimum: float) -> Spread:
    own = numbers[: _NUM_PARAMETERS[name]]
    low, high = numbers[len(own) :] or (minimum, math.inf)
    if name == "uniform":
        low, high = own
    if low > high or low < minimum:
        raise OptionsError(f"{text!r}: the range must rise and begin at {minimum:g} or more")
    if name in ("lognormal", "exponential") and own[0] <= 0:
        raise OptionsError(f"{text!r}: the mean must be above 0")
    if name in ("normal", "lognormal") and own[1] < 0:
        raise OptionsError(f"{text!r}: the standard deviation must not be negative")
    kinds: dict[str, Kind] = {
        "uniform": "uniform",
        "normal": "normal",
        "lognormal": "lognormal",
        "exponential": "exponential",
    }
    return Spread(text, kinds[name], own, low, high)
