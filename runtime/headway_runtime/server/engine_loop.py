"""The engine's loop: drain messages, step the engine, send what each step brought.

    read all messages that wait (block only when there is no work) -> step -> one message to each HTTP process

Owns the engine, all its counters and nothing of HTTP or text.
"""

import logging
import time
import uuid
from dataclasses import replace
from typing import Protocol, assert_never, cast

import msgspec
import zmq

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.adapters.service import AdapterService
from headway_runtime.config import EngineConfig, Limits
from headway_runtime.errors import (
    AdapterNotFoundError,
    AdapterRefusedError,
    InvalidRequestError,
    LimitRangeError,
    QueueFullError,
)
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, RequestOutput
from headway_runtime.server import messages
from headway_runtime.server.sample import SampleWriter

logger = logging.getLogger(__name__)

# How long an idle process sleeps at most; a message wakes it at once.
IDLE_POLL_MILLISECONDS = 1000


class StepResult(Protocol):
    @property
    def outputs(self) -> list[RequestOutput]: ...


class EngineLike(Protocol):
    """What this process needs of an engine; `headway_runtime.engine.EngineCore` is one."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_kv_tokens(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def weight_compression(self) -> str: ...
    @property
    def adapters(self) -> AdapterService | None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def has_idle_work(self) -> bool: ...
    def work_idly(self) -> None: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int: ...
    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def kv_blocks_cached(self) -> int: ...
    @property
    def kv_wasted_share(self) -> float: ...
    def oldest_waiting_seconds(self, now: float) -> float: ...
    def set_limits(self, limits: Limits) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def adapter_snapshot(self) -> AdapterSnapshot: ...
    def add_request(self, request: Request, now: float) -> None: ...
    def abort(self, request_id: str, now: float) -> bool: ...
    def finish(self, request_id: str, now: float) -> bool: ...
    def step(self, now: float) -> StepResult: ...
    def close(self) -> None: ...


def bind_socket(address: str) -> zmq.Socket[bytes]:
    """The socket that fronts connect to; before the model is loaded, so that what they say waits in it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.ROUTER)
    # No limit on what waits in a socket: the engine bounds requests, and its outputs follow them.
    socket.set_hwm(0)
    socket.linger = 0
    socket.bind(address)
    return socket


class EngineLoop:
    """The loop, the socket, and who asked for what.

    A front is known by the identity that the socket gave its connection. What is sent to one that has gone is
    dropped by the socket; its requests go when another front takes its number.
    """

    def __init__(
        self,
        engine: EngineLike,
        metrics: EngineMetrics,
        socket: zmq.Socket[bytes],
        timeline: dict[str, float],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._socket = socket
        self._timeline = timeline
        self._identities: dict[int, bytes] = {}
        # Live requests -> the identity of their front.
        self._owners: dict[str, bytes] = {}
        self._sample_writer = SampleWriter()
        self._instance = uuid.uuid4().hex
        self._started_at = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.ToEngine)

    def run(self) -> None:
        """Serve until told to stop. What `step` raises passes through: such an engine cannot go on."""
        engine = self._engine
        while True:
            if not self._drain(wait=not (engine.has_work or engine.has_idle_work)):
                return
            if engine.has_work:
                if outputs := engine.step(time.monotonic()).outputs:
                    self._send_outputs(outputs)
            elif engine.has_idle_work:
                engine.work_idly()
            if engine.adapters is not None and engine.adapters.is_loading:
                self._tell_of_loads(engine.adapters)

    def _drain(self, *, wait: bool) -> bool:
        """Handle every message that has come, waiting for the first one if asked. False at Shutdown."""
        if wait:
            self._socket.poll(IDLE_POLL_MILLISECONDS)
        while True:
            try:
                front, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = self._decoder.decode(frame)
            if isinstance(message, messages.Shutdown):
                return False
            self._handle(front, message)

    def _handle(self, front: bytes, message: messages.ToEngine) -> None:
        now = time.monotonic()
        match message:
            case messages.AddRequests():
                for request in messages.added_requests(message):
                    self._add(front, request, now)
            case messages.Abort():
                for request_id in message.request_ids:
                    self._abort(request_id, now)
            case messages.Finish():
                self._owners.pop(message.request_id, None)
                self._engine.finish(message.request_id, now)
            case messages.Report():
                self._count(message)
            case (
                messages.GetState()
                | messages.GetSample()
                | messages.Patch()
                | messages.ResetPrefixCache()
                | messages.UnloadAdapter()
                | messages.GetAdapters()
            ):
                self._send(front, self._answer(message))
            case messages.LoadAdapter():
                self._load_adapter(front, message)
            case messages.Ping():
                self._send(front, messages.Pong())
            case messages.Hello():
                self._welcome(front, message.front, now)
            case messages.Shutdown():
                raise AssertionError("handled by _drain")
            case _:
                assert_never(message)

    def _answer(self, question: messages.AnsweredAtOnce) -> messages.Answer:
        match question:
            case messages.GetState():
                return messages.State(question.query_id, self._state())
            case messages.GetSample():
                body = self._sample_writer.write(self._state(), is_draining=question.is_draining)
                return messages.Sample(question.query_id, body)
            case messages.Patch():
                return self._patch(question)
            case messages.ResetPrefixCache():
                self._engine.reset_prefix_cache()
                logger.info("the prefix cache was reset")
                return messages.State(question.query_id, self._state())
            case messages.UnloadAdapter():
                return self._unload_adapter(question)
            case messages.GetAdapters():
                return messages.AdapterAnswer(question.query_id, self._adapter_entries())

    def _adapter_entries(self) -> list[AdapterEntry]:
        return [] if self._engine.adapters is None else self._engine.adapters.entries

    def _load_adapter(self, front: bytes, question: messages.LoadAdapter) -> None:
        """Begin to; the answer follows when it is known what came of it."""
        error = "this engine has no LoRA adapters; start the server with --enable-lora"
        if self._engine.adapters is not None:
            try:
                self._engine.adapters.begin(
                    question.module, token=(front, question.query_id), in_place=question.in_place
                )
            except AdapterRefusedError as refusal:
                error = str(refusal)
            else:
                return
        refused = messages.AdapterAnswer(question.query_id, self._adapter_entries(), error, is_name=True)
        self._send(front, refused)

    def _tell_of_loads(self, adapters: AdapterService) -> None:
        """Every front hears of a new adapter before anybody is told that it is there."""
        outcomes = adapters.poll()
        if any(one.error is None for one in outcomes):
            self._announce_adapters()
        for one in outcomes:
            front, query_id = cast("tuple[bytes, int]", one.token)
            logger.info("LoRA adapter %r: %s", one.module.name, one.error or "loaded")
            self._send(front, messages.AdapterAnswer(query_id, adapters.entries, one.error))

    def _unload_adapter(self, question: messages.UnloadAdapter) -> messages.AdapterAnswer:
        try:
            if self._engine.adapters is None:
                raise AdapterNotFoundError(question.name)
            self._engine.adapters.unload(question.name)
        except AdapterNotFoundError as error:
            return messages.AdapterAnswer(
                question.query_id, self._adapter_entries(), str(error), is_unknown=True
            )
        logger.info("LoRA adapter %r: unloaded", question.name)
        self._announce_adapters()
        return messages.AdapterAnswer(question.query_id, self._adapter_entries())

    def _announce_adapters(self) -> None:
        for identity in self._identities.values():
            self._send(identity, messages.AdapterList(self._adapter_entries()))

    def _welcome(self, front: bytes, number: int, now: float) -> None:
        """Say that requests may come; drop those of a front that died under this number."""
        before = self._identities.get(number)
        self._identities[number] = front
        orphans = [request_id for request_id, owner in self._owners.items() if owner == before]
        if orphans:
            logger.warning("HTTP process %d was started again; %d of its requests end", number, len(orphans))
        for request_id in orphans:
            self._abort(request_id, now)
        engine = self._engine
        self._send(
            front,
            messages.Ready(
                engine.max_model_len,
                engine.num_kv_tokens,
                engine.config.device,
                engine.kv_dtype,
                self._timeline,
                self._adapter_entries(),
                engine.weight_compression,
            ),
        )

    def _abort(self, request_id: str, now: float) -> None:
        self._owners.pop(request_id, None)
        self._engine.abort(request_id, now)

    def _add(self, front: bytes, request: Request, now: float) -> None:
        request_id = request.request_id
        try:
            self._engine.add_request(request, now)
        except InvalidRequestError as error:
            status = 404 if isinstance(error, AdapterNotFoundError) else 400
            self._send(front, messages.Refused(request_id, status, str(error), error.param, error.code))
        except QueueFullError as error:
            seconds = error.retry_after_seconds
            self._send(
                front,
                messages.Refused(request_id, 503, str(error), code="queue_full", retry_after_seconds=seconds),
            )
        else:
            self._owners[request_id] = front

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        """To each front what is for its requests, in one message."""
        owners = self._owners
        by_front: dict[bytes, messages.Outputs] = {}
        # One step's are all of one moment.
        computed_at = next((one.computed_at for one in outputs if messages.is_one_token(one)), 0.0)
        for output in outputs:
            request_id = output.request_id
            is_last = output.finish_reason is not None
            front = owners.pop(request_id, None) if is_last else owners.get(request_id)
            if front is None:
                continue  # it was aborted or finished, and nobody waits for more
            message = by_front.get(front)
            if message is None:
                message = by_front[front] = messages.Outputs([], [], computed_at, [])
            if messages.is_one_token(output):
                message.request_ids.append(request_id)
                message.token_ids.append(output.token_ids[0])
            else:
                message.outputs.append(output)
        for front, message in by_front.items():
            self._send(front, message)

    def _count(self, report: messages.Report) -> None:
        for ttft_seconds in report.ttft_seconds:
            self._metrics.first_byte(ttft_seconds)
        for delivery_seconds in report.delivery_seconds:
            self._metrics.delivered(delivery_seconds)
        for _ in range(report.num_missed):
            self._metrics.first_byte_missed()
        for waited_seconds in report.abandoned_seconds:
            self._metrics.abandoned(waited_seconds)
        for reason in report.refused:
            self._metrics.received()
            self._metrics.rejected(reason)

    def _patch(self, patch: messages.Patch) -> messages.State | messages.PatchRefused:
        limits, targets = self._engine.limits, self._metrics.targets
        wanted_limits = Limits(
            limits.max_num_seqs if patch.max_num_seqs is msgspec.UNSET else patch.max_num_seqs,
            limits.max_num_batched_tokens
            if patch.max_num_batched_tokens is msgspec.UNSET
            else patch.max_num_batched_tokens,
            limits.num_speculative_tokens
            if patch.num_speculative_tokens is msgspec.UNSET
            else patch.num_speculative_tokens,
        )
        try:
            self._engine.set_limits(wanted_limits)
        except LimitRangeError as error:
            value = getattr(wanted_limits, error.field)
            return messages.PatchRefused(
                patch.query_id, str(error), error.field, value, error.low, error.high
            )
        if patch.ttft_milliseconds is not msgspec.UNSET:
            targets = replace(targets, ttft_milliseconds=patch.ttft_milliseconds)
        if patch.tpot_milliseconds is not msgspec.UNSET:
            targets = replace(targets, tpot_milliseconds=patch.tpot_milliseconds)
        if patch.e2e_milliseconds is not msgspec.UNSET:
            targets = replace(targets, e2e_milliseconds=patch.e2e_milliseconds)
        if wanted_limits != limits or targets != self._metrics.targets:
            logger.info("%s -> %s, %s", limits, wanted_limits, targets)
        self._metrics.set_targets(targets)
        return messages.State(patch.query_id, self._state())

    def _state(self) -> messages.EngineState:
        engine, now = self._engine, time.monotonic()
        return messages.EngineState(
            instance=self._instance,
            uptime_seconds=now - self._started_at,
            limits=engine.limits,
            envelope=engine.config.envelope,
            metrics=self._metrics.snapshot(),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            oldest_waiting_seconds=engine.oldest_waiting_seconds(now),
            kv_blocks_used=engine.kv_blocks_used,
            kv_blocks_total=engine.kv_blocks_total,
            kv_blocks_cached=engine.kv_blocks_cached,
            kv_wasted_share=engine.kv_wasted_share,
            adapters=engine.adapter_snapshot(),
        )

    def _send(self, front: bytes, message: messages.FromEngine) -> None:
        self._socket.send_multipart((front, self._encoder.encode(message)))
