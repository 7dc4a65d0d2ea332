"""Rotary position embeddings (arXiv 2104.09864), in the half-split order of Hugging Face's weights.

Scalings that go by a sequence's length (dynamic, LongRoPE) go by the length that a sequence may reach here:
so a token's keys do not depend on what follows it, and can be cached, shared and computed again.
"""

import math

import torch
from torch import Tensor

from headway_runtime.model_config_rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
)


class RotaryTable:
    """Cosines and sines of every position, ready to be looked up.

    The first half of `sine`'s columns is negated, so that rotating is: x * cosine + x_halves_swapped * sine.
    """

    __slots__ = ("cosine", "sine")

    def __init__(
        self, rope: Rope, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies = inverse_frequencies(rope, head_dim, num_positions)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        factor = attention_factor(rope)
        cosine, sine = angles.cos().mul_(factor), angles.sin().mul_(factor)
        self.cosine = torch.cat((cosine, cosine), dim=-1).to(device, dtype)
        self.sine = torch.cat((-sine, sine), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` [tokens], each [tokens, head_dim]."""
        return self.cosine.index_select(0, positions), self.sine.index_select(0, positions)


def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate heads [tokens, heads, head_dim] in place, by what `RotaryTable.at` gave."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cosine.unsqueeze(1)).addcmul_(swapped, sine.unsqueeze(1))


def inverse_frequencies(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2].

    num_positions: how long a sequence may become.
    """
    frequencies = _unscaled(rope.theta, head_dim)
    match rope.scaling:
        case None:
            return frequencies
        case LinearRope(factor):
            return frequencies / factor
        case DynamicRope(factor, original):
            stretch = factor * max(num_positions, original) / original - (factor - 1)
            return _unscaled(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)
        case YarnRope() as scaling:
            return _yarn(frequencies, rope.theta, scaling)
        case LongRope() as scaling:
            is_long = num_positions > scaling.original_max_position_embeddings
            return frequencies / torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
        case Llama3Rope() as scaling:
            return _llama3(frequencies, scaling)
        case ProportionalRope(factor, num_turning):
            frequencies[num_turning:] = 0.0
            return frequencies / factor


def attention_factor(rope: Rope) -> float:
    """What cosines and sines, and so queries and keys, are multiplied by."""
    match rope.scaling:
        case YarnRope(attention_factor=float(told)) | LongRope(attention_factor=float(told)):
            return told
        case YarnRope(factor=factor, mscale=float(above), mscale_all_dim=float(below)):
            return _yarn_growth(factor, above) / _yarn_growth(factor, below)
        case YarnRope(factor=factor):
            return _yarn_growth(factor, 1.0)
        case LongRope(factor=factor, original_max_position_embeddings=original) if factor > 1:
            return math.sqrt(1 + math.log(factor) / math.log(original))
        case _:
            return 1.0


def _unscaled(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's rule: the turns a dimension makes within the original context decide its scaling."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """YaRN's rule (arXiv 2309.00071, "NTK-by-parts"): a ramp over dimensions between two numbers of turns."""
    num_pairs = len(frequencies)
    first = _pair_of(scaling.beta_fast, num_pairs, theta, scaling)
    last = _pair_of(scaling.beta_slow, num_pairs, theta, scaling)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    # A ramp of no width is a step.
    width = last - first or 0.001
    divided = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return divided * frequencies / scaling.factor + (1.0 - divided) * frequencies


def _pair_of(turns: float, num_pairs: int, theta: float, scaling: YarnRope) -> float:
    """Which pair of dimensions makes so many turns within the original context; a fraction between two."""
    wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return num_pairs * math.log(wavelength) / math.log(theta)


def _yarn_growth(factor: float, scale: float) -> float:
    """How much larger queries and keys become, so that scores over longer contexts stay as sharp."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
