"""A step between its launch and its reading: what the runner keeps of it, and how that is taken apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway_runtime.batch import Batch, Sample, Verified
from headway_runtime.logprobs import PromptLogprobs
from headway_runtime.transfers import Moment
from headway_runtime.verification import verified


class PendingSamples(Protocol):
    """Samples that are being chosen. tokens: int64, one per row, -1 where there is none; on the device."""

    @property
    def tokens(self) -> Tensor: ...
    def read(self) -> list[Sample]:
        """Waits for the device."""


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Log-probabilities of prompt tokens that follow computed ones.

    index: of the chunk. row: of the first computed one. token_ids: those that follow. num_top: how many
    likeliest ones.
    """

    index: int
    row: int
    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class PendingStep:
    """batch: with the guesses that it checks. sampled: of each sampled row, the index of its chunk.

    samples: of these rows; without any, `moment` is the end of the step. asked: of prompts, with the index
        of the chunk; they are there when the samples are.
    seconds: that launching it took. is_recorded: whether it was launched as one.
    """

    batch: Batch
    sampled: Sequence[int]
    samples: PendingSamples | None
    moment: Moment | None
    asked: Sequence[tuple[int, PromptLogprobs]]
    seconds: float
    is_recorded: bool = False

    def read(self) -> tuple[list[Sample | None], dict[int, Verified]]:
        """Waits for it. A sample of each chunk, None where there is none; and what became of guesses, by
        index of the chunk."""
        samples: list[Sample | None] = [None] * len(self.batch.chunks)
        checked: dict[int, Verified] = {}
        if self.samples is None:
            # Without samples, too: the step after the next one writes into the memory that this one is sent
            # from.
            if self.moment is not None:
                self.moment.wait()
            return samples, checked
        after: dict[int, list[Sample]] = {}
        for index, sample in zip(self.sampled, self.samples.read(), strict=True):
            if self.batch.chunks[index].ahead:
                after.setdefault(index, []).append(sample)
            else:
                samples[index] = sample
        for index, own in after.items():
            samples[index] = own[0]
            checked[index] = verified(self.batch.chunks[index].ahead, own)
        return samples, checked


def asked_logprobs(batch: Batch, order: list[int]) -> list[AskedLogprobs]:
    """Of the prompt tokens that follow computed ones, where they are asked for and not yet delivered."""
    if all(chunk.sampling.num_prompt_logprobs is None for chunk in batch.chunks):
        return []
    found, row = [], 0
    for index in order:
        chunk = batch.chunks[index]
        # Without a generated token, all that is known is the prompt; nothing known follows its last one.
        count = min(chunk.num_tokens, len(chunk.token_ids) - 1 - chunk.start)
        num_top = chunk.sampling.num_prompt_logprobs
        if num_top is not None and chunk.num_generated == 0 and count > 0:
            following = chunk.token_ids[chunk.start + 1 : chunk.start + 1 + count]
            found.append(AskedLogprobs(index, row, following, num_top))
        row += chunk.num_tokens
    return found
