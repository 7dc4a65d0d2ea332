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

from bundled_model.arithmetic import (
    plain_arithmetic_exchange,
    shown_difference_exchange,
    shown_sum_exchange,
)
from bundled_model.corpus import SYSTEM_PROMPTS, Message, memory_task, turn
from bundled_model.drawing import Draw
from bundled_model.exchanges import CHAT_EXCHANGES, completion_exchange, short_count_exchange
from bundled_model.recall import ask, draw_document, draw_table, with_document
from bundled_model.recipe import RowMix
from bundled_model.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN

PROMPT_WEIGHT = 0.05

DRAWS: dict[str, Draw] = {
    **CHAT_EXCHANGES,
    "short count": short_count_exchange,
    "shown sum": shown_sum_exchange,
    "shown difference": shown_difference_exchange,
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

    def batch(self, seed: str, rows: int, length: int, mix: RowMix) -> Batch:
        """Rows that depend on nothing but the arguments."""
        rng = Random(f"training/{seed}")
        token_ids = np.zeros((rows, length + 1), dtype=np.int64)
        weights = np.zeros((rows, length), dtype=np.float32)
        for row in range(rows):
            writer = RowWriter(self.tokenizer, length)
            self.fill(rng, writer, mix)
            token_ids[row] = writer.token_ids[: length + 1]
            weights[row] = writer.weights[1 : length + 1]
        return Batch(token_ids, weights)

    def fill(self, rng: Random, writer: RowWriter, mix: RowMix) -> None:
        style = rng.random()
        if style < mix.recall:
            self.fill_with_recall(rng, writer, mix)
        elif style < 1.0 - mix.plain - mix.sums:
            while writer.num_missing > 0:
                writer.write_messages(draw_conversation(rng, mix))
        else:
            is_arithmetic = style < 1.0 - mix.plain
            while writer.num_missing > 0:
                if is_arithmetic:
                    exchange = plain_arithmetic_exchange(rng, "training", mix.tight_sums)
                else:
                    exchange = completion_exchange(rng, "training")
                writer.write(exchange.question, PROMPT_WEIGHT)
                writer.write(exchange.answer + END_OF_TEXT, 1.0)

    def fill_with_recall(self, rng: Random, writer: RowWriter, mix: RowMix) -> None:
        context_tokens = int((writer.wanted - 60) * rng.uniform(mix.least_context, mix.most_context))
        is_table = mix.tables > 0.0 and rng.random() < mix.tables
        draw = draw_table if is_table else draw_document
        document = draw(rng, context_tokens, self.count_tokens)
        unasked = rng.sample(document.pairs, len(document.pairs)) if mix.asks_once else []
        is_first = True
        while writer.num_missing > 0:
            if mix.asks_once and not unasked:
                writer.write_messages(draw_conversation(rng, mix))
                continue
            pair = unasked.pop() if mix.asks_once else rng.choice(document.pairs)
            exchange = ask(rng, pair, value_only=rng.random() < mix.value_only)
            messages = turn(exchange)
            if is_first:
                messages = [*with_document(rng, document, exchange.question), messages[1]]
                is_first = False
            writer.write_messages(messages)

    def count_tokens(self, line: str) -> int:
        if line not in self.line_tokens:
            self.line_tokens[line] = len(self.tokenizer.encode(line).ids)
        return self.line_tokens[line]


def draw_conversation(rng: Random, mix: RowMix) -> list[Message]:
    """One to three exchanges, sometimes after a system message."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choices(tuple(mix.kinds), tuple(mix.kinds.values()))[0]
        if kind == "memory":
            task = memory_task(rng)
            messages += [*task.prompt_messages, {"role": "assistant", "content": task.answer}]
        else:
            messages += turn(DRAWS[kind](rng, "training"))
    return messages
