"""What an exchange is, and the border between what is trained on and what is kept for judging.

The border depends on the content alone, so that training and judging can never see the same sum,
range or object, whatever the seeds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

HELD_OUT_ONE_IN = 8
# Which side of the held-out border content is drawn from.
Split = Literal["training", "held_out"]
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its only right answer."""

    question: str
    answer: str


def is_held_out(*content: object) -> bool:
    """Whether this content is kept for judging; depends on nothing but the content."""
    return zlib.crc32(repr(content).encode()) % HELD_OUT_ONE_IN == 0


def draw_until(draw: Callable[[], Drawn], split: Split) -> Drawn:
    """Draw until the content is on the wanted side of the held-out border."""
    while True:
        drawn = draw()
        if is_held_out(drawn) == (split == "held_out"):
            return drawn


Draw = Callable[[Random, Split], Exchange]
