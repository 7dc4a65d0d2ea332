"""What all positions of a text come to: perplexities, KL divergence, agreement. Plain numbers, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

P99 = 0.99


@dataclass(frozen=True, slots=True)
class TextSummary:
    """num_texts, num_tokens: what was scored. NaN where a model's logits were not finite.

    mean_kl, p99_kl, largest_kl: nats, of MODEL's distribution from BASELINE's. same_choice_share: of all.
    """

    num_texts: int
    num_tokens: int
    model_perplexity: float
    baseline_perplexity: float
    mean_kl: float
    p99_kl: float
    largest_kl: float
    same_choice_share: float

    @property
    def perplexity_increase(self) -> float:
        """Relative: 0.01 is one percent more than the baseline's."""
        return self.model_perplexity / self.baseline_perplexity - 1.0


def summarize(
    num_texts: int,
    model_loss: Sequence[float],
    baseline_loss: Sequence[float],
    divergence: Sequence[float],
    same_choice: Sequence[bool],
) -> TextSummary:
    """All of at least one position; losses and divergences in nats."""
    ordered = sorted(divergence) if not any(map(math.isnan, divergence)) else [math.nan]
    return TextSummary(
        num_texts=num_texts,
        num_tokens=len(model_loss),
        model_perplexity=_perplexity(model_loss),
        baseline_perplexity=_perplexity(baseline_loss),
        mean_kl=_mean(divergence),
        p99_kl=ordered[math.ceil(P99 * len(ordered)) - 1],
        largest_kl=ordered[-1],
        same_choice_share=sum(same_choice) / len(same_choice),
    )


def _perplexity(losses: Sequence[float]) -> float:
    try:
        return math.exp(_mean(losses))
    except OverflowError:
        return math.inf


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
