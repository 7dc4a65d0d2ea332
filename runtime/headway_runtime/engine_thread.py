"""The thread that steps an engine core for those who use it in their own process.

Owns the core from its start on: nobody else touches it. Others leave commands and get each output through the
sink that came with its request, which is called on this thread and must not block. Where what the core needs
is lost, a step may hang for good; so whoever tells of the loss ends everything that lives. Requests beyond
what the core lets wait are kept here, in order, so that nobody in the same process is ever refused for the
number of prompts. Knows no text and no event loop.

Each request's sink is called until an output with a finish reason or an error; nothing follows that.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.adapters.service import AdapterService
from headway_runtime.config import EngineConfig, LoraModule
from headway_runtime.errors import (
    AdapterNotFoundError,
    AdapterRefusedError,
    EngineDeadError,
    HeadwayRuntimeError,
    InvalidRequestError,
    ModelLoadError,
    RankDiedError,
)
from headway_runtime.metrics import EngineMetrics, MetricsSnapshot
from headway_runtime.request import Request, RequestOutput

logger = logging.getLogger(__name__)

Event = RequestOutput | InvalidRequestError | EngineDeadError
Answer = TypeVar("Answer")
Sink = Callable[[str, Event], None]

# How long `close` waits for the step that runs, and for one that computes with what is lost.
CLOSE_SECONDS, CLOSE_LOST_SECONDS = 120.0, 10.0


class StepResult(Protocol):
    @property
    def outputs(self) -> list[RequestOutput]: ...


class CoreLike(Protocol):
    """What the thread needs of a core; `headway_runtime.engine.EngineCore` is one."""

    @property
    def config(self) -> EngineConfig: ...
    def enter_thread(self) -> None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def has_idle_work(self) -> bool: ...
    def work_idly(self) -> None: ...
    @property
    def num_waiting(self) -> int: ...
    def add_request(self, request: Request, now: float) -> None: ...
    def abort(self, request_id: str, now: float) -> bool: ...
    def finish(self, request_id: str, now: float) -> bool: ...
    def step(self, now: float) -> StepResult: ...
    @property
    def adapters(self) -> AdapterService | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Command:
    """work: between two steps. refuse: instead, when there will be none; it leaves the core alone."""

    work: Callable[[], None]
    refuse: Callable[[EngineDeadError], None]


class EngineThread:
    """Starts at once. Everything but the core is safe to use from any thread."""

    def __init__(
        self, core: CoreLike, metrics: EngineMetrics, *, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._condition = threading.Condition()
        self._close_seconds = close_seconds
        self._commands: list[_Command] = []
        self._is_closing = False
        self._death: str | None = None
        self._failure: str | None = None
        # Touched by the thread alone.
        self._backlog: deque[Request] = deque()
        # Who is to hear of an end. Sinks are called under this lock, so that nothing follows one.
        self._ends = threading.RLock()
        self._sinks: dict[str, Sink] = {}
        self._loads: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Run `requests`. EngineDeadError if the engine has ended."""

        def refuse(error: EngineDeadError) -> None:
            self._sinks.update((one.request_id, sink) for one in requests)

        self._command(lambda: self._accept(requests, sink), refuse)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, those that have ended already among them; their sinks hear nothing more."""
        self._leave(request_ids, self._core.abort)

    def finish(self, request_id: str) -> None:
        """End a request normally: its answer is complete."""
        self._leave((request_id,), self._core.finish)

    def load_adapter(self, module: LoraModule, *, in_place: bool) -> None:
        """Load an adapter, and wait for it, while requests go on.

        AdapterRefusedError or ModelLoadError if that cannot be; EngineDeadError.
        """
        done: Future[None] = Future()

        def begin() -> None:
            with self._ends:
                if self._death is not None:
                    done.set_exception(EngineDeadError(self._death))
                    return
                self._loads.add(done)
            try:
                self._adapters.begin(module, token=done, in_place=in_place)
            except HeadwayRuntimeError as error:
                self._loaded(done, error)

        self._command(begin, done.set_exception)
        done.result()

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, once its requests have ended. AdapterNotFoundError; EngineDeadError."""
        self._ask(lambda: self._adapters.unload(name))

    def adapter_entries(self) -> list[AdapterEntry]:
        """Those that requests may name. EngineDeadError."""
        return self._ask(lambda: self._adapters.entries)

    @property
    def _adapters(self) -> AdapterService:
        if self._core.adapters is None:
            raise AdapterRefusedError("this engine has no LoRA adapters; make it with enable_lora=True")
        return self._core.adapters

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """What it comes to between two steps."""
        done: Future[Answer] = Future()

        def ask() -> None:
            try:
                done.set_result(question())
            except HeadwayRuntimeError as error:
                done.set_exception(error)

        self._command(ask, done.set_exception)
        return done.result()

    def _loaded(self, done: Future[None], error: HeadwayRuntimeError | None) -> None:
        with self._ends:
            if done not in self._loads:
                return  # it has ended with the engine
            self._loads.discard(done)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _poll_loads(self) -> None:
        if self._core.adapters is None or not self._core.adapters.is_loading:
            return
        for one in self._core.adapters.poll():
            error = None if one.error is None else ModelLoadError(one.error)
            self._loaded(cast("Future[None]", one.token), error)

    def snapshot(self) -> MetricsSnapshot:
        """The counters, between two steps."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return self._metrics.snapshot()
        found: list[MetricsSnapshot] = []
        is_there = threading.Event()

        def take() -> None:
            found.append(self._metrics.snapshot())
            is_there.set()

        try:
            self._command(take, lambda _: take())
        except EngineDeadError:
            return self._metrics.snapshot()
        while not is_there.wait(0.1):
            if not self._thread.is_alive():
                return self._metrics.snapshot()
        return found[0]

    def fail(self, reason: str) -> None:
        """End the thread: what the core needs is gone. Everything that lives gets EngineDeadError at
        once, also where the step that runs never ends."""
        with self._condition:
            self._failure = reason
            self._condition.notify()
        self._end(f"the engine cannot go on: {reason}")

    def close(self) -> None:
        """End the thread after the step that runs; requests that still live get EngineDeadError.

        A step that does not end in `close_seconds` is left to itself, and ends with the process.
        """
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if threading.current_thread() is self._thread:
            return
        lost = self._failure is not None
        seconds = min(self._close_seconds, CLOSE_LOST_SECONDS) if lost else self._close_seconds
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("a step has not ended for %g s; the engine is closed without it", seconds)
            self._end("the engine has been closed while a step hung; end the process")

    def _command(self, work: Callable[[], None], refuse: Callable[[EngineDeadError], None]) -> None:
        with self._condition:
            if self._death is not None or self._is_closing:
                raise EngineDeadError(self._death or "the engine has been closed; make another one")
            self._commands.append(_Command(work, refuse))
            self._condition.notify()

    def _leave(self, request_ids: Sequence[str], leave: Callable[[str, float], bool]) -> None:
        def command() -> None:
            now = time.monotonic()
            for request_id in request_ids:
                if self._sink_of(request_id) is not None and not leave(request_id, now):
                    # The core has never heard of it.
                    self._backlog = deque(one for one in self._backlog if one.request_id != request_id)

        def refuse(error: EngineDeadError) -> None:
            for request_id in request_ids:
                self._sinks.pop(request_id, None)

        try:
            self._command(command, refuse)
        except EngineDeadError:
            return  # everything has ended already

    def _run(self) -> None:
        reason = "the engine has been closed; make another one"
        try:
            self._core.enter_thread()
            while self._take_commands():
                self._admit()
                if self._core.has_work:
                    outputs = self._core.step(time.monotonic()).outputs
                    if self._failure is not None:
                        # Without all of what the core needs, the step may have computed anything.
                        raise EngineDeadError(self._failure)
                    for output in outputs:
                        self._deliver(output)
                elif self._core.has_idle_work:
                    self._core.work_idly()
                self._poll_loads()
        except (EngineDeadError, RankDiedError) as error:
            logger.error("the engine cannot go on: %s", error)
            reason = f"the engine cannot go on: {error}"
        except Exception as error:
            logger.exception("the engine cannot go on")
            reason = f"the engine cannot go on: {type(error).__name__}: {error}"
        self._core.close()
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Everything that lives ends, if it has not yet. From any thread."""
        with self._ends:
            with self._condition:
                self._death = reason = self._death or reason
                commands, self._commands = self._commands, []
            error = EngineDeadError(reason)
            for command in commands:
                command.refuse(error)  # who asked between the last step and now gets the same end
            for load in list(self._loads):
                self._loaded(load, error)
            sinks, self._sinks = self._sinks, {}
            for request_id, sink in sinks.items():
                sink(request_id, error)

    def _sink_of(self, request_id: str) -> Sink | None:
        """Who hears nothing more from here on."""
        with self._ends:
            return self._sinks.pop(request_id, None)

    def _take_commands(self) -> bool:
        """Do what was asked for, waiting for it if there is nothing else to do. False when told to end."""
        with self._condition:
            while not (
                self._commands
                or self._is_closing
                or self._failure
                or self._core.has_work
                or self._backlog
                or self._core.has_idle_work
            ):
                self._condition.wait()
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            if self._is_closing:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command.work()
        return True

    def _accept(self, requests: Sequence[Request], sink: Sink) -> None:
        """However long they wait in the backlog, they have the adapters that are loaded now."""
        for request in requests:
            try:
                if self._core.adapters is not None:
                    self._core.adapters.acquire(request.adapter, request.request_id)
            except AdapterNotFoundError as error:
                sink(request.request_id, error)
                continue
            with self._ends:
                if self._death is not None:
                    sink(request.request_id, EngineDeadError(self._death))
                    continue
                self._sinks[request.request_id] = sink
            self._backlog.append(request)

    def _admit(self) -> None:
        """Hand over as many as the core lets wait."""
        now = time.monotonic()
        while self._backlog and self._core.num_waiting < self._core.config.max_waiting:
            request = self._backlog.popleft()
            try:
                self._core.add_request(request, now)
            except InvalidRequestError as error:
                self._core.abort(request.request_id, now)  # its adapter, which it has already
                sink = self._sink_of(request.request_id)
                if sink is not None:
                    sink(request.request_id, error)

    def _deliver(self, output: RequestOutput) -> None:
        with self._ends:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                return
            if output.queue_seconds is not None and output.prefill_seconds is not None:
                self._metrics.first_byte(output.queue_seconds + output.prefill_seconds)
            if output.finish_reason is not None:
                del self._sinks[output.request_id]
            sink(output.request_id, output)
