"""The engine as the HTTP process sees it: submit requests, receive their outputs, ask for its state.

Owns the two sockets of this side and the table of live requests. All outputs of one step arrive in one
message and wake each stream once. Knows nothing of text, JSON or HTTP.

Every stream gets exactly one end per request: a finish reason, a refusal, or the engine's death; what
comes for a request that is no longer in the table is dropped.
"""

import asyncio
import logging
from dataclasses import dataclass

import msgspec
import zmq

from headway_runtime.errors import EngineDeadError
from headway_runtime.metrics import RejectReason
from headway_runtime.request import Request, RequestOutput
from headway_runtime.server import messages

logger = logging.getLogger(__name__)

REPORT_DELAY_SECONDS = 0.05
QUERY_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The last event of every stream when the engine process ends, or when it is no longer asked."""

    message: str
    code: str = "engine_dead"


StreamEvent = RequestOutput | messages.Refused | EngineDied


class RequestStream:
    """What comes back for the requests of one submission, in the order of arrival."""

    __slots__ = ("_events", "_waiter", "request_ids")

    def __init__(self, request_ids: frozenset[str]) -> None:
        self.request_ids = request_ids
        self._events: list[StreamEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[StreamEvent]:
        """Everything that has come since the last call; waits for the first event."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def push(self, event: StreamEvent) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Created inside the running event loop. `ready` is set once, when the model is loaded."""

    def __init__(self, requests_address: str, outputs_address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.FromEngine)
        self._streams: dict[str, RequestStream] = {}
        self._queries: dict[int, asyncio.Future[messages.State | messages.PatchRefused]] = {}
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
        self._outgoing = context.socket(zmq.PUSH)
        self._incoming = context.socket(zmq.PULL)
        for socket in (self._outgoing, self._incoming):
            socket.set_hwm(0)
            socket.linger = 0
        self._outgoing.bind(requests_address)
        self._incoming.bind(outputs_address)
        self._loop.add_reader(self._incoming.fileno(), self._read)
        # The descriptor tells of changes only; what came before add_reader must be read once by hand.
        self._loop.call_soon(self._read)

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
        stream = RequestStream(frozenset(request.request_id for request in requests))
        for request in requests:
            self._streams[request.request_id] = stream
        self._send(messages.AddRequests(requests))
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

    async def state(self) -> messages.EngineState:
        """EngineDeadError if the engine has ended, TimeoutError if it does not answer."""
        answer = await self._ask(messages.GetState(self._next_query()))
        assert isinstance(answer, messages.State)
        return answer.state

    async def patch(self, **fields: float | None) -> messages.EngineState | messages.PatchRefused:
        """Change limits or targets; the fields and errors are those of `messages.Patch` and `state`."""
        answer = await self._ask(msgspec.convert({"query_id": self._next_query(), **fields}, messages.Patch))
        return answer.state if isinstance(answer, messages.State) else answer

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

    def shut_down(self) -> None:
        """Tell the engine process to end, and close this side."""
        if self.is_alive:
            self._send(messages.Shutdown())
        if self._report_timer is not None:
            self._report_timer.cancel()
        self._loop.remove_reader(self._incoming.fileno())
        self._outgoing.close(linger=1000)
        self._incoming.close()

    def _read(self) -> None:
        """Take in every message that has come. The descriptor is edge-triggered: read until none is left."""
        while True:
            try:
                frame = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError:
                if self._incoming.closed:
                    return
                raise
            self._dispatch(self._decoder.decode(frame))

    def _dispatch(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs():
                for output in message.outputs:
                    self._deliver(output.request_id, output, is_last=output.finish_reason is not None)
            case messages.Refused():
                self._deliver(message.request_id, message, is_last=True)
            case messages.State() | messages.PatchRefused():
                query = self._queries.get(message.query_id)
                if query is not None and not query.done():
                    query.set_result(message)
            case messages.Ready():
                if not self.ready.done():
                    self.ready.set_result(message)

    def _end_streams(self, event: EngineDied) -> None:
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.push(event)

    def _deliver(self, request_id: str, event: StreamEvent, *, is_last: bool) -> None:
        stream = self._streams.pop(request_id, None) if is_last else self._streams.get(request_id)
        if stream is not None:
            stream.push(event)

    async def _ask(
        self, question: messages.GetState | messages.Patch
    ) -> messages.State | messages.PatchRefused:
        self._check_alive()
        # What was seen before the question belongs into its answer.
        self._send_report()
        answer: asyncio.Future[messages.State | messages.PatchRefused] = self._loop.create_future()
        self._queries[question.query_id] = answer
        try:
            self._send(question)
            async with asyncio.timeout(QUERY_TIMEOUT_SECONDS):
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
        try:
            self._outgoing.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # No peer: the process has just ended, and `engine_ended` is about to tell everybody.
            logger.warning("%s found no engine process", type(message).__name__)
