"""Key-value recall: documents of many small statements, and questions about single ones.

A document's keys are unique, so that each question has one answer, which stands in one line of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bundled_model import words
from bundled_model.drawing import Exchange

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Phrasing:
    """One way to state, to ask for and to answer a pair; `{k}` is the key, `{v}` the value."""

    line: str
    questions: tuple[str, ...]
    answer: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


def _numbers() -> tuple[str, ...]:
    return tuple(str(number) for number in range(10, 1000))


PHRASINGS = (
    Phrasing(
        "The code of the {k} is {v}.",
        ("What is the code of the {k}?", "Tell me the code of the {k}."),
        "The code of the {k} is {v}.",
        words.THINGS,
        _numbers(),
    ),
    Phrasing(
        "The {k} is in {v}.",
        ("Where is the {k}?", "In which city is the {k}?"),
        "The {k} is in {v}.",
        words.THINGS,
        words.PLACES,
    ),
    Phrasing(
        "The colour of the {k} is {v}.",
        ("What is the colour of the {k}?", "Which colour has the {k}?"),
        "The colour of the {k} is {v}.",
        words.THINGS,
        words.COLOURS,
    ),
    Phrasing(
        "{k} likes {v}.",
        ("What does {k} like?", "Tell me what {k} likes."),
        "{k} likes {v}.",
        words.NAMES,
        words.FOODS,
    ),
    Phrasing(
        "- {k}: {v}",
        ("What is the value of {k}?", "Give me the value of {k}."),
        "The value of {k} is {v}.",
        words.THINGS,
        _numbers() + words.COLOURS + words.ANIMALS,
    ),
    Phrasing(
        "{k} = {v}",
        ("What is the value of {k}?", "Look up {k}."),
        "The value of {k} is {v}.",
        words.THINGS,
        _numbers(),
    ),
)


# Rows of a table: the value follows its key at once, so that one step of looking back finds it.
TABLE_PHRASINGS = (
    Phrasing(
        "{k} {v}",
        ("What is the full name of {k}?", "Give me the row of {k}."),
        "{k} {v}",
        words.NAMES,
        words.PLACES,
    ),
    Phrasing(
        "{k}{v}",
        ("What is the label of the {k}?", "Give me the row of {k}."),
        "{k}{v}",
        words.THINGS,
        _numbers(),
    ),
    Phrasing(
        "{k} {v}",
        ("Which colour has the {k}?", "Give me the row of {k}."),
        "{k} {v}",
        words.THINGS,
        words.COLOURS,
    ),
    Phrasing(
        "{k} {v}",
        ("Which animal is with the {k}?", "Give me the row of {k}."),
        "{k} {v}",
        words.THINGS,
        words.ANIMALS,
    ),
)


@dataclass(frozen=True, slots=True)
class Pair:
    phrasing: Phrasing
    key: str
    value: str

    @property
    def line(self) -> str:
        return self.phrasing.line.format(k=self.key, v=self.value)


@dataclass(frozen=True, slots=True)
class Document:
    """Lines in order, and the pairs that can be asked for."""

    lines: tuple[str, ...]
    pairs: tuple[Pair, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def draw_document(rng: Random, context_tokens: int, count_tokens: CountTokens) -> Document:
    """A document of at least `context_tokens` tokens, in one phrasing or a mixture of them."""
    phrasings = PHRASINGS if rng.random() < 0.3 else (rng.choice(PHRASINGS),)
    filler_share = rng.choice((0.0, 0.0, 0.3))
    unused = {keys: rng.sample(keys, len(keys)) for keys in (words.THINGS, words.NAMES)}
    lines: list[str] = []
    pairs: list[Pair] = []
    num_tokens = 0
    while num_tokens < context_tokens:
        phrasing = rng.choice(phrasings)
        keys = unused[phrasing.keys]
        if keys and (not pairs or rng.random() >= filler_share):
            pair = Pair(phrasing, keys.pop(), rng.choice(phrasing.values))
            pairs.append(pair)
            lines.append(pair.line)
        else:
            lines.append(filler_line(rng))
        num_tokens += count_tokens(lines[-1]) + 1
    return Document(tuple(lines), tuple(pairs))


def draw_table(rng: Random, context_tokens: int, count_tokens: CountTokens) -> Document:
    """A table of at least `context_tokens` tokens, with sentences between its rows."""
    phrasing = rng.choice(TABLE_PHRASINGS)
    keys = rng.sample(phrasing.keys, len(phrasing.keys))
    filler_share = rng.choice((0.0, 0.2, 0.5))
    lines: list[str] = []
    pairs: list[Pair] = []
    num_tokens = 0
    while num_tokens < context_tokens or not pairs:
        if keys and rng.random() >= filler_share:
            pairs.append(Pair(phrasing, keys.pop(), rng.choice(phrasing.values)))
            lines.append(pairs[-1].line)
        else:
            lines.append(filler_line(rng))
        num_tokens += count_tokens(lines[-1]) + 1
    rng.shuffle(lines)
    return Document(tuple(lines), tuple(pairs))


def filler_line(rng: Random) -> str:
    """A sentence that no question asks about."""
    first, second = rng.choice(words.ADJECTIVES), rng.choice(words.ADJECTIVES)
    return rng.choice(
        (
            f"It was a {first} and {second} day.",
            f"The {rng.choice(words.ANIMALS)} was {first}.",
            f"We had {first} weather and {second} wind.",
        )
    )


def ask(rng: Random, pair: Pair, *, value_only: bool) -> Exchange:
    """A question about one pair; with `value_only` the answer is the bare value."""
    question = rng.choice(pair.phrasing.questions).format(k=pair.key)
    if value_only:
        return Exchange(f"{question} Answer with the value only.", pair.value)
    return Exchange(question, pair.phrasing.answer.format(k=pair.key, v=pair.value))


def with_document(rng: Random, document: Document, question: str) -> list[dict[str, str]]:
    """The messages that give the document and ask the question, in one of several arrangements."""
    arrangement = rng.randrange(6)
    if arrangement == 0:
        return [{"role": "system", "content": document.text}, {"role": "user", "content": question}]
    if arrangement == 1:
        return [
            {"role": "user", "content": f"Read this:\n{document.text}"},
            {"role": "assistant", "content": "I have read it."},
            {"role": "user", "content": question},
        ]
    introduction = rng.choice(("", "Read this:\n", "Here are some facts.\n", "Remember:\n"))
    return [{"role": "user", "content": f"{introduction}{document.text}\n\n{question}"}]
