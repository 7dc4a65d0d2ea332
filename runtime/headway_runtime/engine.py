"""The step loop: schedule, run, commit; and the numbers that fall out of it.

Owns the scheduler, the runner and the order in which they are called. Knows nothing of text, HTTP or other
processes, and reads only the clock it was given; what it starts is hidden in `GrammarQueue`, which compiles
grammars on the side. One step is one call of `step`:

    schedule (who computes what) -> runner.execute (tokens) -> commit (state, finished ones leave) -> outputs

Every accepted request gets exactly one output with a finish reason, unless `abort` or `finish` took it out.
"""

import logging
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter
from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.adapters.service import AdapterService
from headway_runtime.batch import Batch, StepResult
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
from headway_runtime.offload.tiers import Copies, KVOffload
from headway_runtime.parallel.open_ranks import open_ranks
from headway_runtime.parallel.started import StartedRanks
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams
from headway_runtime.runner import Runner
from headway_runtime.scheduler import Progress, Scheduler
from headway_runtime.sequence import Sequence

logger = logging.getLogger(__name__)

LONGEST_RETRY_AFTER_SECONDS = 60
# How long a step with nothing to compute waits for a grammar; aborts and new requests wait as long.
GRAMMAR_WAIT_SECONDS = 0.002
# The same where adapters are being read.
LOADING_WAIT_SECONDS = 0.002
# Likewise for a disk that is read for a request.
DISK_WAIT_SECONDS = 0.002
NOT_FINITE = "the model's logits are not finite; check the weights, or serve it with another --dtype"


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step did. All zero and empty when there was nothing to do.

    outputs: one entry per request that got tokens or ended.
    num_decodes: sequences that computed a single token; num_prefill_tokens: tokens of all others.
    """

    outputs: list[RequestOutput]
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_preempted: int = 0


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
            priority_ageing_seconds=config.priority_ageing_seconds,
            enable_prefix_caching=config.enable_prefix_caching,
            proof_reach=self._runner.proof_reach,
            draft_policy=DraftPolicy(is_adaptive=config.speculative is None or config.speculative.adaptive),
            max_adapters=0 if config.lora is None else config.lora.max_loras,
            offload=self._offload,
        )
        # None where the engine was not told to have any.
        self.adapters = None if config.lora is None else AdapterService(config.lora, self._runner)
        for module in () if config.lora is None else config.lora.modules:
            assert self.adapters is not None
            self.adapters.load_now(module)
        self._grammars = GrammarQueue(
            Path(config.model_path), self._runner.vocab_size, config.structured_output_timeout_seconds
        )

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
        """Count against other SLO targets from now on."""
        self.metrics.set_targets(targets)

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
        return self.num_running + self.num_waiting > 0 or self._is_loading

    @property
    def _is_loading(self) -> bool:
        return self.adapters is not None and self.adapters.is_loading

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

    def close(self) -> None:
        """End the threads and processes, if there are any. Nothing may be called afterwards."""
        self._grammars.close()
        self._release()

    def _release(self) -> None:
        if self._offload is not None:
            self._offload.close()
        self._runner.close()

    def step(self, now: float) -> StepOutputs:
        """Compute one step and return what it did; returns at once when nothing can run.

        If the runner fails, the requests of that step end with FinishReason.ERROR and the engine goes on;
        a device that no longer works makes the runner's exception pass through. While all requests wait for
        their grammars, it waits with them for a moment.
        """
        refused = self._take_grammars() if self._grammars else []
        schedule = self._scheduler.schedule(now)
        for sequence in schedule.admitted:
            self._count_start(sequence, now)
        for _ in schedule.preempted:
            self.metrics.preempted()
        batch = schedule.batch
        if not batch.chunks:
            if not refused:
                self._wait()
            return StepOutputs(refused, num_preempted=len(schedule.preempted))
        try:
            if schedule.blocks_to_clear:
                self._runner.clear_blocks(array("q", schedule.blocks_to_clear))
            if schedule.copies:
                self._copy_blocks(schedule.copies)
            result = self._runner.execute(batch)
        except (RuntimeError, ValueError, IndexError, TypeError, MemoryError) as error:
            if not self._runner.is_usable():
                raise
            logger.exception("a step of %d sequences failed; their requests end", len(batch.chunks))
            self._scheduler.cache.not_cleared(schedule.blocks_to_clear)
            self._scheduler.cache.undo(schedule.copies)
            outputs = self._fail(batch, f"{type(error).__name__}: {error}")
        else:
            outputs = self._commit(batch, result, now)
        self._release_adapters(outputs)
        return StepOutputs(
            refused + outputs,
            batch.num_tokens - batch.num_decodes - batch.num_drafts,
            batch.num_decodes,
            len(schedule.preempted),
        )

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

    def _copy_blocks(self, copies: Copies) -> None:
        assert self._offload is not None
        self._offload.copied(copies, *self._runner.copy_blocks(copies.stores, copies.loads))

    def _take_grammars(self) -> list[RequestOutput]:
        """Hand over to the scheduler whose grammar is ready; refuse those who cannot have theirs."""
        ready, unusable = self._grammars.take()
        for request, matcher in ready:
            self._scheduler.add(request, matcher, self._adapter_of(request))
        outputs = []
        for one in unusable:
            self.metrics.rejected(RejectReason.INVALID)
            grammar = one.request.sampling.grammar
            assert grammar is not None
            outputs.append(
                RequestOutput(
                    one.request.request_id,
                    (),
                    FinishReason.ERROR,
                    error=one.message,
                    error_param=grammar.param,
                )
            )
        self._release_adapters(outputs)
        return outputs

    def _commit(self, batch: Batch, result: StepResult, started_at: float) -> list[RequestOutput]:
        ended_at = self._clock()
        num_prefill_tokens = batch.num_tokens - batch.num_decodes - batch.num_drafts
        self.metrics.step(
            ended_at - started_at,
            num_prefill_tokens,
            batch.num_decodes,
            len(batch.chunks) - batch.num_decodes,
        )
        if self._offload is not None:
            self._offload.observe_step(num_prefill_tokens, ended_at - started_at)
        if self.config.speculative is not None:
            self._count_drafts(batch, result, ended_at - started_at)
        committed = self._scheduler.commit(batch, result, ended_at)
        num_generated = sum((one.sample.token_id is not None) + len(one.more) for one in committed.progress)
        self.metrics.tokens(prompt_computed=committed.num_prompt_tokens, generated=num_generated)
        return [self._report(one, ended_at) for one in committed.progress]

    def _count_drafts(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """Learn from a step what guessing costs and brings, and count it."""
        policy, verified = self._scheduler.draft_policy, result.verified
        num_drafted = sum(one.num_drafted for one in verified.values())
        if len(batch.chunks) == batch.num_decodes:
            policy.observe_step(batch.num_decodes + num_drafted, seconds - result.draft_seconds)
            plain_seconds = policy.plain_seconds(batch.num_decodes)
            if verified and plain_seconds is not None:
                num_accepted = sum(len(one.samples) for one in verified.values())
                share = (batch.num_decodes + num_accepted) / batch.num_decodes
                self.metrics.drafts.took(seconds, plain_seconds * share)
            elif result.draft_seconds:
                # Spent for guesses that are yet to come, or never do.
                self.metrics.drafts.took(result.draft_seconds, 0.0)
        elif result.num_caught_up:
            self.metrics.drafts.took(result.catch_up_seconds, 0.0)
        if result.num_caught_up:
            policy.observe_catch_up(result.num_caught_up, result.catch_up_seconds)
        if result.num_draft_passes and verified:
            policy.observe_drafts(len(verified), result.num_draft_passes, result.draft_pass_seconds)
        for one in verified.values():
            self.metrics.drafts.drafted(one.num_drafted, len(one.samples))

    def _report(self, progress: Progress, now: float) -> RequestOutput:
        sequence, sample = progress.sequence, progress.sample
        request_id = sequence.request.request_id
        if sample.token_id is None:
            if sample.error_param is not None and sequence.num_generated == 0:
                # The client's fault, which only the first token could show.
                self.metrics.rejected(RejectReason.INVALID)
            else:
                self._count_end(sequence, FinishReason.ERROR, now)
            return RequestOutput(
                request_id,
                (),
                FinishReason.ERROR,
                error=sample.error or NOT_FINITE,
                error_param=sample.error_param,
            )
        queue_seconds = prefill_seconds = prompt_logprobs = None
        num_cached_tokens = 0
        if progress.previous_token_at is not None:
            gap_seconds = now - progress.previous_token_at
            self.metrics.inter_token(gap_seconds)
            if sequence.num_generated - len(progress.more) == 2:
                self.metrics.first_decoded(gap_seconds)
        elif sequence.scheduled_at is not None:
            queue_seconds = sequence.scheduled_at - sequence.request.received_at
            prefill_seconds = now - sequence.scheduled_at
            self.metrics.prefilled(prefill_seconds)
            num_cached_tokens = sequence.num_cached
            if sequence.request.sampling.num_prompt_logprobs is not None:
                prompt_logprobs = (None, *sequence.prompt_logprobs)
                # Delivered; they may be many.
                sequence.prompt_logprobs = []
        if progress.finish_reason is not None:
            self._count_end(sequence, progress.finish_reason, now)
        if progress.finish_reason is FinishReason.ERROR:
            # The only error that comes with a token: one that the grammar does not take.
            assert sequence.matcher is not None
            return RequestOutput(
                request_id,
                (),
                FinishReason.ERROR,
                error=sequence.matcher.error,
                error_param=sequence.matcher.param,
            )
        samples = (sample, *progress.more)
        return RequestOutput(
            request_id,
            tuple(one.token_id for one in samples if one.token_id is not None),
            progress.finish_reason,
            tuple(one.logprobs for one in samples if one.logprobs is not None),
            num_cached_tokens=num_cached_tokens,
            queue_seconds=queue_seconds,
            prefill_seconds=prefill_seconds,
            prompt_logprobs=prompt_logprobs,
        )

    def _fail(self, batch: Batch, error: str) -> list[RequestOutput]:
        now = self._clock()
        for chunk in batch.chunks:
            self._take_out(chunk.request_id, FinishReason.ERROR, now)
        return [
            RequestOutput(chunk.request_id, (), FinishReason.ERROR, error=error) for chunk in batch.chunks
        ]

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
        self._count_end(sequence, reason, now)
        return True

    def _count_start(self, sequence: Sequence, now: float) -> None:
        self.metrics.scheduled(now - sequence.request.received_at)
        if self._scheduler.cache.is_read_by(sequence):
            self.metrics.cache_queried(sequence.num_prompt)
            self.metrics.tokens(cached=sequence.num_cached)

    def _count_end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.num_generated:
            self._scheduler.draft_policy.observe_answer(sequence.num_generated)
        self.metrics.sizes(sequence.num_prompt, sequence.num_generated)
        self.metrics.finished(reason, now - sequence.request.received_at, sequence.seconds_per_output_token())

    def _check(self, request: Request, now: float) -> None:
        """Refuse what can never run, and what would wait behind a full queue."""
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
        if num_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"prompt has {num_tokens} tokens, but the context of {self.max_model_len} tokens must hold "
                "it and at least one generated token; shorten the prompt",
                param="prompt",
            )
        vocab_size = self._runner.vocab_size
        if request.adapter and self.adapters is None:
            raise AdapterNotFoundError(request.adapter)
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
            raise InvalidRequestError(
                f"prompt holds a token id outside [0, {vocab_size - 1}]; use this model's tokenizer",
                param="prompt",
            )
        _check_tokens(request.sampling, vocab_size)
        if request.request_id in self._scheduler or request.request_id in self._grammars:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is live already", param="request_id"
            )
        if self.num_waiting >= self.config.max_waiting:
            # A request that came now would wait about as long as the oldest has waited.
            seconds = math.ceil(self.oldest_waiting_seconds(now))
            raise QueueFullError(self.num_waiting, min(max(1, seconds), LONGEST_RETRY_AFTER_SECONDS))


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """InvalidRequestError for token ids that the model does not have."""
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for param, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequestError(
                f"{param} holds a token id outside [0, {vocab_size - 1}]; use this model's tokenizer",
                param=param,
            )
