"""The public face of the tasks: draw held-out ones by kind and seed, and say whether an answer is right.

Other tests judge quantization, caching, speculation and structured output with these two functions,
so a task is always held out from training, and the same arguments give the same tasks for ever.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from random import Random

from bundled_model import words
from bundled_model.drawing import Exchange
from bundled_model.exchanges import CHAT_EXCHANGES, completion_exchange
from bundled_model.recall import CountTokens, ask, draw_document, draw_table, with_document

Message = dict[str, str]

RECALL_KINDS = ("recall", "passage")
KINDS = (*RECALL_KINDS, *CHAT_EXCHANGES, "memory", "completion")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Headway, a small test model.",
    "Answer briefly.",
    "Be kind and short.",
    "You answer questions.",
    "You are a careful assistant that answers in one line.",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with one right answer.

    A chat task has `prompt_messages`; a task of kind "completion" has `prompt_text` instead, to be
    continued as plain text.
    """

    prompt_messages: list[Message]
    answer: str
    kind: str
    prompt_text: str | None = field(default=None)


def sample_tasks(
    kind: str,
    seed: int,
    count: int,
    context_tokens: int | None = None,
    count_tokens: CountTokens | None = None,
) -> list[Task]:
    """`count` held-out tasks of one kind.

    `context_tokens` is the least length of the document of a recall or passage task (256 unless
    given); the other kinds have no document and refuse it. `count_tokens` defaults to the bundled tokenizer.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is not known; use one of {', '.join(KINDS)}")
    if context_tokens is not None and kind not in RECALL_KINDS:
        raise ValueError(f"context_tokens: {context_tokens!r} makes no sense for {kind!r}; leave it out")
    rng = Random(f"held-out/{kind}/{seed}/{context_tokens}")
    if kind in RECALL_KINDS:
        counter = count_tokens or bundled_token_counter()
        return [recall_tasks(rng, kind, 1, context_tokens or 256, counter)[0] for _ in range(count)]
    if kind == "memory":
        return [memory_task(rng) for _ in range(count)]
    if kind == "completion":
        exchanges = [completion_exchange(rng, "held_out") for _ in range(count)]
        return [Task([], exchange.answer, kind, exchange.question) for exchange in exchanges]
    return [chat_task(rng, kind, CHAT_EXCHANGES[kind](rng, "held_out")) for _ in range(count)]


def sample_shared_document(
    seed: int, count: int, context_tokens: int, count_tokens: CountTokens | None = None
) -> list[Task]:
    """`count` recall tasks over one document, which stands first in every prompt: for prefix caching."""
    rng = Random(f"held-out/shared/{seed}/{context_tokens}")
    return recall_tasks(rng, "recall", count, context_tokens, count_tokens or bundled_token_counter())


def is_right(task: Task, text: str) -> bool:
    """Whether `text` (what the model generated, end token dropped) answers the task."""
    given, want = text.strip(), task.answer.strip()
    if task.kind in RECALL_KINDS:
        return last_word(given) == last_word(want)
    if task.kind in ("sum", "difference"):
        return last_number(given) == last_number(want)
    if task.kind in ("json", "extract"):
        return is_same_json(given, want)
    return given == want


def recall_tasks(
    rng: Random, kind: str, count: int, context_tokens: int, count_tokens: CountTokens
) -> list[Task]:
    """Questions about one table (kind "recall") or one text of sentences (kind "passage")."""
    draw = draw_table if kind == "recall" else draw_document
    document = draw(rng, context_tokens, count_tokens)
    arrangement = rng.random()
    tasks = []
    for _ in range(count):
        exchange = ask(rng, rng.choice(document.pairs), value_only=False)
        messages = with_document(Random(arrangement), document, exchange.question)
        tasks.append(Task(messages, exchange.answer, kind))
    return tasks


def chat_task(rng: Random, kind: str, exchange: Exchange) -> Task:
    messages = [{"role": "user", "content": exchange.question}]
    if rng.random() < 0.25:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return Task(messages, exchange.answer, kind)


def memory_task(rng: Random) -> Task:
    """A conversation that tells something, speaks of other things, and asks for it again."""
    told, asked, pool = rng.choice(
        (
            (
                ("My name is {}.", "Nice to meet you, {}."),
                ("What is my name?", "Your name is {}."),
                words.NAMES,
            ),
            (("I live in {}.", "I hope you like {}."), ("Where do I live?", "You live in {}."), words.PLACES),
            (
                ("I like {}.", "I will remember that you like {}."),
                ("What do I like?", "You like {}."),
                words.FOODS,
            ),
        )
    )
    value = rng.choice(pool)
    messages = turn(Exchange(told[0].format(value), told[1].format(value)))
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice(("sum", "difference", "fact", "unknown"))
        messages += turn(CHAT_EXCHANGES[kind](rng, "training"))
    messages.append({"role": "user", "content": asked[0]})
    return Task(messages, asked[1].format(value), "memory")


def turn(exchange: Exchange) -> list[Message]:
    return [{"role": "user", "content": exchange.question}, {"role": "assistant", "content": exchange.answer}]


def last_word(text: str) -> str:
    parts = text.rstrip(".").split()
    return parts[-1] if parts else ""


def last_number(text: str) -> int | None:
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def is_same_json(given: str, want: str) -> bool:
    try:
        parsed: object = json.loads(given)
    except ValueError:
        return False
    want_parsed: object = json.loads(want)
    return parsed == want_parsed


def bundled_token_counter() -> CountTokens:
    """Counts tokens with the tokenizer that is in the package."""
    from bundled_model.tokenizer import load_bundled_tokenizer

    tokenizer = load_bundled_tokenizer()
    counts: dict[str, int] = {}

    def count_tokens(text: str) -> int:
        if text not in counts:
            counts[text] = len(tokenizer.encode(text).ids)
        return counts[text]

    return count_tokens
