"""The engine as an HTTP process sees it: submit requests, receive their outputs, ask for its state.

Owns the socket of this side and the table of live requests. All outputs of one step arrive in one message,
and each goes to its stream (`request_stream`). Knows nothing of text, JSON or HTTP.

Every stream gets exactly one end per request: a finish reason, a refusal, or the engine's death; what
comes for a request that is no longer in the table is dropped.
"""

import asyncio
import time

import msgspec
import zmq

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.config import LoraModule
from headway_runtime.errors import EngineDeadError
from headway_runtime.metrics import RejectReason
from headway_runtime.request import Request, RequestOutput
from headway_runtime.server import messages
from headway_runtime.server.request_stream import EngineDied, RequestStream, StreamEvent
from headway_runtime.server.turnstile import Turnstile

REPORT_DELAY_SECONDS = 0.05
# How often a connection is tried while the engine process has yet to begin.
CONNECT_MILLISECONDS = 10
# What is handled of the engine's messages before the loop goes round.
LONGEST_READ_SECONDS = 0.003
# That are woken in one round of the loop: to write a first or last token takes an eighth of a millisecond.
STREAMS_PER_TURN = 12
QUERY_TIMEOUT_SECONDS = 10.0
# Reading an adapter's files, which may lie on a slow volume.
LOADING_TIMEOUT_SECONDS = 300.0


class EngineClient:
    """Created inside the running event loop. `ready` is set once, when the model is loaded."""

    def __init__(self, address: str, front: int = 0) -> None:
        """`front` is this process' number among those of the server."""
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.FromEngine)
        self._streams: dict[str, RequestStream] = {}
        self._turnstile = Turnstile(STREAMS_PER_TURN)
        self._queries: dict[int, asyncio.Future[messages.Answer]] = {}
        self._num_queries = 0
        self._ttft_seconds: list[float] = []
        self._delivery_seconds: list[float] = []
        self._num_missed = 0
        self._abandoned_seconds: list[float] = []
        self._refused: list[str] = []
        self._report_timer: asyncio.TimerHandle | None = None
        self._death: str | None = None
        self.ready: asyncio.Future[messages.Ready] = self._loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.reconnect_ivl = CONNECT_MILLISECONDS
        self._socket.connect(address)
        self._is_reading_soon = False
        # The LoRA adapters that requests may name, as far as this process has heard.
        self.adapters: tuple[AdapterEntry, ...] = ()
        # How many messages have come from the engine.
        self.num_heard = 0
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._send(messages.Hello(front))

    @property
    def info(self) -> messages.Ready | None:
        """What the engine said of itself; None before it is ready."""
        return self.ready.result() if self.ready.done() and not self.ready.exception() else None

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.info is not None

    @property
    def num_live(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._streams)

    def submit(self, requests: list[Request]) -> RequestStream:
        """Send requests to the engine. EngineDeadError if there is none."""
        self._check_alive()
        stream = RequestStream(frozenset(request.request_id for request in requests), self._turnstile)
        for request in requests:
            self._streams[request.request_id] = stream
        self._send(messages.add_requests(requests))
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Drop what of `stream` is still live: nobody reads it any more."""
        live = [request_id for request_id in stream.request_ids if self._streams.pop(request_id, None)]
        if live and self.is_alive:
            self._send(messages.Abort(live))

    def finish(self, request_id: str) -> None:
        """End one request normally, where its text says so."""
        if self._streams.pop(request_id, None) is not None and self.is_alive:
            self._send(messages.Finish(request_id))

    def ping(self) -> None:
        """Ask for a sign of life: `num_heard` grows when it comes."""
        self._send(messages.Ping())

    async def state(self) -> messages.EngineState:
        """EngineDeadError if the engine has ended, TimeoutError if it does not answer."""
        answer = await self._ask(messages.GetState(self._next_query()))
        assert isinstance(answer, messages.State)
        return answer.state

    async def patch(self, **fields: float | None) -> messages.EngineState | messages.PatchRefused:
        """Change limits or targets; the fields and errors are those of `messages.Patch` and `state`."""
        answer = await self._ask(msgspec.convert({"query_id": self._next_query(), **fields}, messages.Patch))
        if isinstance(answer, messages.PatchRefused):
            return answer
        assert isinstance(answer, messages.State)
        return answer.state

    async def reset_prefix_cache(self) -> None:
        """From now on, let no request use what was computed for earlier ones; errors as for `state`."""
        await self._ask(messages.ResetPrefixCache(self._next_query()))

    async def load_adapter(self, module: LoraModule, *, in_place: bool) -> messages.AdapterAnswer:
        """Load a LoRA adapter, whose files are on this machine; errors as for `state`."""
        question = messages.LoadAdapter(self._next_query(), module, in_place)
        return await self._ask_for_adapters(question, LOADING_TIMEOUT_SECONDS)

    async def unload_adapter(self, name: str) -> messages.AdapterAnswer:
        """Forget a LoRA adapter, once its requests have ended; errors as for `state`."""
        return await self._ask_for_adapters(messages.UnloadAdapter(self._next_query(), name))

    async def latest_adapters(self) -> tuple[AdapterEntry, ...]:
        """The LoRA adapters as the engine has them now; errors as for `state`."""
        await self._ask_for_adapters(messages.GetAdapters(self._next_query()))
        return self.adapters

    async def _ask_for_adapters(
        self, question: messages.AdapterQuestion, timeout_seconds: float = QUERY_TIMEOUT_SECONDS
    ) -> messages.AdapterAnswer:
        answer = await self._ask(question, timeout_seconds)
        assert isinstance(answer, messages.AdapterAnswer)
        return answer

    async def sample(self, *, is_draining: bool) -> bytes:
        """The body of `/admin/sample`; errors as for `state`."""
        answer = await self._ask(messages.GetSample(self._next_query(), is_draining))
        assert isinstance(answer, messages.Sample)
        return answer.body

    def report_first_byte(self, ttft_seconds: float, delivery_seconds: float | None = None) -> None:
        """delivery_seconds: the part of it after the engine had computed the token, where that is known."""
        self._ttft_seconds.append(ttft_seconds)
        if delivery_seconds is not None:
            self._delivery_seconds.append(delivery_seconds)
        self._report_soon()

    def report_missed(self) -> None:
        """A request failed, through no act of its client, after it was accepted and before its first byte."""
        self._num_missed += 1
        self._report_soon()

    def report_abandoned(self, waited_seconds: float) -> None:
        """The client of an accepted request left before its first byte."""
        self._abandoned_seconds.append(waited_seconds)
        self._report_soon()

    def report_refused(self, reason: RejectReason) -> None:
        """A request was answered with an error and never reached the engine."""
        self._refused.append(reason)
        self._report_soon()

    def engine_ended(self, message: str) -> None:
        """Tell every stream and every question that there is no engine any more."""
        if self._death is not None:
            return
        self._death = message
        if not self.ready.done():
            self.ready.set_exception(EngineDeadError(message))
        self._end_streams(EngineDied(message))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(EngineDeadError(message))

    def end_all(self, message: str) -> None:
        """Give every live request an error instead of the rest of its answer: the server's time is up."""
        live = list(self._streams)
        self._end_streams(EngineDied(message, "shutting_down"))
        if live:
            self._send(messages.Abort(live))

    def shut_down(self, *, end_engine: bool) -> None:
        """Close this side; perhaps tell the engine process to end."""
        self._send_report()
        if self.is_alive and end_engine:
            self._send(messages.Shutdown())
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=1000)

    def _read(self) -> None:
        """Take in what has come; after a while, come back for the rest when the loop has gone round.

        So an engine that is faster than this process, or has got ahead of it, holds up nobody who asks for
        something else. The descriptor is edge-triggered: it tells of nothing new before a read has found
        nothing.
        """
        self._is_reading_soon = False
        until = time.monotonic() + LONGEST_READ_SECONDS
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_heard += 1
            self._dispatch(self._decoder.decode(frame))
            if time.monotonic() > until:
                self._read_soon()
                return

    def _read_soon(self) -> None:
        if not self._is_reading_soon:
            self._is_reading_soon = True
            self._loop.call_soon(self._read)

    def _dispatch(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs():
                self._deliver_tokens(message.request_ids, message.token_ids, message.computed_at)
                for output in message.outputs:
                    self._deliver(output.request_id, output, is_last=output.finish_reason is not None)
            case messages.Refused():
                self._deliver(message.request_id, message, is_last=True)
            case messages.State() | messages.Sample() | messages.PatchRefused() | messages.AdapterAnswer():
                if isinstance(message, messages.AdapterAnswer):
                    self.adapters = tuple(message.adapters)
                query = self._queries.get(message.query_id)
                if query is not None and not query.done():
                    query.set_result(message)
            case messages.AdapterList():
                self.adapters = tuple(message.adapters)
            case messages.Ready():
                self.adapters = tuple(message.adapters)
                if not self.ready.done():
                    self.ready.set_result(message)
            case messages.Pong():
                pass  # it has been counted like every message

    def _deliver_tokens(self, request_ids: list[str], token_ids: list[int], computed_at: float) -> None:
        """One token for each of these requests. The hot path: there are thousands of them a second."""
        streams = self._streams
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            stream = streams.get(request_id)
            if stream is None:
                continue
            take_token = stream.take_token
            if take_token is not None:
                try:
                    if take_token(request_id, token_id, computed_at):
                        continue
                except Exception as error:  # noqa: BLE001 - a stream's fault must not cost the others their tokens
                    stream.fail(error)
                    continue
            stream.push(RequestOutput(request_id, (token_id,), computed_at=computed_at))

    def _end_streams(self, event: EngineDied) -> None:
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.push(event)

    def _deliver(self, request_id: str, event: StreamEvent, *, is_last: bool) -> None:
        stream = self._streams.pop(request_id, None) if is_last else self._streams.get(request_id)
        if stream is not None:
            stream.push(event)

    async def _ask(
        self, question: messages.Question, timeout_seconds: float = QUERY_TIMEOUT_SECONDS
    ) -> messages.Answer:
        self._check_alive()
        # What was seen before the question belongs into its answer.
        self._send_report()
        answer: asyncio.Future[messages.Answer] = self._loop.create_future()
        self._queries[question.query_id] = answer
        try:
            self._send(question)
            async with asyncio.timeout(timeout_seconds):
                return await answer
        finally:
            del self._queries[question.query_id]

    def _next_query(self) -> int:
        self._num_queries += 1
        return self._num_queries

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _report_soon(self) -> None:
        if self._report_timer is None:
            self._report_timer = self._loop.call_later(REPORT_DELAY_SECONDS, self._send_report)

    def _send_report(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        seen = (
            self._ttft_seconds,
            self._delivery_seconds,
            self._num_missed,
            self._abandoned_seconds,
            self._refused,
        )
        if not any(seen) or not self.is_ready:
            return
        self._send(messages.Report(*seen))
        self._ttft_seconds, self._delivery_seconds, self._num_missed = [], [], 0
        self._abandoned_seconds, self._refused = [], []

    def _send(self, message: messages.ToEngine) -> None:
        # Never blocks: nothing limits what waits in the socket; what waits for a dead engine goes with it.
        self._socket.send(self._encoder.encode(message))
        # Sending may take the edge off the descriptor that tells of what has come.
        self._read_soon()
