"""The engine's client against a socket that a test speaks through."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from headway_runtime.errors import EngineDeadError
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from headway_runtime.server import messages
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.request_stream import EngineDied

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# When tokens were, as the engine says.
COMPUTED_AT = 12.5
READY = messages.Ready(512, 8192, "cpu", "bfloat16", {})


class Engine:
    """The other side of one client."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(messages.ToEngine)
        self._front = b""

    async def receive(self) -> messages.ToEngine:
        async with asyncio.timeout(10):
            self._front, frame = await self._socket.recv_multipart()
        message: messages.ToEngine = self._decoder.decode(frame)
        return message

    async def send(self, message: messages.FromEngine) -> None:
        await self._socket.send_multipart((self._front, msgspec.msgpack.encode(message)))

    def close(self) -> None:
        self._context.destroy(linger=0)


@dataclasses.dataclass
class Pair:
    client: EngineClient
    engine: Engine


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A client that has said hello and been told that the engine is ready."""
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        engine = Engine(f"ipc://{folder}/engine")
        client = EngineClient(f"ipc://{folder}/engine", front=3)
        assert await engine.receive() == messages.Hello(3)
        await engine.send(READY)
        async with asyncio.timeout(10):
            await client.ready
        yield Pair(client, engine)
        client.shut_down(end_engine=False)
        engine.close()


def request(name: str) -> Request:
    return Request(name, (50,), SamplingParams(), 0.0)


def tokens(**token_ids: int) -> messages.Outputs:
    return messages.Outputs(list(token_ids), list(token_ids.values()), COMPUTED_AT, [])


async def settle(pair: Pair) -> None:
    """Everything that the engine has sent has been read."""
    asking = asyncio.ensure_future(pair.client.sample(is_draining=False))
    while not isinstance(question := await pair.engine.receive(), messages.GetSample):
        pass
    await pair.engine.send(messages.Sample(question.query_id, b"{}"))
    async with asyncio.timeout(10):
        assert await asking == b"{}"


async def test_single_tokens_are_handed_over_without_waking_the_reader(pair: Pair) -> None:
    stream = pair.client.submit([request("a"), request("b")])
    taken: list[tuple[str, int]] = []

    def take(request_id: str, token_id: int, computed_at: float) -> bool:
        assert computed_at == COMPUTED_AT
        taken.append((request_id, token_id))
        return True

    reading = asyncio.ensure_future(stream.next(take))
    await settle(pair)
    await pair.engine.send(tokens(a=1, b=2, unknown=3))
    await pair.engine.send(tokens(a=4))
    await settle(pair)
    assert taken == [("a", 1), ("b", 2), ("a", 4)]
    assert not reading.done()
    last = RequestOutput("a", (5,), FinishReason.STOP)
    await pair.engine.send(messages.Outputs(["b"], [6], COMPUTED_AT, [last]))
    async with asyncio.timeout(10):
        assert await reading == [last]
    assert taken[3:] == [("b", 6)]


async def test_a_token_that_is_not_taken_comes_as_an_event_and_nothing_overtakes_it(pair: Pair) -> None:
    stream = pair.client.submit([request("a")])
    offered: list[int] = []

    def refuse(_: str, token_id: int, computed_at: float) -> bool:
        offered.append(token_id)
        return False

    reading = asyncio.ensure_future(stream.next(refuse))
    await asyncio.sleep(0)
    # Two messages that are read in one go: the reader has not run in between.
    await pair.engine.send(tokens(a=1))
    await pair.engine.send(tokens(a=2))
    got: list[int] = []
    async with asyncio.timeout(10):
        while len(got) < 2:
            for event in await reading:
                assert isinstance(event, RequestOutput)
                got += event.token_ids
            reading = asyncio.ensure_future(stream.next(refuse))
    reading.cancel()
    assert got == [1, 2]


async def test_what_one_reader_raises_costs_the_others_nothing(pair: Pair) -> None:
    first, second = pair.client.submit([request("a")]), pair.client.submit([request("b")])
    taken: list[int] = []

    def fail(_: str, __: int, ___: float) -> bool:
        raise ValueError("a fault in one stream")

    def take(_: str, token_id: int, computed_at: float) -> bool:
        taken.append(token_id)
        return True

    failing, reading = asyncio.ensure_future(first.next(fail)), asyncio.ensure_future(second.next(take))
    await settle(pair)
    await pair.engine.send(tokens(a=1, b=2))
    with pytest.raises(ValueError, match="a fault in one stream"):
        async with asyncio.timeout(10):
            await failing
    assert taken == [2]
    reading.cancel()


async def test_an_engine_that_ends_ends_streams_and_questions(pair: Pair) -> None:
    stream = pair.client.submit([request("a")])
    reading = asyncio.ensure_future(stream.next(lambda *_: True))
    asking = asyncio.ensure_future(pair.client.state())
    await asyncio.sleep(0)
    pair.client.engine_ended("it has ended")
    async with asyncio.timeout(10):
        assert await reading == [EngineDied("it has ended")]
        with pytest.raises(EngineDeadError, match="it has ended"):
            await asking
    with pytest.raises(EngineDeadError):
        pair.client.submit([request("b")])


async def test_what_was_aborted_is_told_and_no_longer_heard(pair: Pair) -> None:
    stream = pair.client.submit([request("a"), request("b")])
    assert isinstance(await pair.engine.receive(), messages.AddRequests)
    pair.client.finish("b")
    assert await pair.engine.receive() == messages.Finish("b")
    pair.client.abort(stream)
    assert await pair.engine.receive() == messages.Abort(["a"])
    pair.client.abort(stream)  # once is enough
    await pair.engine.send(tokens(a=1, b=2))
    await settle(pair)
    assert pair.client.num_live == 0


async def test_signs_of_life_are_counted(pair: Pair) -> None:
    before = pair.client.num_heard
    pair.client.ping()
    assert await pair.engine.receive() == messages.Ping()
    assert pair.client.num_heard == before
    await pair.engine.send(messages.Pong())
    await settle(pair)
    assert pair.client.num_heard == before + 2  # and the answer that everything has been read


def test_an_output_with_anything_besides_one_token_is_sent_whole() -> None:
    """Whatever fields an output may get: one that is set must not be lost on the short way."""
    plain = RequestOutput("a", (5,))
    assert messages.is_one_token(plain)
    some: dict[str, Any] = {
        "token_ids": (5, 6),
        "finish_reason": FinishReason.STOP,
        "logprobs": (TokenLogprobs(-1.0, ()),),
        "num_cached_tokens": 1,
        "queue_seconds": 0.0,
        "prefill_seconds": 0.0,
        "prompt_logprobs": (),
    }
    fields = {field.name for field in dataclasses.fields(RequestOutput)}
    # What is wrong comes with a finish reason only.
    for name in sorted(fields - {"request_id", "computed_at", "error", "error_param"}):
        changed = dataclasses.replace(plain, **{name: some.get(name, 1)})
        assert not messages.is_one_token(changed), name
    assert not messages.is_one_token(RequestOutput("a", ()))
