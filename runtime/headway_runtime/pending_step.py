"""A step between its launch and its reading: what the runner keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway_runtime.batch import Batch, Sample
from headway_runtime.transfers import Moment


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

    samples: of these rows; without any, `moment` is the end of the step. asked: of prompts.
    seconds: that launching it took.
    """

    batch: Batch
    sampled: Sequence[int]
    samples: PendingSamples | None
    moment: Moment | None
    asked: Sequence[AskedLogprobs]
    seconds: float
