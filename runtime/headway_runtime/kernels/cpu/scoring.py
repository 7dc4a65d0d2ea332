"""How one layer's scores become weights: what kernels are written for, one text for each way."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scoring:
    """scale: what scores are multiplied by. window: how many tokens, the last ones, a token attends to.

    soft_cap: scores become soft_cap * tanh(scores / soft_cap). None: all tokens; no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
