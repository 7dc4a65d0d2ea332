"""What steps did, in numbers for the metrics and in outputs for those who asked. Decides nothing."""

from headway_runtime.batch import Batch, StepResult
from headway_runtime.commits import Committed, Progress
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.metrics import EngineMetrics, RejectReason
from headway_runtime.request import FinishReason, RequestOutput, TokenLogprobs
from headway_runtime.scheduler import Schedule, Scheduler
from headway_runtime.sequence import Sequence

NOT_FINITE = "the model's logits are not finite; check the weights, or serve it with another --dtype"


class StepAccounts:
    """scheduler: whose decisions these are. policy: learns what guessing costs and brings; None if nobody
    guesses."""

    def __init__(self, metrics: EngineMetrics, scheduler: Scheduler, policy: DraftPolicy | None) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._policy = policy

    def scheduled(self, schedule: Schedule, now: float) -> None:
        """Count who starts and who has to start again."""
        for sequence in schedule.admitted:
            self._metrics.scheduled(now - sequence.request.received_at)
            cached = sequence.num_cached
            self._metrics.moments.prompt(self._scheduler.prompt_cost.of(cached, sequence.num_prompt - cached))
            if self._scheduler.cache.is_read_by(sequence):
                self._metrics.cache_queried(sequence.num_prompt)
                self._metrics.tokens(cached=sequence.num_cached)
        for _ in schedule.preempted:
            self._metrics.preempted()

    def step(self, batch: Batch, result: StepResult, seconds: float) -> None:
        """Count a step that was read."""
        num_prompts = len(batch.chunks) - batch.num_decodes
        self._metrics.step(
            seconds,
            batch.num_prefill_tokens,
            batch.num_decodes,
            num_prompts,
            is_recorded=result.is_recorded,
        )
        if not batch.num_drafts:
            # A list is summed in half the time that a generator takes, and sequences may be hundreds.
            starts = [chunk.start for chunk in batch.chunks[: batch.num_decodes]]
            num_kv_tokens = sum(starts) + batch.num_decodes
            cost = self._scheduler.prompt_cost
            prompts = sum(cost.of(one.start, one.num_tokens) for one in batch.chunks[batch.num_decodes :])
            self._metrics.moments.step(1000.0 * seconds, prompts, batch.num_decodes, num_kv_tokens)
        if self._policy is not None:
            self._count_guesses(batch, result, seconds, self._policy)

    def _count_guesses(self, batch: Batch, result: StepResult, seconds: float, policy: DraftPolicy) -> None:
        verified = result.verified
        num_drafted = sum(one.num_drafted for one in verified.values())
        if not batch.num_prefill_tokens:
            policy.observe_step(batch.num_decodes + num_drafted, seconds - result.draft_seconds)
            plain_seconds = policy.plain_seconds(batch.num_decodes)
            if verified and plain_seconds is not None:
                num_tokens = batch.num_decodes + sum(len(one.samples) for one in verified.values())
                policy.observe_outcome(batch.num_decodes, num_tokens, seconds - result.catch_up_seconds)
                self._metrics.drafts.took(seconds, plain_seconds * num_tokens / batch.num_decodes)
            elif result.draft_seconds:
                # Spent for guesses that are yet to come, or never do.
                self._metrics.drafts.took(result.draft_seconds, 0.0)
        elif result.num_caught_up:
            self._metrics.drafts.took(result.catch_up_seconds, 0.0)
        if result.num_caught_up:
            policy.observe_catch_up(result.num_caught_up, result.catch_up_seconds)
        if result.num_draft_passes and verified:
            policy.observe_drafts(len(verified), result.num_draft_passes, result.draft_pass_seconds)
        for one in verified.values():
            self._metrics.drafts.drafted(one.num_drafted, len(one.samples))

    def outputs(self, committed: Committed, now: float) -> list[RequestOutput]:
        """What each request gets of a step."""
        outputs: list[RequestOutput] = []
        # Mostly all tokens of a step have followed those of one step before.
        gaps: dict[float, int] = {}
        num_generated = 0
        for one in committed.progress:
            sample, sequence, previous_token_at = one.sample, one.sequence, one.previous_token_at
            token_id = sample.token_id
            if token_id is None:
                outputs.append(self._output(one, now))
                continue
            num_generated += 1
            if previous_token_at is None:
                outputs.append(self._output(one, now))
                continue
            gaps[previous_token_at] = gaps.get(previous_token_at, 0) + 1
            if (
                one.finish_reason is None
                and not one.more
                and sample.logprobs is None
                and previous_token_at != sequence.first_token_at
            ):
                outputs.append(RequestOutput(sequence.request.request_id, (token_id,), computed_at=now))
                continue
            num_generated += len(one.more)
            outputs.append(self._output(one, now))
        for previous_token_at, count in gaps.items():
            self._metrics.inter_token(now - previous_token_at, count)
        self._metrics.tokens(prompt_computed=committed.num_prompt_tokens, generated=num_generated)
        return outputs

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Count the end of a request that was scheduled, or waited for that."""
        self._metrics.sizes(sequence.num_prompt, sequence.num_generated)
        self._metrics.moments.answer(sequence.num_generated)
        if self._policy is not None and sequence.num_generated:
            self._policy.observe_answer(sequence.acceptance, sequence.num_prompt - sequence.num_cached)
        seconds = now - sequence.request.received_at
        self._metrics.finished(reason, seconds, sequence.seconds_per_output_token())

    def _output(self, progress: Progress, now: float) -> RequestOutput:
        sequence, sample = progress.sequence, progress.sample
        request_id = sequence.request.request_id
        if sample.token_id is None:
            if sample.error_param is not None and sequence.num_generated == 0:
                # The client's fault, which only the first token could show.
                self._metrics.rejected(RejectReason.INVALID)
            else:
                self.ended(sequence, FinishReason.ERROR, now)
            return RequestOutput(
                request_id,
                (),
                FinishReason.ERROR,
                error=sample.error or NOT_FINITE,
                error_param=sample.error_param,
            )
        queue_seconds = prefill_seconds = None
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        num_cached_tokens = 0
        if progress.previous_token_at is not None:
            if sequence.num_generated - len(progress.more) == 2:
                self._metrics.first_decoded(now - progress.previous_token_at)
        elif sequence.scheduled_at is not None:
            queue_seconds = sequence.scheduled_at - sequence.request.received_at
            prefill_seconds = now - sequence.scheduled_at
            self._metrics.prefilled(prefill_seconds)
            self._scheduler.promptness.observe(sequence, prefill_seconds)
            num_cached_tokens = sequence.num_cached
            if sequence.request.sampling.num_prompt_logprobs is not None:
                prompt_logprobs = (None, *sequence.prompt_logprobs)
                # Delivered; they may be many.
                sequence.prompt_logprobs = []
        if progress.finish_reason is not None:
            self.ended(sequence, progress.finish_reason, now)
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
        is_between = queue_seconds is None and progress.finish_reason is None
        return RequestOutput(
            request_id,
            tuple(one.token_id for one in samples if one.token_id is not None),
            progress.finish_reason,
            tuple(one.logprobs for one in samples if one.logprobs is not None),
            computed_at=now,
            num_cached_tokens=num_cached_tokens,
            queue_seconds=queue_seconds,
            prefill_seconds=prefill_seconds,
            prompt_logprobs=prompt_logprobs,
            late_share=None if is_between else self._scheduler.late_share,
            max_num_seqs=None if is_between else self._scheduler.limits.max_num_seqs,
        )
