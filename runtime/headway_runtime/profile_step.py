"""What the largest steps of an engine take of a GPU's memory beside weights and KV cache: measured.

Runs them once, on a cache of one block to which all sequences point: what is computed is nonsense, what it
takes is not. The kernels of such steps are compiled by the way, so that no request waits for that.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig
from headway_runtime.layers.attention import KVCache
from headway_runtime.models.model import Model
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import make_sampler
from headway_runtime.step_inputs import StepInputBuilder

# A request that asks for all that takes memory: edited logits, filters, log-probabilities.
DEAREST = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, num_logprobs=20)
CHEAPEST = SamplingParams(temperature=0.0)


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


def _batch(counts: list[int], block_size: int) -> Batch:
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
    """Runs such steps. cache, inputs: the small cache's. samples: whether this rank chooses tokens."""

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
    ) -> None:
        self._model, self._cache, self._inputs, self._config = model, cache, inputs, config
        self._sampler = make_sampler(vocab_size, device) if samples else None

    def measure(self, num_recorded_rows: int, meter: Meter) -> StepBytes:
        """num_recorded_rows: of the largest recorded step; 0 where none is."""
        prompts = meter.peak_bytes(lambda: self._run(largest_batch(self._config), DEAREST))
        decodes = 0
        if num_recorded_rows:
            batch = decode_batch(num_recorded_rows, self._config)
            decodes = meter.peak_bytes(lambda: self._run(batch, CHEAPEST))
        return StepBytes(prompts, decodes)

    @torch.inference_mode()
    def _run(self, batch: Batch, sampling: SamplingParams) -> None:
        """Guesses are sampled after, too: so many more rows of logits."""
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        num_samples = len(batch.chunks)
        if sampling is DEAREST:
            num_samples = min(
                batch.num_tokens, num_samples * (1 + self._config.envelope.num_speculative_tokens)
            )
        logits = self._model.logits(hidden[:num_samples])
        if self._sampler is not None:
            row = Chunk("", [0], 0, 1, array("q", [0]), 0, samples=True, sampling=sampling)
            self._sampler(logits, [row] * num_samples)
