"""Small JSON objects: written from a list of fields, or extracted from a sentence."""

from __future__ import annotations

import json
from random import Random

from bundled_model import words
from bundled_model.drawing import Exchange, Split, draw_until


def json_exchange(rng: Random, split: Split) -> Exchange:
    def draw() -> tuple[tuple[str, str | int | bool], ...]:
        pools: dict[str, str | int | bool] = {
            "name": rng.choice(words.NAMES),
            "age": rng.randint(1, 99),
            "city": rng.choice(words.PLACES),
            "color": rng.choice(words.COLOURS),
            "job": rng.choice(words.JOBS),
            "item": rng.choice(words.THINGS),
            "count": rng.randint(0, 999),
            "price": rng.randint(1, 99),
            "active": rng.random() < 0.5,
            "animal": rng.choice(words.ANIMALS),
        }
        if rng.random() < 0.4:
            fields = ["name", *rng.sample(("age", "city", "job"), rng.randint(1, 3))]
        else:
            fields = rng.sample(tuple(pools), rng.randint(1, 4))
        return tuple((field, pools[field]) for field in fields)

    fields = draw_until(draw, split)
    spoken = [
        f"{field} {str(value).lower() if isinstance(value, bool) else value}" for field, value in fields
    ]
    listed = " and ".join((", ".join(spoken[:-1]), spoken[-1])) if len(spoken) > 1 else spoken[0]
    forms = (
        f"Give a JSON object with {listed}.",
        f"Write a JSON object with {listed}.",
        f"Return JSON with {listed}.",
        f"JSON: {', '.join(spoken)}",
        f"Create a JSON object with {listed}.",
    )
    return Exchange(rng.choice(forms), json.dumps(dict(fields)))


def extract_exchange(rng: Random, split: Split) -> Exchange:
    """A sentence about a person, to be turned into a JSON object with fixed fields."""
    name, age, city = draw_until(
        lambda: (rng.choice(words.NAMES), rng.randint(1, 99), rng.choice(words.PLACES)), split
    )
    sentences = (
        f"{name} is {age} years old and lives in {city}.",
        f"{name} from {city} is {age}.",
        f"In {city} lives {name}, who is {age} years old.",
    )
    forms = ("Extract name, age and city as JSON: {}", "Write as JSON with name, age and city: {}")
    answer = json.dumps({"name": name, "age": age, "city": city})
    return Exchange(rng.choice(forms).format(rng.choice(sentences)), answer)
