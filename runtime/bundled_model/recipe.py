"""How long, on what rows and at what rates each model is trained: numbers only.

Every choice depends on the step alone, so that a run can be stopped, resumed or lengthened before
its decay begins and still be the run that a single command would have made.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

TOKENS_PER_STEP = 8192

# From this step on, rows of these lengths are drawn with these shares. Short rows first: a model
# learns to look back within 256 tokens in far fewer steps than within 2,048.
CURRICULUM: tuple[tuple[int, dict[int, float]], ...] = (
    (0, {256: 1.0}),
    (1000, {256: 0.6, 1024: 0.4}),
    (2000, {256: 0.5, 1024: 0.35, 2048: 0.15}),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run."""

    steps: int
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    warmup_steps: int = 50
    decay_share: float = 0.35
    tokens_per_step: int = TOKENS_PER_STEP

    def rate_factor(self, step: int) -> float:
        """Warm up, stay, then decay linearly over the last `decay_share` of the steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        remaining = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, remaining)


def row_length(seed: int, step: int) -> int:
    """The length of the rows of this step, in tokens."""
    shares = next(shares for first, shares in reversed(CURRICULUM) if step >= first)
    rng = Random(f"length/{seed}/{step}")
    return rng.choices(tuple(shares), tuple(shares.values()))[0]
