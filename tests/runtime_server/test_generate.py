"""A response against connections that misbehave in ways a real socket is slow to show."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from headway_runtime.choice import Choice, TextRules
from headway_runtime.request import Request, RequestOutput, SamplingParams
from headway_runtime.server import generate
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.generate import Generation, GenerationResponse
from headway_runtime.server.log import AccessEntry
from headway_runtime.server.prompts import EncodedPrompt, Prepared
from headway_runtime.server.request_stream import RequestStream
from headway_runtime.server.responses import AnswerHead, CompletionFormat
from headway_runtime.server.turnstile import Turnstile
from headway_runtime.tokenizer import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class OneTokenClient:
    """An engine client whose requests get one token, and then nothing more."""

    def __init__(self) -> None:
        self.given_up: list[RequestStream] = []
        self.ttft_seconds: list[float] = []

    def submit(self, requests: list[Request]) -> RequestStream:
        stream = RequestStream(frozenset(one.request_id for one in requests), Turnstile(per_turn=4))
        stream.push(RequestOutput(requests[0].request_id, (50,)))
        return stream

    def abort(self, stream: RequestStream) -> None:
        self.given_up.append(stream)

    def report_first_byte(self, ttft_seconds: float, delivery_seconds: float | None) -> None:
        assert delivery_seconds is None, "this engine does not say how long it computed"
        self.ttft_seconds.append(ttft_seconds)


@pytest.fixture
def generation(byte_level_tokenizer: Tokenizer) -> Generation:
    vocabulary = Vocabulary(byte_level_tokenizer)
    request = Request("r", (50,), SamplingParams(max_tokens=5), 0.0)
    return Generation(
        client=cast("EngineClient", OneTokenClient()),
        prepared=Prepared([request], [EncodedPrompt((50,), "prompt")], 1, 1),
        choices={"r": Choice(0, "r", vocabulary, TextRules())},
        answer=CompletionFormat(AnswerHead("cmpl-1", "tiny", vocabulary)),
        received_at=0.0,
        log=AccessEntry("id", "POST", "/v1/completions", 0),
        wants_stream=True,
        wants_usage_chunk=False,
    )


async def forever(*_: object) -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_reads_nothing_is_given_up(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "WRITE_TIMEOUT_SECONDS", 0.05)
    started = []

    async def send(message: Any) -> None:
        started.append(message["type"])
        if message["type"] == "http.response.body":
            await forever()

    await GenerationResponse(generation)({}, forever, send)
    client = cast("OneTokenClient", generation.client)
    assert started == ["http.response.start", "http.response.body"]
    assert generation.log.outcome == "client_stalled"
    assert len(client.given_up) == 1
    assert client.ttft_seconds == [], "its first byte was never written"


async def test_a_client_that_leaves_is_noticed_while_nothing_is_written(generation: Generation) -> None:
    written = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.set()

    async def receive() -> Any:
        await written.wait()
        return {"type": "http.disconnect"}

    async with asyncio.timeout(5):
        await GenerationResponse(generation)({}, receive, send)
    assert generation.log.outcome == "client_gone"
    assert (generation.log.generated_tokens, generation.log.prompt_tokens) == (1, 1)
    assert len(cast("OneTokenClient", generation.client).given_up) == 1


async def test_a_server_that_is_cancelled_gives_its_requests_up(generation: Generation) -> None:
    written = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.set()

    task = asyncio.ensure_future(GenerationResponse(generation)({}, forever, send))
    await written.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(cast("OneTokenClient", generation.client).given_up) == 1
