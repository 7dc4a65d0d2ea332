"""Rotary position embeddings (arXiv 2104.09864), in the half-split order of Hugging Face's Llama weights."""

import math

import torch
from torch import Tensor

from headway_runtime.model_config import LinearRope, Llama3Rope, ModelConfig


class RotaryTable:
    """Cosines and sines of every position, ready to be looked up.

    The first half of `sine`'s columns is negated, so that rotating is: x * cosine + x_halves_swapped * sine.
    """

    __slots__ = ("cosine", "sine")

    def __init__(
        self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(config))
        cosine, sine = angles.cos(), angles.sin()
        self.cosine = torch.cat((cosine, cosine), dim=-1).to(device, dtype)
        self.sine = torch.cat((-sine, sine), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` [tokens], each [tokens, head_dim]."""
        return self.cosine.index_select(0, positions), self.sine.index_select(0, positions)


def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate heads [tokens, heads, head_dim] in place, by what `RotaryTable.at` gave."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cosine.unsqueeze(1)).addcmul_(swapped, sine.unsqueeze(1))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRope(factor):
            return frequencies / factor
        case Llama3Rope() as scaling:
            return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's rule: the turns a dimension makes within the original context decide its scaling."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
