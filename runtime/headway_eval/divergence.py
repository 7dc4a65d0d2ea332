"""How far one next-token distribution is from another, position by position, from all logits.

Everything is computed in float64, whatever the models compute in: a divergence of 1e-6 is a difference of
numbers near 10. KL divergence is D(BASELINE || MODEL), in nats: what is lost where the baseline's words are
coded by the model, and what a top-k of either could not tell.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of one float64 temporary; a slice of rows has no more, however large the vocabulary is.
NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PositionScores:
    """One entry per scored position; NaN where logits were not finite.

    model_loss, baseline_loss: -ln of the probability of the token that follows.
    divergence: nats. same_choice: whether both hold the same token for likeliest.
    """

    model_loss: list[float]
    baseline_loss: list[float]
    divergence: list[float]
    same_choice: list[bool]


def compare(model: Tensor, baseline: Tensor, following: Tensor) -> PositionScores:
    """model, baseline: logits [rows, vocab_size]; following: the token after each row [rows]."""
    scores = PositionScores([], [], [], [])
    for rows in _slices(*model.shape):
        log_model = model[rows].double().log_softmax(-1)
        log_baseline = baseline[rows].double().log_softmax(-1)
        index = following[rows].unsqueeze(1)
        scores.model_loss.extend((-log_model.gather(1, index)).flatten().tolist())
        scores.baseline_loss.extend((-log_baseline.gather(1, index)).flatten().tolist())
        scores.divergence.extend(_divergence(log_baseline, log_model).tolist())
        scores.same_choice.extend((log_model.argmax(-1) == log_baseline.argmax(-1)).tolist())
    return scores


def _divergence(log_baseline: Tensor, log_model: Tensor) -> Tensor:
    """D(baseline || model) of each row."""
    probability = log_baseline.exp()
    # What the baseline holds for impossible adds nothing; as numbers it would be 0 times infinity.
    terms = torch.where(probability > 0, probability * (log_baseline - log_model), 0.0)
    # An infinite logit makes the whole row NaN, which the line above must not hide.
    return torch.where(log_baseline.isnan().any(-1) | log_model.isnan().any(-1), torch.nan, terms.sum(-1))


def _slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, NUMBERS_AT_ONCE // vocab_size)
    return (slice(start, min(num_rows, start + size)) for start in range(0, num_rows, size))
