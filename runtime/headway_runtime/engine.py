"""The engine: requests in, steps, outputs out.

Owns the scheduler, the runner, the loop of steps between them, and all that a request may wait for before it
is scheduled. Knows nothing of text, HTTP or other processes, and reads only the clock it was given; what it
starts is hidden in `GrammarQueue`, which compiles grammars on the side. One call of `step` is one step of
the loop (`step_loop`).

Every accepted request gets exactly one output with a finish reason, unless `abort` or `finish` took it out.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter
from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.adapters.service import AdapterService
from headway_runtime.config import EngineConfig, Limits, Targets
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.errors import (
    AdapterNotFoundError,
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
)
from headway_runtime.grammar_queue import GrammarQueue
from headway_runtime.metrics import EngineMetrics, RejectReason
from headway_runtime.offload.opening import open_offload
from headway_runtime.offload.tiers import KVOffload
from headway_runtime.parallel.open_ranks import open_ranks
from headway_runtime.parallel.started import StartedRanks
from headway_runtime.prompt_cost import PromptCost
from headway_runtime.request import FinishReason, Request, RequestOutput
from headway_runtime.request_checks import check_request
from headway_runtime.runner import Runner
from headway_runtime.scheduler import Scheduler
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.step_accounts import StepAccounts
from headway_runtime.step_loop import StepLoop, StepOutputs

logger = logging.getLogger(__name__)

LONGEST_RETRY_AFTER_SECONDS = 60
# How long a step with nothing to compute waits for a grammar; aborts and new requests wait as long.
GRAMMAR_WAIT_SECONDS = 0.002
# The same where adapters are being read.
LOADING_WAIT_SECONDS = 0.002
# Likewise for a disk that is read for a request.
DISK_WAIT_SECONDS = 0.002


class EngineCore:
    """A model, its KV cache and the requests in it. Not thread-safe: one thread calls everything.

    clock: seconds, the same clock as `now` and `Request.received_at`; it times the steps.
    Raises ConfigError and ModelLoadError while starting.
    """

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
        started: StartedRanks | None = None,
    ) -> None:
        """started: the ranks that share the model; None starts them, if there are any."""
        config.envelope.check(config.limits)
        self.config = config
        self.metrics = metrics
        self._clock = clock
        self._runner = Runner(config, open_ranks(config, started))
        self._offload: KVOffload | None = None
        try:
            self._begin()
        except BaseException:
            self._release()
            raise

    def _begin(self) -> None:
        """All that stands on the runner."""
        config = self.config
        self.metrics.traffic = self._runner.traffic
        self._offload = self._open_offload()
        self._scheduler = Scheduler(
            num_blocks=self._runner.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            limits=config.limits,
            long_prefill_share=config.long_prefill_share,
            prompt_cost=PromptCost(config.prefill_doubling_context),
            priority_ageing_seconds=config.priority_ageing_seconds,
            late_yield_seconds=config.late_yield_seconds,
            enable_prefix_caching=config.enable_prefix_caching,
            proof_reach=self._runner.proof_reach,
            draft_policy=DraftPolicy(is_adaptive=config.speculative is None or config.speculative.adaptive),
            max_adapters=0 if config.lora is None else config.lora.max_loras,
            offload=self._offload,
        )
        policy = None if config.speculative is None else self._scheduler.draft_policy
        self._accounts = StepAccounts(self.metrics, self._scheduler, policy)
        self._scheduler.promptness.aim_at(self.metrics.targets)
        self._steps = StepLoop(
            self._scheduler,
            self._runner,
            self._accounts,
            self._clock,
            offload=self._offload,
            overlaps=config.overlaps_steps,
        )
        # None where the engine was not told to have any.
        self.adapters = None if config.lora is None else AdapterService(config.lora, self._runner)
        for module in () if config.lora is None else config.lora.modules:
            assert self.adapters is not None
            self.adapters.load_now(module)
        self._grammars = GrammarQueue(
            Path(config.model_path), self._runner.vocab_size, config.structured_output_timeout_seconds
        )
        self._tell_graph_bytes()
        self.start.ended("ready")
        self.metrics.started(self.start.seconds)

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    def set_limits(self, limits: Limits) -> None:
        """Change the live limits from the next step on. LimitRangeError outside the envelope."""
        self.config.envelope.check(limits)
        self._scheduler.limits = limits

    @property
    def targets(self) -> Targets:
        return self.metrics.targets

    def set_targets(self, targets: Targets) -> None:
        """Count against other SLO targets from now on, and let requests yield that are late by them."""
        self.metrics.set_targets(targets)
        self._scheduler.promptness.aim_at(targets)

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not yet scheduled, preempted, or waiting for their grammar."""
        return self._scheduler.num_waiting + len(self._grammars)

    @property
    def has_work(self) -> bool:
        """Whether a step, or several, would do something; while an adapter is loaded, they let it go on."""
        return self.num_running + self.num_waiting > 0 or self._steps.is_under_way or self._is_loading

    @property
    def _is_loading(self) -> bool:
        return self.adapters is not None and self.adapters.is_loading

    @property
    def has_idle_work(self) -> bool:
        """Whether something can be done for later steps while there is none to do."""
        return self._runner.has_more_to_record

    def work_idly(self) -> None:
        """Do a little of that: less than half a second's. Only while there is no work."""
        self._runner.record_next()
        self._tell_graph_bytes()

    def _tell_graph_bytes(self) -> None:
        self.metrics.cuda_graph_bytes = self._runner.graph_bytes

    @property
    def start(self) -> StartTimeline:
        """Of the runner: what its stages took."""
        return self._runner.start

    @property
    def kv_blocks_total(self) -> int:
        return self._scheduler.pool.num_blocks

    @property
    def kv_blocks_used(self) -> int:
        return self._scheduler.pool.num_used

    @property
    def kv_blocks_cached(self) -> int:
        """Blocks that nobody uses, whose contents a new request may use again."""
        return self._scheduler.cache.num_reusable

    @property
    def kv_wasted_share(self) -> float:
        """Share of the cache's slots for tokens that are allocated and empty; 0 when no block is in use."""
        return self._scheduler.num_empty_slots / self.num_kv_tokens

    @property
    def kv_dtype(self) -> str:
        """How keys and values are kept, as `memory.KV_BYTES` names it."""
        return self._runner.kv_dtype

    @property
    def weight_compression(self) -> str:
        """How plain weights are kept: "12-bit" where products read them so, or "none"."""
        return self._runner.weight_compression

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV fits into the cache, all sequences together."""
        return self.kv_blocks_total * self.config.block_size

    def oldest_waiting_seconds(self, now: float) -> float:
        """Age of the oldest request that waits, unscheduled, for its first token; 0 if none does."""
        oldest = (self._scheduler.oldest_unanswered_at(), self._grammars.oldest_received_at())
        return max(0.0, now - min((one for one in oldest if one is not None), default=now))

    def check_integrity(self) -> None:
        """AssertionError if a KV block, a sequence or an adapter's slot is lost or held twice."""
        self._scheduler.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()

    def adapter_snapshot(self) -> AdapterSnapshot:
        """What is loaded, and what of it is used."""
        if self.adapters is None:
            return AdapterSnapshot()
        running, waiting = self._scheduler.adapters_in_use()
        return self.adapters.snapshot(running, [*waiting, *self._grammars.adapters()])

    def reset_prefix_cache(self) -> None:
        """Let no request that starts from now on use KV that was computed before; running ones go on."""
        self._scheduler.reset_prefix_cache()

    def add_request(self, request: Request, now: float) -> None:
        """Accept a request, or raise (and count) ContextLengthError, InvalidRequestError, QueueFullError."""
        self.metrics.received()
        try:
            self._check(request, now)
            if self.adapters is not None:
                self.adapters.acquire(request.adapter, request.request_id)
        except ContextLengthError:
            self.metrics.rejected(RejectReason.CONTEXT_LENGTH)
            raise
        except AdapterNotFoundError:
            self.metrics.rejected(RejectReason.MODEL_NOT_FOUND)
            raise
        except InvalidRequestError:
            self.metrics.rejected(RejectReason.INVALID)
            raise
        except QueueFullError:
            self.metrics.rejected(RejectReason.QUEUE_FULL)
            raise
        grammar = request.sampling.grammar
        if grammar is None:
            self._scheduler.add(request, adapter=self._adapter_of(request))
        else:
            self._grammars.add(request, grammar)

    def abort(self, request_id: str, now: float) -> bool:
        """Drop a request whose client is gone; its blocks are free on return. False if it was not live."""
        return self._take_out(request_id, FinishReason.ABORT, now)

    def finish(self, request_id: str, now: float) -> bool:
        """End a request normally from outside (a stop string was found). False if it was not live."""
        return self._take_out(request_id, FinishReason.STOP, now)

    def enter_thread(self) -> None:
        """Be used by the calling thread from here on; needed where that is another one than made this."""
        self._runner.enter_thread()

    def close(self) -> None:
        """End the threads and processes, if there are any. Nothing may be called afterwards."""
        self._grammars.close()
        self._release()

    def _release(self) -> None:
        if self._offload is not None:
            self._offload.close()
        self._runner.close()

    def step(self, now: float) -> StepOutputs:
        """Go on by one step, see `StepLoop`; returns at once when nothing can run.

        If the runner fails, the requests of that step end with FinishReason.ERROR and the engine goes on;
        a device that no longer works makes the runner's exception pass through. While all requests wait for
        their grammars, it waits with them for a moment. A form that many steps have lacked is recorded first.
        """
        if self._runner.lacks_a_form:
            self._runner.record_missed()
            self._tell_graph_bytes()
        refused = self._take_grammars() if self._grammars else []
        done = self._steps.step(now)
        if done is None:
            if not refused:
                self._wait()
            return StepOutputs(refused)
        self._release_adapters(done.outputs)
        return replace(done, outputs=refused + done.outputs) if refused else done

    def _wait(self) -> None:
        """Nothing can run; what it is that all wait for shall go on."""
        if self._grammars:
            self._grammars.wait(GRAMMAR_WAIT_SECONDS)
        elif self._offload is not None and self._offload.is_reading:
            self._offload.wait(DISK_WAIT_SECONDS)
        elif self._is_loading:
            time.sleep(LOADING_WAIT_SECONDS)

    def _release_adapters(self, outputs: list[RequestOutput]) -> None:
        if self.adapters is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.adapters.release(output.request_id)

    def _open_offload(self) -> KVOffload | None:
        blocks, reach = self._runner.host_blocks, self._runner.proof_reach
        if blocks is None:
            return None
        if reach is not None:
            logger.warning(
                "KV offload: of prompts longer than the model's least window, %d tokens, nothing is kept",
                reach,
            )
        return open_offload(
            self.config,
            blocks,
            num_slots=blocks.num_slots,
            slot_bytes=blocks.slot_bytes,
            kept_as=self._runner.kept_as,
            counters=self.metrics.offload,
        )

    def _take_grammars(self) -> list[RequestOutput]:
        """Hand over to the scheduler whose grammar is ready; refuse those who cannot have theirs."""
        ready, unusable = self._grammars.take()
        for request, matcher in ready:
            self._scheduler.add(request, matcher, self._adapter_of(request))
        outputs = []
        for one in unusable:
            self.metrics.rejected(RejectReason.INVALID)
            outputs.append(
                RequestOutput(
                    one.request.request_id,
                    (),
                    FinishReason.ERROR,
                    error=one.message,
                    error_param=one.param,
                )
            )
        self._release_adapters(outputs)
        return outputs

    def _adapter_of(self, request: Request) -> Adapter:
        return NO_ADAPTER if self.adapters is None else self.adapters.of(request.request_id)

    def _take_out(self, request_id: str, reason: FinishReason, now: float) -> bool:
        if self.adapters is not None:
            self.adapters.release(request_id)
        request = self._grammars.remove(request_id)
        if request is not None:
            self.metrics.sizes(len(request.prompt_token_ids), 0)
            self.metrics.finished(reason, now - request.received_at, None)
            return True
        sequence = self._scheduler.remove(request_id)
        if sequence is None:
            return False
        self._accounts.ended(sequence, reason, now)
        return True

    def _check(self, request: Request, now: float) -> None:
        """Refuse what can never run, and what would wait behind a full queue."""
        check_request(
            request,
            vocab_size=self._runner.vocab_size,
            max_model_len=self.max_model_len,
            has_adapters=self.adapters is not None,
        )
        if request.request_id in self._scheduler or request.request_id in self._grammars:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is live already", param="request_id"
            )
        if self.num_waiting >= self.config.max_waiting:
            # A request that came now would wait about as long as the oldest has waited.
            seconds = math.ceil(self.oldest_waiting_seconds(now))
            raise QueueFullError(self.num_waiting, min(max(1, seconds), LONGEST_RETRY_AFTER_SECONDS))
