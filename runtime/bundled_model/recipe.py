"""How long, on what rows and at what rates each model is trained: numbers only.

Every choice depends on the step alone, so that a run can be stopped, resumed or lengthened before
its last decay begins and still be the run that a single command would have made.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bundled_model.network import DRAFT_NAME

TOKENS_PER_STEP = 8192


@dataclass(frozen=True, slots=True)
class RowMix:
    """Shares of the styles of rows; what is left is conversations, made of `kinds` by their weights.

    The context of a recall row takes between `least_context` and `most_context` of the row; `tables` is
    the share of tables among them, `value_only` that of answers without the key. `tight_sums` is the
    share of plain sums without spaces. With `asks_once` no question comes twice: the answer to one
    that does is found in the conversation, which teaches nothing about the document.
    """

    kinds: dict[str, int]
    recall: float
    least_context: float
    most_context: float
    plain: float = 0.0
    sums: float = 0.0
    tight_sums: float = 0.5
    tables: float = 0.0
    value_only: float = 0.0
    asks_once: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """From `first_step` on: how often each row length is drawn, with which mix, at which rate."""

    first_step: int
    lengths: dict[int, float]
    mixes: dict[int, RowMix]
    rate: float


BROAD_KINDS = {
    "sum": 22,
    "difference": 14,
    "copy": 14,
    "count": 9,
    "json": 12,
    "extract": 4,
    "fact": 12,
    "story": 3,
    "unknown": 6,
    "memory": 4,
}
# Stories and counting are long and learned early; sums are short and come late.
HARD_KINDS = {
    "sum": 30,
    "difference": 20,
    "copy": 16,
    "count": 3,
    "json": 10,
    "extract": 2,
    "fact": 11,
    "story": 1,
    "unknown": 3,
    "memory": 4,
}

# From here on arithmetic always repeats its operands: one form to learn instead of many.
SHOWN_KINDS = {
    "shown sum": 36,
    "shown difference": 18,
    "copy": 12,
    "count": 3,
    "json": 9,
    "extract": 2,
    "fact": 12,
    "story": 1,
    "unknown": 3,
    "memory": 4,
}

# Once sums are right, everything gets its share again.
SETTLED_KINDS = {
    "shown sum": 18,
    "shown difference": 17,
    "copy": 14,
    "count": 6,
    "json": 12,
    "extract": 3,
    "fact": 14,
    "story": 2,
    "unknown": 6,
    "memory": 8,
}

# At last what is still wrong: where to stop counting.
FINISHING_KINDS = {
    "short count": 24,
    "count": 9,
    "shown sum": 10,
    "shown difference": 10,
    "copy": 16,
    "json": 12,
    "extract": 2,
    "fact": 16,
    "story": 1,
    "unknown": 6,
    "memory": 4,
}

# Short rows first: a model learns to look back within 256 tokens in far fewer steps than within 1,280.
BROAD = RowMix(BROAD_KINDS, recall=0.45, plain=0.07, least_context=0.2, most_context=0.85, value_only=0.3)
HARD = RowMix(
    HARD_KINDS, recall=0.35, plain=0.04, sums=0.2, least_context=0.1, most_context=0.6, value_only=0.3
)
LONG = RowMix(HARD_KINDS, recall=0.85, least_context=0.3, most_context=0.88, value_only=0.3)
FOCUS = RowMix(
    SHOWN_KINDS, recall=0.35, plain=0.02, sums=0.33, tight_sums=0.25,
    least_context=0.15, most_context=0.5, tables=0.75, asks_once=True,
)  # fmt: skip
SETTLED = RowMix(
    SETTLED_KINDS, recall=0.5, plain=0.04, sums=0.08, tight_sums=0.4,
    least_context=0.15, most_context=0.5, tables=0.5, asks_once=True,
)  # fmt: skip
LONG_TABLES = RowMix(
    SETTLED_KINDS, recall=0.9, least_context=0.3, most_context=0.88, tables=0.8, asks_once=True
)
FINISHING = RowMix(
    FINISHING_KINDS, recall=0.3, plain=0.05, sums=0.1, tight_sums=0.6,
    least_context=0.15, most_context=0.5, tables=0.4, asks_once=True,
)  # fmt: skip
LONGEST = RowMix(
    FINISHING_KINDS, recall=1.0, least_context=0.3, most_context=0.9, tables=0.45, asks_once=True
)
FINISHING_FROM = 1750
CURRICULUM = (
    Stage(0, {256: 1.0}, {256: BROAD}, rate=1.0),
    Stage(800, {256: 0.85, 1280: 0.15}, {256: HARD, 1280: LONG}, rate=0.4),
    Stage(1000, {256: 1.0}, {256: FOCUS}, rate=0.5),
    Stage(1200, {256: 0.7, 1280: 0.3}, {256: SETTLED, 1280: LONG_TABLES}, rate=0.5),
    Stage(1400, {256: 0.5, 1280: 0.5}, {256: SETTLED, 1280: LONG_TABLES}, rate=0.5),
    Stage(
        FINISHING_FROM,
        {256: 0.55, 1280: 0.2, 2304: 0.25},
        {256: FINISHING, 1280: LONGEST, 2304: LONGEST},
        rate=0.35,
    ),
)
# The draft has little room: it starts where the target only comes to.
DRAFT_CURRICULUM = (
    Stage(0, {256: 1.0}, {256: FOCUS}, rate=1.0),
    Stage(1500, {256: 0.8, 1280: 0.2}, {256: SETTLED, 1280: LONG_TABLES}, rate=0.6),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run."""

    steps: int
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    warmup_steps: int = 50
    decay_share: float = 0.25
    tokens_per_step: int = TOKENS_PER_STEP
    curriculum: tuple[Stage, ...] = CURRICULUM
    finishing_from: int = FINISHING_FROM

    def rate_factor(self, step: int) -> float:
        """Warm up, keep the stage's rate, then decay linearly over the last `decay_share` of the steps.

        The steps after `finishing_from` decay from their stage's rate on their own.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step >= self.finishing_from:
            remaining = (self.steps - step) / (self.steps - self.finishing_from)
        else:
            main_steps = min(self.steps, self.finishing_from)
            remaining = (main_steps - step) / (main_steps * self.decay_share)
        return self.stage(step).rate * min(1.0, remaining)

    def stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.curriculum) if step >= stage.first_step)

    def row_length(self, seed: int, step: int) -> int:
        """The length of the rows of this step, in tokens."""
        lengths = self.stage(step).lengths
        rng = Random(f"length/{seed}/{step}")
        return rng.choices(tuple(lengths), tuple(lengths.values()))[0]


def recipe_of(name: str, steps: int, tokens_per_step: int) -> Recipe:
    """The recipe of one of the two bundled models."""
    if name == DRAFT_NAME:
        return Recipe(
            steps,
            decay_share=0.18,
            tokens_per_step=tokens_per_step,
            curriculum=DRAFT_CURRICULUM,
            finishing_from=steps,
        )
    return Recipe(steps, tokens_per_step=tokens_per_step)
