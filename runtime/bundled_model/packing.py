"""Rows of tokens for training: what a step sees, as a pure function of a seed.

A row is either one recall document with as many questions as fit, or short conversations one after
the other, or plain text. Tokens of answers weigh 1, all others `PROMPT_WEIGHT`: a prompt's random
words cannot be predicted and would drown the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from bundled_model.corpus import SYSTEM_PROMPTS, Message, memory_task, turn
from bundled_model.exchanges import CHAT_EXCHANGES, completion_exchange
from bundled_model.recall import ask, draw_document, with_document
from bundled_model.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN

PROMPT_WEIGHT = 0.05

# How often each kind of short exchange is drawn; harder ones more often.
KIND_SHARES = {
    "sum": 22,
    "difference": 14,
    "copy": 14,
    "count": 9,
    "json": 12,
    "extract": 4,
    "fact": 12,
    "story": 3,
    "unknown": 6,
    "memory": 4,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [rows, length + 1] and the loss weight of predicting each [rows, length]."""

    token_ids: np.ndarray
    weights: np.ndarray


class RowWriter:
    """Collects pieces of text with their weights until a row is full."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer = tokenizer
        self.wanted = length + 1
        self.token_ids: list[int] = []
        self.weights: list[float] = []

    @property
    def num_missing(self) -> int:
        return self.wanted - len(self.token_ids)

    def write(self, text: str, weight: float) -> None:
        ids = self.tokenizer.encode(text).ids
        self.token_ids += ids
        self.weights += [weight] * len(ids)

    def write_messages(self, messages: list[Message]) -> None:
        for message in messages:
            is_answer = message["role"] == "assistant"
            self.write(f"{START_OF_TURN}{message['role']}\n", PROMPT_WEIGHT)
            self.write(f"{message['content']}{END_OF_TURN}", 1.0 if is_answer else PROMPT_WEIGHT)
            self.write("\n", PROMPT_WEIGHT)


class Packer:
    """Draws rows; keeps only a cache of how many tokens a line has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.line_tokens: dict[str, int] = {}

    def batch(self, seed: str, rows: int, length: int) -> Batch:
        """Rows that depend on nothing but the arguments."""
        rng = Random(f"training/{seed}")
        token_ids = np.zeros((rows, length + 1), dtype=np.int64)
        weights = np.zeros((rows, length), dtype=np.float32)
        for row in range(rows):
            writer = RowWriter(self.tokenizer, length)
            self.fill(rng, writer)
            token_ids[row] = writer.token_ids[: length + 1]
            weights[row] = writer.weights[1 : length + 1]
        return Batch(token_ids, weights)

    def fill(self, rng: Random, writer: RowWriter) -> None:
        style = rng.random()
        if style < 0.45:
            self.fill_with_recall(rng, writer)
        elif style < 0.93:
            while writer.num_missing > 0:
                writer.write_messages(draw_conversation(rng))
        else:
            while writer.num_missing > 0:
                exchange = completion_exchange(rng, "training")
                writer.write(exchange.question, PROMPT_WEIGHT)
                writer.write(exchange.answer + END_OF_TEXT, 1.0)

    def fill_with_recall(self, rng: Random, writer: RowWriter) -> None:
        context_tokens = int((writer.wanted - 60) * rng.uniform(0.2, 0.85))
        document = draw_document(rng, context_tokens, self.count_tokens)
        is_first = True
        while writer.num_missing > 0:
            exchange = ask(rng, rng.choice(document.pairs), value_only=rng.random() < 0.3)
            messages = turn(exchange)
            if is_first:
                messages = [*with_document(rng, document, exchange.question), messages[1]]
                is_first = False
            writer.write_messages(messages)

    def count_tokens(self, line: str) -> int:
        if line not in self.line_tokens:
            self.line_tokens[line] = len(self.tokenizer.encode(line).ids)
        return self.line_tokens[line]


def draw_conversation(rng: Random) -> list[Message]:
    """One to three exchanges, sometimes after a system message."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choices(tuple(KIND_SHARES), tuple(KIND_SHARES.values()))[0]
        if kind == "memory":
            task = memory_task(rng)
            messages += [*task.prompt_messages, {"role": "assistant", "content": task.answer}]
        else:
            messages += turn(CHAT_EXCHANGES[kind](rng, "training"))
    return messages
