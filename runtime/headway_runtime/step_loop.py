"""The loop: schedule, launch, read, commit. No torch.

Owns the order in which scheduler and runner are called, and the step that is under way. One turn:

    schedule (who computes what) -> launch -> read (tokens) -> commit (state, finished ones leave) -> outputs

Where steps overlap, a turn launches a step and then reads the one before. So the device computes while the
host takes over what it brought, sends it out, takes in what is new, and schedules. A step is then scheduled
before it is known what the one before brought; `commits` says how that ends well. Between two turns one step
at most is under way. Where the next one needs to know its tokens (`Scheduler.needs_reading`), it is read
before that is scheduled.

What fails when it is launched may have been done in part: what it was to clear and to copy is not relied on.
What fails when it is read was launched in full, and the device goes on: all that is lost is what it brought.
In either case the requests of that step end, and no others.
"""

import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from headway_runtime.batch import Batch, StepResult
from headway_runtime.offload.tiers import Copies, KVOffload
from headway_runtime.request import FinishReason, RequestOutput
from headway_runtime.scheduler import Schedule, Scheduler
from headway_runtime.step_accounts import StepAccounts

logger = logging.getLogger(__name__)

# What a step may raise without the device, or the engine, being at its end.
STEP_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, MemoryError)

Pending = TypeVar("Pending")


class StepRunner(Protocol[Pending]):
    """Who computes; `runner.Runner` is one, which says more."""

    def clear_blocks(self, blocks: "array[int]") -> None: ...
    def copy_blocks(
        self, stores: list[tuple[int, int]], loads: list[tuple[int, int]]
    ) -> tuple[float, float]: ...
    def launch(self, batch: Batch) -> Pending:
        """Begin a step. One before it may still be unread, but none before that."""

    def read(self, pending: Pending) -> StepResult:
        """Wait for a step. In the order in which they were launched."""

    def is_usable(self) -> bool:
        """Whether the device still computes after an error."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one turn brought.

    outputs: one entry per request that got tokens or ended.
    num_decodes: sequences that computed a single token in the step that was read; num_prefill_tokens: tokens
        of all others. num_preempted: by the step that was launched.
    """

    outputs: list[RequestOutput]
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[Pending]):
    """A step that was launched and is not read yet."""

    batch: Batch
    pending: Pending
    launched_at: float


class StepLoop(Generic[Pending]):
    """overlaps: whether a step is read only once the next one was launched. clock: seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner[Pending],
        accounts: StepAccounts,
        clock: Callable[[], float],
        *,
        offload: KVOffload | None,
        overlaps: bool,
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._accounts = accounts
        self._clock = clock
        self._offload = offload
        self._overlaps = overlaps
        self._under_way: _UnderWay[Pending] | None = None
        self._last_read_at = -math.inf

    @property
    def is_under_way(self) -> bool:
        """Whether a step was launched and is to be read."""
        return self._under_way is not None

    def step(self, now: float) -> StepOutputs | None:
        """One turn. None if there was nothing to launch and nothing to read.

        A device that no longer works makes the runner's exception pass through.
        """
        outputs: list[RequestOutput] = []
        before, read, failure = self._under_way, None, None
        if before is not None and self._scheduler.needs_reading:
            outputs += self._read(before)
            before, read = None, before
        schedule = self._scheduler.schedule(now)
        self._accounts.scheduled(schedule, now)
        self._under_way = None
        if schedule.batch.chunks:
            try:
                self._under_way = self._launch(schedule, now)
            except STEP_ERRORS as error:
                if not self.runner.is_usable():
                    raise
                failure = error
        if before is not None:
            outputs += self._read(before)
            read = before
        if failure is not None:
            # Only now: what was under way has brought tokens, and ends, before.
            self._scheduler.cache.not_cleared(schedule.blocks_to_clear)
            self._scheduler.cache.undo(schedule.copies)
            outputs += self._fail(schedule.batch, failure)
        if self._under_way is not None and not self._overlaps:
            read, self._under_way = self._under_way, None
            outputs += self._read(read)
        if read is None and self._under_way is None and failure is None:
            return None
        num_preempted = len(schedule.preempted)
        if read is None:
            return StepOutputs(outputs, num_preempted=num_preempted)
        return StepOutputs(outputs, read.batch.num_prefill_tokens, read.batch.num_decodes, num_preempted)

    def skip_to(self, launched_at: float, read_at: float) -> None:
        """Go on where a simulation has taken steps over at once, of which nothing was to be said.

        launched_at: when the step that is under way was launched, if there is one. read_at: when the last one
        was read.
        """
        if self._under_way is not None:
            self._under_way = replace(self._under_way, launched_at=launched_at)
        self._last_read_at = read_at

    def _launch(self, schedule: Schedule, now: float) -> _UnderWay[Pending]:
        if schedule.blocks_to_clear:
            self.runner.clear_blocks(array("q", schedule.blocks_to_clear))
        if schedule.copies:
            self._copy_blocks(schedule.copies)
        pending = self.runner.launch(schedule.batch)
        self._scheduler.launch(schedule.batch)
        return _UnderWay(schedule.batch, pending, now)

    def _copy_blocks(self, copies: Copies) -> None:
        assert self._offload is not None
        self._offload.copied(copies, *self.runner.copy_blocks(copies.stores, copies.loads))

    def _read(self, step: _UnderWay[Pending]) -> list[RequestOutput]:
        """Wait for a step and take over what it did."""
        batch = step.batch
        try:
            result = self.runner.read(step.pending)
        except STEP_ERRORS as error:
            if not self.runner.is_usable():
                raise
            return self._fail(batch, error)
        ended_at = self._clock()
        # While the one before it ran, it was waiting.
        seconds = ended_at - max(step.launched_at, self._last_read_at)
        self._last_read_at = ended_at
        if self._offload is not None:
            self._offload.observe_step(batch.num_prefill_tokens, seconds)
        self._accounts.step(batch, result, seconds)
        return self._accounts.outputs(self._scheduler.commit(batch, result, ended_at), ended_at)

    def _fail(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """End the requests of a step that failed."""
        logger.error("a step of %d sequences failed; their requests end", len(batch.chunks), exc_info=error)
        now, told = self._clock(), f"{type(error).__name__}: {error}"
        outputs = []
        for sequence in self._scheduler.drop(batch):
            self._accounts.ended(sequence, FinishReason.ERROR, now)
            name = sequence.request.request_id
            outputs.append(RequestOutput(name, (), FinishReason.ERROR, error=told))
        return outputs
