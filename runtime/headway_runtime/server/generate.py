"""One generation, from engine requests to a finished HTTP response, streamed or whole.

Owns the order of events: nothing is written before the engine has accepted every choice and brought the
first token, so that a refusal still is a status of its own; all chunks of one step leave in one write; a
client that goes away takes its requests with it; every stream ends as its format says, or with an error.

TTFT is reported per choice: for a stream when its first chunk has been written, for a whole answer when its
first token reached this process (its first byte says when it was done, not when it began).
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from headway_runtime.choice import Choice, Delta
from headway_runtime.request import FinishReason, Grammar, RequestOutput, SamplingParams
from headway_runtime.sampling_params import shown
from headway_runtime.server.choices import whole_choices
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.error_codes import HttpCode
from headway_runtime.server.http_errors import HttpError, overloaded
from headway_runtime.server.http_protocol import WRITER_KEY, ChunkWriter
from headway_runtime.server.log import AccessEntry
from headway_runtime.server.long_answers import send_in_pieces
from headway_runtime.server.messages import Refused
from headway_runtime.server.prompts import Prepared
from headway_runtime.server.request_stream import EngineDied, RequestStream, StreamEvent
from headway_runtime.server.request_times import RequestTimes
from headway_runtime.server.responses import AnswerFormat, Usage, WholeChoice
from headway_runtime.server.structured_fields import as_sent

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# How long a client may leave what was written unread before it counts as gone.
WRITE_TIMEOUT_SECONDS = 120.0
# Tell a gateway how many of the requests here a new one would overtake, and how many run at once.
LATE_SHARE = b"x-headway-late-share"
MAX_NUM_SEQS = b"x-headway-max-num-seqs"
# With so many log-probabilities the JSON of an answer takes more than a few milliseconds.
MANY_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class Generation:
    """Everything that answering takes. choices: by engine request id."""

    client: EngineClient
    prepared: Prepared
    choices: dict[str, Choice]
    answer: AnswerFormat
    received_at: float
    log: AccessEntry
    wants_stream: bool
    wants_usage_chunk: bool
    wants_timings: bool = False


class GenerationResponse(Response):
    """Runs the generation when the server calls it, so that it sees the client's disconnect itself."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _Run(self._generation, send, scope.get("extensions", {}).get(WRITER_KEY))
        task = asyncio.ensure_future(run.answer())
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        gone.add_done_callback(lambda _: task.cancel())
        try:
            await task
        except asyncio.CancelledError:
            # Either the client left, which ends here, or this very task was cancelled, which must pass on.
            if not gone.done() or gone.cancelled():
                task.cancel()
                raise
            self._generation.log.outcome = "client_gone"
            run.report_abandoned()
        except HttpError as error:
            await error.response()(scope, receive, send)
        except TimeoutError:
            # Returning from an unfinished response makes the server close the connection.
            self._generation.log.outcome = "client_stalled"
        finally:
            run.close()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Run:
    """One answer in the making."""

    def __init__(self, generation: Generation, send: Send, writer: ChunkWriter | None) -> None:
        self._generation = generation
        self._writer = writer
        self._client = generation.client
        self._choices = generation.choices
        self._send = send
        self._stream: RequestStream | None = None
        self._num_open = len(generation.choices)
        self._has_started = False
        self._times = RequestTimes(generation.received_at, generation.log)
        self._busy_headers: list[tuple[bytes, bytes]] = []
        # The last chunk, if it was made outside of the task, which then writes it with the end of the stream.
        self._last_chunk: bytes | None = None

    async def answer(self) -> None:
        """HttpError only while nothing has been written."""
        self._stream = self._client.submit(self._generation.prepared.requests)
        try:
            if self._generation.wants_stream:
                await self._answer_in_chunks(self._stream)
            else:
                await self._answer_whole(self._stream)
        except HttpError as error:
            self._report_missed(error)
            self._generation.log.outcome = error.code
            if not self._has_started:
                raise
            # The status is long gone: the error is the stream's last event, and no [DONE] follows it.
            await self._write(self._generation.answer.error_event(error), more=False)

    def report_abandoned(self) -> None:
        """The client has left: how long it had waited for what has not begun."""
        if self._stream is None:
            return  # the engine has never heard of it
        waited_seconds = time.monotonic() - self._generation.received_at
        for choice in self._choices.values():
            if not choice.is_first_byte_written:
                self._client.report_abandoned(waited_seconds)

    def close(self) -> None:
        """Give up what still runs, and leave the numbers for the access log."""
        if self._stream is not None:
            self._client.abort(self._stream)
        self._times.sum_up()
        usage, log = self._usage(), self._generation.log
        log.prompt_tokens = usage.prompt_tokens
        log.cached_tokens = usage.cached_tokens
        log.generated_tokens = usage.completion_tokens

    async def _answer_in_chunks(self, stream: RequestStream) -> None:
        generation, answer = self._generation, self._generation.answer
        while self._num_open:
            events = await stream.next(self._take_token)
            parts = [] if self._last_chunk is None else [self._last_chunk]
            begun: list[Choice] = []
            problem: HttpError | None = None
            for event in events:
                if isinstance(event, RequestOutput) and event.finish_reason is not FinishReason.ERROR:
                    choice = self._choices[event.request_id]
                    if choice.finish_reason is not None:
                        continue  # came while a stop string was being told to the engine
                    delta = self._feed(choice, event)
                    if delta.text or delta.entries or delta.finish_reason is not None or delta.details:
                        is_first = not choice.is_first_byte_written
                        parts.append(answer.chunk(choice.index, delta, is_first=is_first))
                        if is_first:
                            choice.is_first_byte_written = True
                            begun.append(choice)
                else:
                    problem = self._error_of(event)
                    break
            if any(parts):
                if begun and not self._num_open and generation.wants_timings:
                    # The times that end this stream begin with the time of its first byte.
                    await self._write(b"".join(parts), more=True)
                    self._report_first_bytes(begun)
                    parts, begun = [], []
                if not self._num_open:
                    if generation.wants_usage_chunk:
                        parts.append(answer.usage_chunk(self._usage()))
                    parts.append(answer.stream_end)
                await self._write(b"".join(parts), more=self._num_open > 0)
                self._report_first_bytes(begun)
            if problem is not None:
                raise problem

    def _take_token(self, request_id: str, token_id: int, computed_at: float) -> bool:
        """Write one token's chunk right away: the way that almost every token of a stream takes."""
        choice, writer = self._choices[request_id], self._writer
        if choice.finish_reason is not None:
            return True  # came while a stop string was being told to the engine
        if writer is None or not choice.is_first_byte_written or not writer.is_open:
            return False
        delta = self._feed(choice, RequestOutput(request_id, (token_id,), computed_at=computed_at))
        if delta.text or delta.entries or delta.finish_reason is not None or delta.details:
            chunk = self._generation.answer.chunk(choice.index, delta, is_first=False)
            if not chunk:
                return True  # the answer's format holds the text back
            if self._num_open:
                writer.write(chunk)
            else:
                assert self._stream is not None
                self._last_chunk = chunk
                self._stream.wake()
        return True

    async def _answer_whole(self, stream: RequestStream) -> None:
        whole = {request_id: WholeChoice("", [], "") for request_id in self._choices}
        texts: dict[str, list[str]] = {request_id: [] for request_id in self._choices}
        while self._num_open:
            begun: list[Choice] = []
            for event in await stream.next():
                if not isinstance(event, RequestOutput) or event.finish_reason is FinishReason.ERROR:
                    raise self._error_of(event)
                choice = self._choices[event.request_id]
                if choice.finish_reason is not None:
                    continue
                if not choice.is_first_byte_written:
                    choice.is_first_byte_written = True
                    begun.append(choice)
                delta = self._feed(choice, event)
                texts[event.request_id].append(delta.text)
                whole[event.request_id].entries += delta.entries
                whole[event.request_id].finish_reason = delta.finish_reason or ""
                whole[event.request_id].stop_reason = delta.stop_reason
            self._report_first_bytes(begun)
        for request_id, parts in texts.items():
            whole[request_id].text = "".join(parts)
        body = await self._whole_body(list(whole.values()))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._busy_headers,
        ]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_in_pieces(body, self._send, WRITE_TIMEOUT_SECONDS)

    async def _whole_body(self, whole: list[WholeChoice]) -> bytes:
        """The JSON of an answer; with log-probabilities of thousands of tokens, a thread makes it."""
        choices = list(self._choices.values())

        def make() -> bytes:
            answers = whole_choices(choices, whole, self._generation.prepared)
            return self._generation.answer.whole(answers, self._usage())

        num_entries = sum(len(choice.prompt_logprobs or ()) for choice in choices)
        num_entries += sum(len(one.entries) for one in whole)
        return make() if num_entries < MANY_ENTRIES else await asyncio.to_thread(make)

    def _feed(self, choice: Choice, output: RequestOutput) -> Delta:
        delta = choice.feed(output)
        if output.late_share is not None or not self._generation.wants_stream:
            # A whole answer that a stop string ended knows none of now.
            self._busy_headers = _busy_headers(output)
        if output.queue_seconds is not None:
            self._times.first_token(output)
        else:
            self._times.later_tokens(output.request_id, len(output.token_ids), output.computed_at)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if choice.is_stopped_by_text:
                self._client.finish(choice.request_id)
            self._times.ended(choice.request_id, choice.num_generated, delta.finish_reason)
        return delta

    async def _write(self, body: bytes, *, more: bool) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # Asks proxies of the nginx kind not to collect the stream.
                (b"x-accel-buffering", b"no"),
                *self._busy_headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _report_first_bytes(self, choices: list[Choice]) -> None:
        if not choices:
            return
        ttft_seconds = self._times.first_bytes()
        for choice in choices:
            self._client.report_first_byte(
                ttft_seconds, self._times.delivery_seconds(choice.request_id, ttft_seconds)
            )

    def _report_missed(self, error: HttpError) -> None:
        """Choices that the engine had accepted, and that fail by no fault of the client's, are misses."""
        if error.status != 500:
            return  # the engine counted its refusal itself
        for choice in self._choices.values():
            if not choice.is_first_byte_written:
                self._client.report_missed()

    def _error_of(self, event: StreamEvent) -> HttpError:
        return _error_of(event, self._generation.prepared.requests[0].sampling)

    def _usage(self) -> Usage:
        choices = self._choices.values()
        return Usage(
            prompt_tokens=self._generation.prepared.num_prompt_tokens,
            completion_tokens=sum(choice.num_generated for choice in choices),
            # The prompt counts once, however many choices were made of it.
            cached_tokens=sum(
                choice.num_cached_tokens
                for choice in choices
                if choice.index % self._generation.prepared.choices_per_prompt == 0
            ),
            timings=self._times.as_usage() if self._generation.wants_timings else None,
        )


def _busy_headers(output: RequestOutput) -> list[tuple[bytes, bytes]]:
    """How busy the engine was, for gateways; nothing where the output does not say."""
    if output.late_share is None or output.max_num_seqs is None:
        return []
    return [(LATE_SHARE, b"%.3f" % output.late_share), (MAX_NUM_SEQS, b"%d" % output.max_num_seqs)]


def _error_of(event: StreamEvent, sampling: SamplingParams) -> HttpError:
    """sampling: of the request."""
    match event:
        case Refused() if event.status == 503:
            return overloaded(event.message, event.code, event.retry_after_seconds or 1)
        case Refused():
            return HttpError(event.status, event.message, param=event.param, code=event.code)
        case EngineDied(code="shutting_down"):
            return overloaded(event.message, event.code, 1)
        case EngineDied():
            return HttpError(500, event.message, code=event.code)
        case RequestOutput(error_param=str(param)):
            # Seen only in the engine: a grammar that cannot be compiled, or followed any further.
            grammar = sampling.grammar
            fields = set() if grammar is None else {grammar.param, *(part.param for part in grammar.parts)}
            code: HttpCode = "invalid_grammar" if param in fields else "invalid_value"
            message = f"{param}{_as_sent(param, sampling)} cannot be enforced: {event.error}; correct it"
            return HttpError(400, message, param=param, code=code)
        case RequestOutput():
            return HttpError(500, f"the engine failed: {event.error}; try again", code="engine_error")


def _as_sent(param: str, sampling: SamplingParams) -> str:
    """What the request has of a field that cannot be enforced, as it follows the name in a message."""
    if sampling.grammar is not None:
        if sampling.grammar.param == param:
            return as_sent(sampling.grammar)
        for part in sampling.grammar.parts:
            if part.param == param:
                return f"{as_sent(Grammar('json_schema', part.source, param))} of {part.owner}"
    if param == "allowed_token_ids":
        return f"={shown(sorted(sampling.allowed_token_ids or ()))}"
    # Of words the tokens are left.
    return (
        f" (as tokens {shown([list(word) for word in sampling.bad_words])})" if param == "bad_words" else ""
    )
