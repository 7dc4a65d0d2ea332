"""What a flag's text may be: integers in a range, positive numbers, sizes. For argparse's `type`."""

import argparse
import math
import re
from collections.abc import Callable

SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class integer:  # noqa: N801 - reads as the type of an argument
    """An integer within a range."""

    def __init__(self, low: int, high: int | None = None) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        bounds = f"at least {self._low}" if self._high is None else f"from {self._low} to {self._high}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer; give {bounds}") from None
        if value < self._low or (self._high is not None and value > self._high):
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give {bounds}")
        return value


class tokens:  # noqa: N801 - reads as the type of an argument
    """A number of tokens, as vLLM writes it: 8192, 8k (8000), 8K (8192), 1.5k; units of thousands are small
    letters, those of 1024 capitals, and only those of thousands take fractions."""

    def __init__(self, low: int) -> None:
        self._bounds = integer(low)

    def __call__(self, text: str) -> int:
        match = re.fullmatch(r"(\d+)([KMGT])|(\d+(?:\.\d+)?)([kmgt])", text)
        if match is None:
            return self._bounds(text)
        if match[2] is not None:
            return self._bounds(str(int(match[1]) * 1024 ** (1 + "KMGT".index(match[2]))))
        return self._bounds(str(round(float(match[3]) * 1000 ** (1 + "kmgt".index(match[4])))))


class number:  # noqa: N801 - reads as the type of an argument
    """A number for which `is_in_range` holds, which `wanted` says in words. Never NaN; infinity where
    `takes_infinity`."""

    def __init__(
        self, is_in_range: Callable[[float], bool], wanted: str, *, takes_infinity: bool = False
    ) -> None:
        self._is_in_range, self._wanted, self._takes_infinity = is_in_range, wanted, takes_infinity

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number; give {self._wanted}") from None
        is_number = math.isfinite(value) or (self._takes_infinity and not math.isnan(value))
        if not (is_number and self._is_in_range(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give {self._wanted}")
        return value


any_number = number(lambda value: True, "a finite number")
positive = number(lambda value: value > 0, "a number above 0")
not_negative = number(lambda value: value >= 0, "0 or more")
# Of memory or a disk, in GiB, so that its bytes are a number that systems can count to.
gibibytes = number(lambda value: 0 < value <= 2**33, f"a number above 0, at most {2**33}")
# A part of a whole: not nothing of it, or nothing too.
share = number(lambda value: 0 < value <= 1, "a number above 0, at most 1")
share_or_none = number(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def size(text: str) -> int:
    """Bytes as Kubernetes quantities write them: 512Mi, 4G, 1073741824; a final B is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*?)B?", text)
    if match is None or match[2] not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or e.g. 512Mi or 4G")
    value = int(min(float(match[1]) * SIZE_UNITS[match[2]], 2.0**64))
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is more bytes than systems count to; give less than 8Ei")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; give at least 1 byte")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Positive integers between commas, as `1,2,8`; each once, ascending."""
    read = integer(1)
    return tuple(sorted({read(part.strip()) for part in text.strip("[]()").split(",") if part.strip()}))
