"""What all positions of a text come to: perplexities, KL divergence, agreement. Plain numbers, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

P99 = 0.99
# Standard errors on each side of a 95% interval.
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class TextSummary:
    """num_texts, num_tokens: what was scored. NaN where a model's logits were not finite.

    perplexity_increase: relative, 0.01 being one percent more than the baseline's; its 95% interval is of
        the tokens' paired losses, taken as independent.
    mean_kl, p99_kl, largest_kl: nats, of MODEL's distribution from BASELINE's. same_choice_share: of all.
    """

    num_texts: int
    num_tokens: int
    model_perplexity: float
    baseline_perplexity: float
    perplexity_increase: float
    perplexity_increase_interval: tuple[float, float]
    mean_kl: float
    p99_kl: float
    largest_kl: float
    same_choice_share: float


def summarize(
    num_texts: int,
    model_loss: Sequence[float],
    baseline_loss: Sequence[float],
    divergence: Sequence[float],
    same_choice: Sequence[bool],
) -> TextSummary:
    """All of at least one position; losses and divergences in nats."""
    differences = [own - other for own, other in zip(model_loss, baseline_loss, strict=True)]
    increase, half = _mean(differences), Z95 * _standard_error(differences)
    ordered = sorted(divergence) if not any(map(math.isnan, divergence)) else [math.nan]
    return TextSummary(
        num_texts=num_texts,
        num_tokens=len(model_loss),
        model_perplexity=_exp(_mean(model_loss)),
        baseline_perplexity=_exp(_mean(baseline_loss)),
        perplexity_increase=_exp(increase) - 1,
        perplexity_increase_interval=(_exp(increase - half) - 1, _exp(increase + half) - 1),
        mean_kl=_mean(divergence),
        p99_kl=ordered[math.ceil(P99 * len(ordered)) - 1],
        largest_kl=ordered[-1],
        same_choice_share=sum(same_choice) / len(same_choice),
    )


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; of a single one nothing is known."""
    if len(values) < 2:
        return math.inf
    mean = _mean(values)
    if not math.isfinite(mean):
        return math.nan
    return math.sqrt(math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1) / len(values))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
