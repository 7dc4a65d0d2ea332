"""What is asked: the n-th conversation of a load, whole before it is begun. Knows neither clock nor network.

Everything is drawn from the seed, the number of the point in a sweep and the conversation's own number, so
that a conversation is the same however the load around it goes, and no point of a sweep finds the prompts of
another in the server's cache. What is meant to be shared (prefixes, a trace's blocks) is shared within a
point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy

from headway_bench.dataset import Exchange
from headway_bench.prompts import Prompt, Row, Writer, draw_row
from headway_bench.spread import Spread
from headway_traces import TraceRequest


class Stream(IntEnum):
    """What a random stream is for; its number is part of the stream's seed."""

    ARRIVALS = 1
    SHAPES = 2
    CONTENTS = 3
    PREFIXES = 4
    BLOCKS = 5
    CHECKS = 6
    BOOTSTRAP = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `input_tokens` is what its own message was made to have, None where it is text as found;
    no first message is shorter than what the server adds to it and one token more.

    `think_seconds` pass between the answer before it and this turn.
    """

    prompt: Prompt
    input_tokens: int | None
    output_tokens: int
    think_seconds: float = 0.0


Conversation = tuple[Turn, ...]
"""Its turns, one after the other."""

Workload = Callable[[int], Conversation]
"""The n-th conversation, n from 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What synthetic conversations are like. The prefix comes before the input of the first turn."""

    input_length: Spread
    output_length: Spread
    turns: Spread
    think_seconds: Spread
    num_prefixes: int = 0
    prefix_length: int = 0


def random_stream(*seed: int) -> numpy.random.Generator:
    """The generator of one purpose."""
    return numpy.random.default_rng(list(seed))


def synthetic(shape: Shape, writer: Writer, overhead_tokens: int, seed: int, point: int) -> Workload:
    """Random words of the lengths asked; `overhead_tokens` is what the server adds to a first message."""

    def conversation(number: int) -> Conversation:
        random = random_stream(seed, point, Stream.SHAPES, number)
        turns = []
        for turn in range(shape.turns.draw_count(random)):
            wanted = shape.input_length.draw_count(random)
            if turn == 0:
                wanted = max(wanted, overhead_tokens + 1)
            length = wanted if turn else wanted - overhead_tokens
            row = draw_row(
                writer.size, writer.num_symbols(length), (seed, point, Stream.CONTENTS, number, turn)
            )
            if turn == 0 and shape.num_prefixes:
                row = numpy.concatenate([prefix(int(random.integers(shape.num_prefixes))), row])
                wanted += shape.prefix_length
            output_tokens = shape.output_length.draw_count(random)
            think_seconds = shape.think_seconds.draw(random) if turn else 0.0
            turns.append(Turn(writer.write(row), wanted, output_tokens, think_seconds))
        return tuple(turns)

    def prefix(number: int) -> Row:
        length = writer.num_symbols(shape.prefix_length)
        return draw_row(writer.size, length, (seed, point, Stream.PREFIXES, number))

    return conversation


def from_trace(
    requests: Sequence[TraceRequest],
    block_tokens: int,
    writer: Writer,
    overhead_tokens: int,
    seed: int,
    point: int,
) -> Workload:
    """The trace's lengths, from its first request again when it ends; equal hash ids give equal blocks."""

    def conversation(number: int) -> Conversation:
        request = requests[number % len(requests)]
        wanted = max(request.input_tokens, overhead_tokens + 1)
        length = writer.num_symbols(wanted - overhead_tokens)
        blocks = [
            draw_row(writer.size, writer.num_symbols(block_tokens), (seed, point, Stream.BLOCKS, hash_id))
            for hash_id in request.hash_ids
        ]
        known = sum(len(block) for block in blocks)
        if known < length:
            blocks.append(draw_row(writer.size, length - known, (seed, point, Stream.CONTENTS, number)))
        row = numpy.concatenate(blocks)[:length]
        return (Turn(writer.write(row), wanted, request.output_tokens),)

    return conversation


def from_dataset(
    conversations: Sequence[Sequence[Exchange]],
    shape: Shape,
    output_length: Spread | None,
    count: Callable[[str], int],
    seed: int,
    point: int,
) -> Workload:
    """The data set's questions in a random order; answers as long as the data set's unless told otherwise."""
    order = random_stream(seed, point, Stream.CONTENTS).permutation(len(conversations))

    def conversation(number: int) -> Conversation:
        random = random_stream(seed, point, Stream.SHAPES, number)
        exchanges = conversations[order[number % len(order)]][: shape.turns.draw_count(random)]
        return tuple(
            Turn(
                exchange.question,
                None,
                max(1, count(exchange.answer)) if output_length is None else output_length.draw_count(random),
                shape.think_seconds.draw(random) if turn else 0.0,
            )
            for turn, exchange in enumerate(exchanges)
        )

    return conversation
