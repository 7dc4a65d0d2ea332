"""A runner's steps: a Batch is launched, kernel by kernel or as a recording, and then read.

Of several ranks the first one calls; what computes runs on all of them, with the rows alone that it needs.
Only the first one guesses, samples and reads.
"""

import time
from typing import TYPE_CHECKING

import torch

from headway_runtime import transfers
from headway_runtime.adapters.adapter_rows import rows_of
from headway_runtime.batch import Batch, StepResult
from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.on_ranks import GraphsOnRanks
from headway_runtime.logprobs import PromptLogprobs
from headway_runtime.model_config import ModelConfig
from headway_runtime.parallel.ranks import on_all_ranks
from headway_runtime.parallel.step_batch import StepBatch, step_batch
from headway_runtime.pending_step import PendingSamples, PendingStep, asked_logprobs
from headway_runtime.sampler import Sampler
from headway_runtime.step_errors import ends_its_step_alone
from headway_runtime.step_inputs import StepInputBuilder, StepInputs
from headway_runtime.thread_governor import ThreadGovernor
from headway_runtime.token_feed import TokenFeed
from headway_runtime.verification import sampled_rows, with_drafts

if TYPE_CHECKING:
    from headway_runtime.device_sampler import DeviceSampler


def _compacted(runner: "StepsOnRanks", batch: Batch, *more: object) -> tuple[object, ...]:
    return (step_batch(batch, runner._block_size, runner._feed.sources(batch.chunks)), *more)


class StepsOnRanks(GraphsOnRanks):
    """The part of a runner that computes."""

    _model_config: ModelConfig
    _block_size: int
    _inputs: StepInputBuilder
    _sampler: "Sampler | DeviceSampler"
    _feed: TokenFeed
    _governor: ThreadGovernor | None
    # Of the step before, on ranks that read none.
    _step_before: transfers.Moment | None
    # What was computed last.
    _hidden: torch.Tensor

    @property
    def vocab_size(self) -> int:
        return self._model_config.vocab_size

    def execute(self, batch: Batch) -> StepResult:
        """Compute all chunks, and a sample after each one that reaches its last known token."""
        return self.read(self.launch(batch))

    @ends_its_step_alone
    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Begin to; on a GPU without waiting for anything, but for guesses.

        One step before it may still be unread: chunks may end in its samples, which are UNREAD.
        """
        started_at = time.monotonic()
        if self._speculator is not None:
            batch = with_drafts(batch, self._speculator.propose(batch))
        form = None if self._graphs is None else self._graphs.form_for(batch.chunks)
        if form is not None:
            return self._launch_recorded(batch, form, started_at)
        inputs, logits = self._compute(batch)
        to_logits, vocab_size = self._logits_of_rows, self.vocab_size
        asked = [
            (one.index, PromptLogprobs(one.row, to_logits, vocab_size, one.token_ids, one.num_top))
            for one in asked_logprobs(batch, inputs.order)
        ]
        samples: PendingSamples | None = None
        moment: transfers.Moment | None = None
        if logits is not None:
            chunks = [batch.chunks[index] for index in inputs.sampled]
            if any(chunk.ahead for chunk in chunks):
                own = dict.fromkeys(inputs.sampled)
                chunks = [row for index in own for row in sampled_rows(batch.chunks[index])]
            samples = self._sampler.launch(logits, chunks, self._feed)
            self._feed.keep(chunks, samples.tokens)
        else:
            self._feed.keep((), None)
            moment = transfers.Moment(self._device)
        if self._speculator is not None:
            self._speculator.computed(batch)
        seconds = time.monotonic() - started_at
        is_recorded = self._model.ran_as_one
        return PendingStep(batch, inputs.sampled, samples, moment, asked, seconds, is_recorded=is_recorded)

    def _launch_recorded(self, batch: Batch, form: StepForm, started_at: float) -> PendingStep:
        """The same of a step that runs as a recording, after all of whose rows a token is sampled."""
        self._replay(batch, form)
        assert self._graphs is not None
        chunks = batch.chunks
        samples: PendingSamples
        if form.draws:
            rows = [one for one in chunks for _ in range(one.num_tokens)]
            samples = self._graphs.samples([one.sampling for one in rows])
        else:
            rows = [row for one in chunks for row in sampled_rows(one)]
            samples = self._sampler.launch(self._graphs.logits(len(rows)), rows, self._feed)
        self._feed.keep(rows, samples.tokens)
        if self._speculator is not None:
            self._speculator.computed(batch)
        sampled = [index for index, one in enumerate(chunks) for _ in range(one.num_tokens)]
        seconds = time.monotonic() - started_at
        return PendingStep(batch, sampled, samples, None, (), seconds, is_recorded=True)

    @on_all_ranks(told=_compacted)
    @torch.inference_mode()
    def _replay(self, batch: Batch | StepBatch, form: StepForm) -> None:
        """Launch a recording; its tokens, or its logits, are then there on the first rank."""
        began_at = time.monotonic()
        graphs = self._graphs
        assert graphs is not None, "ranks agree on what is recorded"
        chunks, params = batch.chunks, None
        sources = batch.sources if isinstance(batch, StepBatch) else self._feed.sources(batch.chunks)
        if isinstance(batch, Batch) and form.draws:
            params = [one.sampling for one in batch.chunks for _ in range(one.num_tokens)]
        graphs.replay(chunks, form, self._feed.tokens, sources, params)
        if self.ranks.rank > 0:
            if form.draws:
                self._feed.keep((), graphs.tokens)
            else:
                self._feed.expect(sum(one.num_tokens for one in chunks), self._device)
            self._end_step(began_at)

    @ends_its_step_alone
    @torch.inference_mode()
    def read(self, pending: PendingStep) -> StepResult:
        """Wait for a step, the first of those that were launched. One with prompts' log-probabilities must be
        read before the next is launched."""
        began_at = time.monotonic()
        batch = pending.batch
        with self.ranks.waiting():
            samples, checked = pending.read()
        of_prompts = {index: begun.read() for index, begun in pending.asked}
        speculator = self._speculator
        if speculator is None:
            result = StepResult(tuple(samples), of_prompts, is_recorded=pending.is_recorded)
        else:
            speculator.accepted(batch, checked)
            result = StepResult(
                tuple(samples),
                of_prompts,
                checked,
                speculator.seconds,
                speculator.num_passes,
                speculator.pass_seconds,
                *speculator.caught_up,
                is_recorded=pending.is_recorded,
            )
        if self._governor is not None:
            self._governor.after_step(pending.seconds + time.monotonic() - began_at)
        return result

    @on_all_ranks(told=_compacted)
    @torch.inference_mode()
    def _compute(self, batch: Batch | StepBatch) -> tuple[StepInputs, torch.Tensor | None]:
        """Compute all chunks; logits where tokens are to be sampled, if they are anywhere."""
        began_at = time.monotonic()
        sources = batch.sources if isinstance(batch, StepBatch) else self._feed.sources(batch.chunks)
        inputs = self._inputs.build(batch, sources)
        self._feed.fill(inputs.token_ids, inputs.fed, self._group)
        hidden = self._forward(batch, inputs)
        self._hidden = hidden
        logits: torch.Tensor | None = None
        if inputs.sampled:
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))[: len(inputs.sampled)]
        if self.ranks.rank > 0:
            # The first rank samples.
            self._feed.expect(len(inputs.sampled), self._device)
            self._end_step(began_at)
        return inputs, logits

    @on_all_ranks
    @torch.inference_mode()
    def _logits_of_rows(self, first: int, last: int) -> torch.Tensor:
        """Logits after some rows of what was computed last."""
        return self._model.logits(self._hidden[first:last])

    @on_all_ranks(told=_compacted)
    @torch.inference_mode()
    def all_logits(self, batch: Batch | StepBatch) -> torch.Tensor:
        """Logits [tokens, vocab_size] after each token of a batch's only chunk; no token is sampled."""
        began_at = time.monotonic()
        (chunk,) = batch.chunks
        inputs = self._inputs.build(batch)
        hidden = self._forward(batch, inputs)
        logits = self._model.logits(hidden[: chunk.num_tokens])
        if self.ranks.rank > 0:
            self._end_step(began_at)
        return logits

    def _end_step(self, began_at: float) -> None:
        """On ranks that sample nothing, so read no step: the next one reuses memory of the last but one."""
        moment = transfers.Moment(self._device)
        if self._step_before is not None:
            self._step_before.wait()
        self._step_before = moment
        if self._governor is not None:
            self._governor.after_step(time.monotonic() - began_at)

    def _forward(self, batch: Batch | StepBatch, inputs: StepInputs) -> torch.Tensor:
        if self._bank is not None:
            all_chunks = batch.chunks  # which a StepBatch makes each time
            chunks = [all_chunks[index] for index in inputs.order]
            self._bank.rows = rows_of(
                [(one.adapter, one.num_tokens) for one in chunks], len(inputs.token_ids), self._device
            )
        return self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
