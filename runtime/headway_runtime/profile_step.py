"""What the largest steps of an engine take of a GPU's memory beside weights and KV cache: measured.

Runs them once, on a cache of one block to which all sequences point: what is computed is nonsense, what it
takes is not. Kernels of such steps that are not compiled yet are compiled by the way; those of all others
are compiled ahead (`compiling`), so that no request waits for that. Where a model guesses tokens it runs
first, as in a step: what it took then serves the other.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig
from headway_runtime.draft_model import CATCH_UP_TOKENS
from headway_runtime.layers.attention import KVCache
from headway_runtime.model_loading import make_cache, make_inputs
from headway_runtime.models.model import Model
from headway_runtime.pending_step import PendingSamples
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import make_sampler
from headway_runtime.speculator import LoadedDraft
from headway_runtime.step_inputs import StepInputBuilder

# A request that asks for all that takes memory: edited logits, filters, log-probabilities.
DEAREST = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, num_logprobs=20)
CHEAPEST = SamplingParams(temperature=0.0)
# Of guesses: their requests' filters, and nothing else.
GUESSED = SamplingParams(top_k=50, top_p=0.9, min_p=0.01)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """prompts: what the largest step takes. decodes: the largest that is recorded; 0 if none is."""

    prompts: int
    decodes: int


class Meter(Protocol):
    """Says what work takes."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """The most that the work had taken at any time, beyond what was taken before."""


class CudaMeter:
    """As PyTorch's allocator has it: pieces that lie between tensors count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self, work: Callable[[], None]) -> int:
        device = self._device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_reserved(device) - before
        torch.cuda.empty_cache()
        return max(0, int(peak))


def largest_batch(config: EngineConfig) -> Batch:
    """All sequences that there may be, with all tokens that a step may compute."""
    envelope = config.envelope
    num_seqs = min(envelope.max_num_seqs, envelope.max_num_batched_tokens)
    share, more = divmod(envelope.max_num_batched_tokens, num_seqs)
    # Those with one token come first.
    counts = [share] * (num_seqs - more) + [share + 1] * more
    counts = [min(count, config.max_model_len - 1) for count in counts]
    return _batch(counts, config.block_size)


def decode_batch(num_rows: int, config: EngineConfig) -> Batch:
    """So many sequences, each of which computes one token."""
    return _batch([1] * num_rows, config.block_size)


def _rows(count: int, sampling: SamplingParams) -> list[Chunk]:
    """As a sampler is told of them."""
    return [Chunk("", [0], 0, 1, array("q", [0]), 0, samples=True, sampling=sampling)] * count


def _batch(counts: Sequence[int], block_size: int) -> Batch:
    chunks = tuple(
        Chunk(
            str(index),
            [0] * count,
            0,
            count,
            array("q", [0]) * (-(-count // block_size)),
            num_generated=0,
            samples=True,
            sampling=DEAREST,
        )
        for index, count in enumerate(counts)
    )
    return Batch(chunks, counts.count(1), sum(counts))


class StepProfile:
    """Runs such steps. cache, inputs: the small cache's. samples: whether this rank chooses tokens.

    vocab_size: that tokens are chosen from. dearest: how they are chosen in the largest step.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        inputs: StepInputBuilder,
        config: EngineConfig,
        vocab_size: int,
        device: torch.device,
        *,
        samples: bool,
        dearest: SamplingParams = DEAREST,
    ) -> None:
        self.model, self.cache, self.config = model, cache, config
        self._inputs = inputs
        self._vocab_size, self._dearest = vocab_size, dearest
        self._sampler = make_sampler(vocab_size, device) if samples else None

    def measure(
        self, num_recorded_rows: int, meter: Meter, guessing: "StepProfile | None" = None
    ) -> StepBytes:
        """num_recorded_rows: of the largest recorded step; 0 where none is. guessing: of the model that runs
        before this one in each step."""

        def largest() -> None:
            if guessing is not None:
                guessing.run_largest()
            self.run_largest()

        prompts = meter.peak_bytes(largest)
        decodes = 0
        if num_recorded_rows:
            batch = decode_batch(num_recorded_rows, self.config)
            decodes = meter.peak_bytes(lambda: self._read(self._launch(batch, CHEAPEST)))
        return StepBytes(prompts, decodes)

    def run_largest(self) -> None:
        self._read(self._launch(largest_batch(self.config), self._dearest))

    def launch(self, num_recorded_rows: int) -> None:
        """What `measure` runs, without a look at what comes of it."""
        self._launch(largest_batch(self.config), self._dearest)
        if num_recorded_rows:
            self._launch(decode_batch(num_recorded_rows, self.config), CHEAPEST)

    @torch.inference_mode()
    def launch_shape(self, counts: Sequence[int]) -> None:
        """A step whose sequences compute so many tokens each. Of all rows there are logits: they may be
        guesses, or a prompt's."""
        batch = _batch(counts, self.config.block_size)
        logits = self._logits(self._hidden(batch))
        if self._sampler is not None:
            self._sampler.launch(logits[: len(counts)], _rows(len(counts), CHEAPEST))

    @torch.inference_mode()
    def _read(self, samples: PendingSamples | None) -> None:
        if samples is not None:
            samples.read()

    @torch.inference_mode()
    def _launch(self, batch: Batch, sampling: SamplingParams) -> PendingSamples | None:
        """Guesses are sampled after, too: so many more rows of logits."""
        hidden = self._hidden(batch)
        num_samples = len(batch.chunks)
        if sampling is self._dearest:
            num_samples = min(
                batch.num_tokens, num_samples * (1 + self.config.envelope.num_speculative_tokens)
            )
        logits = self._logits(hidden[:num_samples])
        return None if self._sampler is None else self._sampler.launch(logits, _rows(num_samples, sampling))

    def _hidden(self, batch: Batch) -> Tensor:
        inputs = self._inputs.build(batch)
        return self.model.forward(inputs.token_ids, inputs.positions, self.cache, inputs.attention)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        if self._sampler is None or logits.shape[1] == self._vocab_size:
            return logits
        # A model that guesses may have some tokens more or less than the one that checks.
        return functional.pad(logits, (0, self._vocab_size - logits.shape[1])).contiguous()


def draft_profile(
    draft: LoadedDraft, config: EngineConfig, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> StepProfile:
    """Of the model that guesses: its largest step is one in which it computes what it lacks of all sequences.

    vocab_size: of the model that checks.
    """
    most_tokens = min(CATCH_UP_TOKENS, config.envelope.max_num_batched_tokens)
    own = replace(
        config,
        max_model_len=min(config.max_model_len, draft.model_config.max_position_embeddings),
        envelope=replace(
            config.envelope,
            max_num_seqs=min(config.envelope.max_num_seqs, most_tokens),
            max_num_batched_tokens=most_tokens,
            num_speculative_tokens=0,
        ),
    )
    cache = make_cache(draft.model, draft.model_config, own, 1, dtype, device)
    inputs = make_inputs(draft.model, own, cache, dtype, device)
    return StepProfile(draft.model, cache, inputs, own, vocab_size, device, samples=True, dearest=GUESSED)
