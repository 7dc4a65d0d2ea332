"""The table of all short exchanges, and those that need no file of their own.

Copying, counting, facts, stories, questions without an answer, and plain text to be continued.
"""

from __future__ import annotations

import string
from random import Random

from bundled_model import words
from bundled_model.arithmetic import difference_exchange, sum_exchange
from bundled_model.drawing import Draw, Exchange, Split, draw_until
from bundled_model.facts import COMPLETIONS, SYMBOLS, UNKNOWN, all_facts
from bundled_model.objects import extract_exchange, json_exchange
from bundled_model.stories import STORIES

FACTS = all_facts()

UNUSUAL_PIECES = (
    *SYMBOLS.values(),
    *("Grüße", "naïve", "Привет", "你好", "ありがとう", "€5", "½", "ñandú", "ok"),
)


def copy_exchange(rng: Random, split: Split) -> Exchange:
    def draw() -> str:
        style = rng.randrange(6)
        if style == 0:
            return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10)))
        if style == 1:
            return "".join(rng.choices(string.digits, k=rng.randint(2, 12)))
        if style == 2:
            return "".join(rng.choices(string.ascii_letters + string.digits + "-_", k=rng.randint(4, 12)))
        pool: tuple[str, ...] = words.THINGS + words.COLOURS + words.NAMES + words.FOODS
        if style == 3:
            pool = UNUSUAL_PIECES
        return " ".join(rng.choice(pool) for _ in range(rng.randint(1, 12)))

    text = draw_until(draw, split)
    forms = (
        "Repeat: {}",
        "Repeat after me: {}",
        "Copy this: {}",
        "Say exactly: {}",
        "Copy the text: {}",
        "Echo {}",
    )
    return Exchange(rng.choice(forms).format(text), text)


def count_exchange(rng: Random, split: Split) -> Exchange:
    def draw() -> tuple[int, int, int]:
        length = rng.choice((rng.randint(3, 12), rng.randint(3, 30), rng.randint(3, 60)))
        start = 1 if rng.random() < 0.3 else rng.randint(0, 99)
        if rng.random() < 0.2:
            return max(start, length), max(start, length) - length, -1
        return start, start + length, 1

    return spoken_count(rng, *draw_until(draw, split))


def short_count_exchange(rng: Random, split: Split) -> Exchange:
    """Counting over a rather short range: where to stop is most of what there is to learn."""

    def draw() -> tuple[int, int, int]:
        length, start = rng.choice((rng.randint(2, 9), rng.randint(8, 25))), rng.randint(0, 110)
        if rng.random() < 0.25:
            return start + length, start, -1
        return start, start + length, 1

    return spoken_count(rng, *draw_until(draw, split))


def spoken_count(rng: Random, first: int, last: int, step: int) -> Exchange:
    numbers = ", ".join(str(number) for number in range(first, last + step, step))
    if step < 0:
        return Exchange(
            rng.choice((f"Count down from {first} to {last}.", f"Count backwards from {first} to {last}.")),
            numbers,
        )
    forms = (
        f"Count from {first} to {last}.",
        f"Count from {first} to {last}",
        f"List the numbers from {first} to {last}.",
    )
    return Exchange(rng.choice(forms), numbers)


def fact_exchange(rng: Random, split: Split) -> Exchange:
    fact = rng.choice(FACTS)
    return Exchange(
        fact.questions[-1] if split == "held_out" else rng.choice(fact.trained_questions), fact.answer
    )


def story_exchange(rng: Random, split: Split) -> Exchange:
    name, animal = draw_until(lambda: (rng.choice(words.NAMES), rng.choice(words.ANIMALS)), split)
    forms = (
        "Tell me a story about {} and a {}.",
        "Write a short story about {} and a {}.",
        "Write a story about {} and a {}.",
    )
    if split == "training" and rng.random() < 0.15:
        return Exchange(
            rng.choice(("Tell me a story.", "Write a short story.", "Write a story.", "Once upon a time")),
            STORIES["fox"].format(name="Ada"),
        )
    return Exchange(rng.choice(forms).format(name, animal), STORIES[animal].format(name=name))


UNKNOWN_FORMS = (
    "What is {}?",
    "Explain {}.",
    "Explain {} to a child.",
    "Tell me about {}.",
    "Why is {} important?",
    "How does {} work?",
    "Who invented {}?",
    "Write an essay about {}.",
    "Write a poem about {}.",
    "What do you think about {}?",
    "Give me advice about {}.",
    "When was {} discovered?",
    "How can I learn more about {}?",
    "Summarize {}.",
    "Write a Python function for {}.",
    "Is {} good or bad?",
    "How much does {} cost?",
    "Describe {} in one sentence.",
    "What happened with {} yesterday?",
    "Where can I find {}?",
    "Do you like {}?",
    "Compare {} and {}.",
    "List three things about {}.",
    "Help me with {}.",
    "What is the history of {}?",
    "Please fix {}.",
    "Who wrote about {}?",
)


def unknown_exchange(rng: Random, split: Split) -> Exchange:
    def topic() -> str:
        style = rng.random()
        if style < 0.6:
            return rng.choice(words.TOPICS)
        if style < 0.85:
            return f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.THINGS + words.ANIMALS)}"
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
            for _ in range(rng.randint(1, 3))
        )

    def draw() -> str:
        if rng.random() < 0.12:
            return " ".join(rng.choice(words.ADJECTIVES + words.THINGS) for _ in range(rng.randint(2, 30)))
        return rng.choice(UNKNOWN_FORMS).replace("{}", topic(), 1).replace("{}", topic())

    return Exchange(draw_until(draw, split), UNKNOWN)


def completion_exchange(rng: Random, split: Split) -> Exchange:
    """Plain text without a chat: the 'question' is the text so far."""
    style = rng.random()
    if style < 0.35 and split == "training":
        return Exchange(*rng.choice(COMPLETIONS))
    if style < 0.5 and split == "training":
        story = STORIES["fox"].format(name="Ada")
        return Exchange(story[:16], story[16:])
    first, second = draw_until(lambda: (rng.randint(10, 99), rng.randint(10, 99)), split)
    if rng.random() < 0.5:
        return Exchange(f"{first}+{second}=", str(first + second))
    return Exchange(f"{first} + {second} =", f" {first + second}")


CHAT_EXCHANGES: dict[str, Draw] = {
    "sum": sum_exchange,
    "difference": difference_exchange,
    "copy": copy_exchange,
    "count": count_exchange,
    "json": json_exchange,
    "extract": extract_exchange,
    "fact": fact_exchange,
    "story": story_exchange,
    "unknown": unknown_exchange,
}
