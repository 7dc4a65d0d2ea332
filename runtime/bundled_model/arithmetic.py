"""Sums and differences of numbers up to 99, asked for in several ways."""

from __future__ import annotations

import re
from random import Random

from bundled_model.drawing import Exchange, Split, draw_until


def sum_exchange(rng: Random, split: Split) -> Exchange:
    lowest = 0 if rng.random() < 0.2 and split == "training" else 10
    first, second = draw_until(lambda: (rng.randint(lowest, 99), rng.randint(lowest, 99)), split)
    return arithmetic_exchange(rng, first, "+", second, first + second)


def difference_exchange(rng: Random, split: Split) -> Exchange:
    def draw() -> tuple[int, int]:
        pair = rng.randint(10, 99), rng.randint(0, 99)
        return max(pair), min(pair)

    first, second = draw_until(draw, split)
    return arithmetic_exchange(rng, first, "-", second, first - second)


def arithmetic_exchange(rng: Random, first: int, sign: str, second: int, result: int) -> Exchange:
    written = f"{first} {sign} {second}"
    if rng.random() < 0.4:
        short_forms = (
            f"{first}{sign}{second}=",
            f"{first}{sign}{second}",
            f"{written} =",
            f"What is {written}? Answer with the number only.",
        )
        return Exchange(rng.choice(short_forms), str(result))
    spoken = f"{first} {'plus' if sign == '+' else 'minus'} {second}"
    command = f"Add {first} and {second}." if sign == "+" else f"Subtract {second} from {first}."
    forms = (
        f"What is {written}?",
        f"What is {spoken}?",
        f"Calculate {written}.",
        f"How much is {written}?",
        f"Please compute {written}.",
        command,
    )
    return Exchange(rng.choice(forms), f"{written} = {result}")


def shown_sum_exchange(rng: Random, split: Split) -> Exchange:
    """A sum whose answer always repeats the operands: one form to learn instead of many."""
    return shown(sum_exchange(rng, split), "+")


def shown_difference_exchange(rng: Random, split: Split) -> Exchange:
    return shown(difference_exchange(rng, split), "-")


def shown(exchange: Exchange, sign: str) -> Exchange:
    """The same exchange with the operands in its answer."""
    if sign in exchange.answer:
        return exchange
    first, second = (int(number) for number in re.findall(r"\d+", exchange.question)[:2])
    return Exchange(exchange.question, f"{first} {sign} {second} = {exchange.answer}")


def plain_arithmetic_exchange(rng: Random, split: Split, tight_share: float) -> Exchange:
    """A sum or difference as plain text; with the share `tight_share` written without spaces."""
    sign = rng.choice("+-")
    first, second = draw_until(lambda: (rng.randint(10, 99), rng.randint(10, 99)), split)
    if sign == "-" and first < second:
        return plain_arithmetic_exchange(rng, split, tight_share)
    result = first + second if sign == "+" else first - second
    if rng.random() < tight_share:
        return Exchange(f"{first}{sign}{second}=", str(result))
    return Exchange(f"{first} {sign} {second} =", f" {result}")
