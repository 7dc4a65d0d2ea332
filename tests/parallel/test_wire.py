"""What crosses between ranks: data alone, compact, and nothing that is not ours."""

import os
import pickle
import socket
from array import array
from typing import Any

import pytest

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig, Envelope, Limits, ParallelConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.placement import one_rank
from headway_runtime.parallel import wire
from headway_runtime.parallel.messages import Accepted, Call, Hello
from headway_runtime.parallel.share import Range, Share, vocabulary_rows
from headway_runtime.parallel.step_batch import step_batch
from headway_runtime.request import SamplingParams


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getenv, ("HOME",)


def through(message: object) -> object:
    left, right = socket.socketpair()
    with left, right:
        wire.send(left, message)
        return wire.receive(right)


def test_data_of_this_package_comes_through() -> None:
    limits = Limits(4, 64)
    config = EngineConfig(
        "/model", "cpu", "auto", "auto", 64, 16, None, Envelope(4, 64), limits, 4, 1,
        parallel=ParallelConfig(size=2),
    )  # fmt: skip
    for message in (
        Accepted(1234, "10.0.0.1", config),
        Call("clear_blocks", (array("q", [1, 2, 3]),), is_confirmed=True),
        Call("load_adapter", (1, "name", {"rank": 8, "targets": ["q_proj"]}, None, 0.5, (1, 2))),
    ):
        assert through(message) == message


@pytest.mark.parametrize(
    "message", [Harmful(), os.getpid, Call("x", (Harmful(),)), pickle.Unpickler, EngineConfig.__init__]
)
def test_anything_else_is_refused_before_it_is_called(message: object) -> None:
    with pytest.raises(wire.BadMessageError, match="is no data of this package"):
        through(message)


def test_a_stranger_can_say_hello_and_have_nothing_imported() -> None:
    module = "headway_runtime.layers.no_such_module"
    named = f"c{module}\nThing\n.".encode()
    for body, complaint in (
        (pickle.dumps(Limits(4, 64)), r"headway_runtime\.config\.Limits, which is no data"),
        (named, r"no_such_module\.Thing, which is no data"),
    ):
        left, right = socket.socketpair()
        with left, right:
            left.sendall(wire.LENGTH.pack(len(body)) + body)
            with pytest.raises(wire.BadMessageError, match=complaint):
                wire.receive_first(right)
    left, right = socket.socketpair()
    with left, right:
        wire.send(left, hello := Hello("node", 1, 1, 5, agreed={"--max-model-len": 64, "nodes": ["a"]}))
        assert wire.receive_first(right) == hello
        wire.send(left, b"x" * wire.MOST_HELLO_BYTES)
        with pytest.raises(wire.BadMessageError, match="want at most"):
            wire.receive_first(right)


def test_nonsense_is_refused() -> None:
    with pytest.raises(wire.BadMessageError, match="cannot be read"):
        wire.decode(b"GET / HTTP/1.1\r\n")
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(wire.BadMessageError, match="a message of 1195725856 bytes"):
            wire.receive(right)


def test_an_end_is_an_end() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(wire.encode("half")[:-2])
        left.close()
        with pytest.raises(EOFError):
            wire.receive(right)


def chunk(start: int, count: int, known: int, **more: Any) -> Chunk:
    table = array("i", range(1, 200))
    tokens = list(range(1000, 1000 + known))
    return Chunk("a", tokens, start, count, table, 3, True, SamplingParams(), **more)


def test_a_step_holds_its_own_tokens_and_blocks_alone() -> None:
    batch = Batch((chunk(1999, 1, 2000), chunk(96, 64, 2000), chunk(9, 3, 10, ahead=(7, 8))), 1, 68)
    told = step_batch(batch, 16)
    assert len(told.tokens) == 68
    assert len(told.tables) == 125 + 10 + 1
    assert len(wire.encode(told)) < 1500
    for want, got in zip(batch.chunks, told.chunks, strict=True):
        assert got.tokens() == want.tokens()
        for name in ("start", "num_tokens", "num_prompt_tokens", "samples", "ahead"):
            assert getattr(got, name) == getattr(want, name), name
        assert got.block_table == want.block_table[: len(got.block_table)]


@pytest.mark.parametrize(
    ("heads", "size", "want"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
        (2, 2, [(0, 1), (1, 2)]),
    ],
)
def test_kv_heads_are_shared_out_or_held_by_neighbours(
    heads: int, size: int, want: list[tuple[int, int]]
) -> None:
    got = [Share(rank, size).of_kv_heads(heads) for rank in range(size)]
    assert got == [Range(*one) for one in want]


@pytest.mark.parametrize(("vocab_size", "size"), [(320, 2), (333, 2), (9, 4), (151936, 8), (32000, 3)])
def test_every_token_has_one_rank(vocab_size: int, size: int) -> None:
    ranges = [Share(rank, size).of_vocabulary(vocab_size) for rank in range(size)]
    assert all(len(one) == vocabulary_rows(vocab_size, size) for one in ranges)
    assert [one.first for one in ranges[1:]] == [one.last for one in ranges[:-1]]
    assert ranges[0].first == 0
    assert ranges[-1].last >= vocab_size


@pytest.mark.parametrize(
    ("fields", "size", "match"),
    [
        ({"num_attention_heads": 6, "num_kv_heads": 6}, 4, "num_attention_heads, 6, is no multiple of it"),
        ({"num_attention_heads": 12, "num_kv_heads": 3}, 4, "3 KV heads can be neither shared out"),
        ({"intermediate_size": 110}, 4, "intermediate_size, 110, is no multiple of it"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_arithmetic(
    fields: dict[str, int], size: int, match: str, checkpoint: Any
) -> None:
    from dataclasses import replace

    from headway_runtime.model_config import read_model_config

    model = replace(read_model_config(checkpoint("llama").folder), **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        one_rank(model, size)
