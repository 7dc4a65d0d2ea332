"""How the cache keeps keys and values: as they are computed, or as codes of one byte and a scale.

Codes are meant times a float32 scale per token and head, for keys and for values: the largest number of a
head gets the largest code. This is what PyTorch's operators do, and the reference of what kernels do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Divided by instead of zero.
LEAST_MAGNITUDE = 1e-30
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Of what is asked for (see config.py); "plain", and "auto" where a checkpoint says nothing, are as the model
# computes.
KEPT_DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def kept_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """How a cache of that type keeps numbers. dtype: of what is computed with."""
    return KEPT_DTYPES.get(kv_cache_dtype, dtype)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's cache, seen as numbers.

    numbers: [blocks, 2 * kv_heads, block_size, head_dim], each block without gaps.
    scales: float32 [blocks, 2 * kv_heads, block_size], in the same blocks; None where there are no codes.
    """

    numbers: Tensor
    scales: Tensor | None

    def store(self, place: tuple[Tensor, Tensor], heads: Tensor) -> Tensor:
        """Put each token's keys and values, [tokens, 2 * kv_heads, head_dim], into its block and offset.

        Returns them as they will be read.
        """
        blocks, offsets = place
        if self.scales is None:
            kept = heads.to(self.numbers.dtype)
            self.numbers[blocks, :, offsets] = kept
            return kept.to(heads.dtype)
        codes, scales = to_codes(heads, self.numbers.dtype)
        # Not every operator knows 8-bit floats; to be moved they are bytes.
        self.numbers.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
        self.scales[blocks, :, offsets] = scales
        return from_codes(codes, scales, heads.dtype)

    def by_head(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """The blocks of a table, gathered: [2 * kv_heads, context, head_dim]."""
        if self.scales is None:
            return self.numbers.transpose(0, 1).index_select(1, table).flatten(1, 2).to(dtype)
        codes = self.numbers.view(torch.uint8).transpose(0, 1).index_select(1, table)
        scales = self.scales.transpose(0, 1).index_select(1, table)
        return from_codes(codes.view(self.numbers.dtype), scales, dtype).flatten(1, 2)


def to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `x`, [..., head_dim], and their scales, float32 [...]."""
    wide, largest_code = x.float(), LARGEST_CODES[dtype]
    largest = wide.abs().amax(-1)
    # Divided as kernels do: a number over a tensor would be the tensor's reciprocal times the number.
    inverse = torch.full_like(largest, largest_code) / largest.clamp_min(LEAST_MAGNITUDE)
    codes = wide * inverse.unsqueeze(-1)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), largest * (1.0 / largest_code)


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes say, in that type."""
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)
