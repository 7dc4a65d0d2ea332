"""Stands where the runner stands: takes a batch, says when it ends and what it samples. Computes nothing."""

import random
from array import array
from dataclasses import dataclass

from headway_runtime.batch import Batch, Chunk, Sample, StepResult, Verified
from headway_simulator.step_model import StepModel


@dataclass(frozen=True, slots=True)
class Speculation:
    """Guesses per sequence and step at most, and the probability that one comes true if all before it did.

    is_adaptive: fewer are guessed, or none, where that is faster.
    """

    num_speculative_tokens: int
    acceptance: float
    is_adaptive: bool = True


@dataclass(slots=True)
class Step:
    """A step that was launched. ends_at: when the device is done with it."""

    batch: Batch
    result: StepResult
    ends_at: float


class SimulatedRunner:
    """now: the engine's clock, which reading moves. answers: the token that each live request generates."""

    def __init__(self, model: StepModel, now: float, speculation: Speculation | None, seed: str) -> None:
        self.now = now
        self.answers: dict[str, Sample] = {}
        self.latest: Step | None = None
        self._model = model
        self._speculation = speculation
        self._chance = random.Random(seed)
        self._free_at = now

    def launch(self, batch: Batch) -> Step:
        """Begin a step as soon as the device is free."""
        verified = self._verify(batch) if batch.num_drafts else {}
        # The longest guesses of the step take that many passes of the draft model.
        passes = max(chunk.num_drafts for chunk in batch.chunks) if self._model.draft_milliseconds else 0
        draft_seconds = 0.001 * self._model.draft_milliseconds * passes
        result = StepResult(
            tuple(self.answers[one.request_id] if one.samples else None for one in batch.chunks),
            verified=verified,
            draft_seconds=draft_seconds,
            num_draft_passes=passes,
            draft_pass_seconds=draft_seconds,
        )
        begins_at = max(self._free_at, self.now)
        step = Step(batch, result, begins_at + draft_seconds + step_seconds(self._model, batch))
        self._free_at = step.ends_at
        self.latest = step
        return step

    def read(self, pending: Step) -> StepResult:
        """Wait for a step."""
        self.now = max(self.now, pending.ends_at)
        return pending.result

    def skip_to(self, now: float, step: Step | None, ends_at: float) -> None:
        """Steps were taken over at once: it is `now`, and the step under way ends at `ends_at`."""
        self.now = now
        self._free_at = ends_at
        if step is not None:
            step.ends_at = ends_at

    def clear_blocks(self, blocks: "array[int]") -> None:
        """Nothing is in them."""

    def copy_blocks(self, stores: list[tuple[int, int]], loads: list[tuple[int, int]]) -> tuple[float, float]:
        raise AssertionError("no KV offload is simulated")

    def is_usable(self) -> bool:
        return True

    def _verify(self, batch: Batch) -> dict[int, Verified]:
        assert self._speculation is not None
        acceptance = self._speculation.acceptance
        verified = {}
        for index, chunk in enumerate(batch.chunks):
            if chunk.num_drafts:
                count = 0
                while count < chunk.num_drafts and self._chance.random() < acceptance:
                    count += 1
                samples = (self.answers[chunk.request_id],) * count
                verified[index] = Verified(chunk.num_drafts, samples, is_finite=True)
        return verified


def step_seconds(model: StepModel, batch: Batch) -> float:
    """What the model says of a batch."""
    num_decodes = batch.num_decodes
    decodes, prompts = batch.chunks[:num_decodes], batch.chunks[num_decodes:]
    return model.seconds(
        batch.num_prefill_tokens,
        sum(pairs(chunk.start, chunk.num_tokens) for chunk in prompts),
        num_decodes + batch.num_drafts,
        decode_context(decodes),
    )


def decode_context(decodes: tuple[Chunk, ...]) -> int:
    """Tokens that these decodes attend to, their own included."""
    return sum(chunk.start for chunk in decodes) + len(decodes)


def pairs(start: int, num_tokens: int) -> int:
    """How often a token out of `num_tokens` from `start` on attends to one, itself included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2
