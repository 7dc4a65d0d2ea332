"""Linear layers on quantized weights: kernels of our own where there are some, else PyTorch's.

Few rows wait for weights to come from memory, so they are multiplied as they lie there. PyTorch has products
for that of some forms on some processors, which are probed before they are relied on. Many rows wait for
arithmetic: a tile of the weight is turned into plain numbers, and multiplied while it is in the cache. Parts
of one projection that are not quantized alike become layers side by side.
"""

from functools import cache
from itertools import groupby
from typing import TypeAlias, Union

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers import cpu_kernels, gpu_kernels
from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear
from headway_runtime.layers.linear import LEAST_WIDE_ROWS, AnyLinear, make_linear, wide_dtype
from headway_runtime.layers.quantized_weights import (
    INT4_ZERO,
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
    unpacked_nibbles,
)

# Numbers of a tile: some hundred kilobytes once they are plain.
TILE_NUMBERS = 1 << 18
# PyTorch's product of 8-bit weights takes ever longer with each row; with more of them tiles are faster.
MOST_PACKED_ROWS = 8
# PyTorch's product of 8-bit weights reads past the end of any other number of inputs.
INT8_INPUTS_MULTIPLE = 16
# Group sizes that PyTorch's product of 4-bit weights knows, and what its sizes must be multiples of.
INT4_GROUP_SIZES = (32, 64, 128, 256)
INT4_OUTPUTS_MULTIPLE = 32
# Rows of zeros have no scale of their own.
LEAST_SCALE = 1e-12

QuantizedLinear: TypeAlias = Union[
    "TiledLinear",
    "PackedInt8Linear",
    "PackedInt4Linear",
    "IntegerInputLinear",
    "SideBySideLinear",
    CodedLinear,
    CodedRowsLinear,
]


class TiledLinear:
    """Any quantized weight, as tiles of plain numbers. The parts' outputs lie one below the other."""

    __slots__ = ("_tiles", "bias", "num_inputs", "num_outputs", "parts")

    def __init__(self, parts: list[QuantizedWeight], bias: Tensor | None) -> None:
        self.parts = parts
        self.num_outputs = sum(part.shape[0] for part in parts)
        self.num_inputs = parts[0].shape[1]
        self.bias = bias
        self._tiles: list[tuple[int, int, QuantizedWeight]] = []
        start = 0
        for part in parts:
            height = _tile_height(part)
            for first in range(0, part.shape[0], height):
                last = min(first + height, part.shape[0])
                self._tiles.append((start + first, start + last, part.rows(first, last)))
            start += part.shape[0]

    def plain(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs]"""
        return torch.cat([part.dequantized(dtype) for part in self.parts])

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), self.num_outputs))
        dtype = wide_dtype(x) if len(x) >= LEAST_WIDE_ROWS else x.dtype
        x = x.to(dtype)
        ordered, order = x, None
        for first, last, tile in self._tiles:
            own = tile.input_order if isinstance(tile, Int4Weight | Int8GroupWeight) else None
            if own is not order:
                ordered, order = x if own is None else x.index_select(1, own), own
            out[:, first:last] = functional.linear(ordered, _plain(tile, dtype))
        return out if self.bias is None else out.add_(self.bias)


class PackedInt8Linear:
    """8-bit weights with a scale per output, through PyTorch's own product where rows are few."""

    __slots__ = ("_bias", "_codes", "_ones", "_scales", "num_inputs", "num_outputs")

    def __init__(self, parts: list[Int8Weight], bias: Tensor | None) -> None:
        self._codes = torch.cat([part.codes for part in parts])
        self._scales = torch.cat([part.scales for part in parts])
        self.num_outputs, self.num_inputs = self._codes.shape
        self._ones = torch.ones(self.num_outputs, dtype=torch.bfloat16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= MOST_PACKED_ROWS:
            out: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._codes, self._ones)
        else:
            out = x.new_empty((len(x), self.num_outputs))
            height, dtype = max(1, TILE_NUMBERS // self.num_inputs), wide_dtype(x)
            wide = x.to(dtype)
            for first in range(0, self.num_outputs, height):
                codes = self._codes[first : first + height].to(dtype)
                out[:, first : first + height] = functional.linear(wide, codes)
        out = (out * self._scales).to(x.dtype)
        return out if self._bias is None else out.add_(self._bias)


class PackedInt4Linear:
    """4-bit weights in the layout of PyTorch's own product."""

    __slots__ = (
        "_bias",
        "_group_size",
        "_order",
        "_packed",
        "_scales_and_zeros",
        "num_inputs",
        "num_outputs",
    )

    def __init__(self, parts: list[Int4Weight], bias: Tensor | None) -> None:
        first = parts[0]
        self.num_inputs = first.shape[1]
        self.num_outputs = sum(part.shape[0] for part in parts)
        self._group_size, self._order, self._bias = first.group_size, first.input_order, bias
        codes = torch.cat([unpacked_nibbles(part.codes) for part in parts]).int()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.cat([part.scales for part in parts])
        middles = torch.cat([_middles(part) for part in parts])
        self._scales_and_zeros = torch.stack((scales, middles), -1).transpose(0, 1).bfloat16().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, self._group_size, self._scales_and_zeros
        )
        return out if self._bias is None else out.add_(self._bias)


class IntegerInputLinear:
    """A layer whose input is turned into 8-bit integers first, which `inner` multiplies."""

    __slots__ = ("_input", "bias", "inner", "num_inputs", "num_outputs")

    def __init__(self, inner: AnyLinear, quantization: Int8Input, bias: Tensor | None) -> None:
        """inner: without bias."""
        self.inner, self._input, self.bias = inner, quantization, bias
        self.num_inputs: int = inner.num_inputs
        self.num_outputs: int = inner.num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scale = as_integers(x.float(), self._input)
        out = (self.inner(numbers.to(x.dtype)) * scale).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


class SideBySideLinear:
    """Layers that read the same input, their outputs one after the other."""

    __slots__ = ("layers", "num_inputs", "num_outputs")

    def __init__(self, layers: list[AnyLinear]) -> None:
        self.layers = layers
        self.num_inputs: int = layers[0].num_inputs
        self.num_outputs: int = sum(layer.num_outputs for layer in layers)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def make_merged_linear(
    parts: list[Tensor | QuantizedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    compresses: bool = False,
) -> AnyLinear:
    """The best linear layer for these weights, whose outputs lie one below the other. dtype: of its input.

    compresses: as `make_linear` has it, for those that are plain.
    """
    alike = [list(group) for _, group in groupby(parts, key=_Kind)]
    if len(alike) == 1:
        return _make(alike[0], bias, dtype, compresses=compresses)
    layers: list[AnyLinear] = []
    start = 0
    for group in alike:
        end = start + sum(part.shape[0] for part in group)
        own_bias = None if bias is None else bias[start:end].contiguous()
        layers.append(_make(group, own_bias, dtype, compresses=compresses))
        start = end
    return SideBySideLinear(layers)


class _Kind:
    """What parts of one layer must have in common."""

    __hash__ = None  # type: ignore[assignment]  # groups are found by comparison alone

    def __init__(self, part: Tensor | QuantizedWeight) -> None:
        self._values: tuple[object, ...]
        self._order: Tensor | None = None
        match part:
            case Int8Weight():
                self._values = (Int8Weight, part.input)
            case Int4Weight() | Int8GroupWeight():
                self._values, self._order = (type(part),), part.input_order
            case Fp8Weight():
                self._values = (Fp8Weight,)
            case _:
                self._values = (Tensor,)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kind) or self._values != other._values:
            return False
        if self._order is None or other._order is None:
            return self._order is other._order
        return torch.equal(self._order, other._order)


def _make(
    parts: list[Tensor | QuantizedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    compresses: bool = False,
) -> AnyLinear:
    """Of parts alike."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if plain:
        return make_linear(plain, bias, compresses=compresses)
    quantized = [part for part in parts if not isinstance(part, Tensor)]
    on_gpu = gpu_kernels.coded_linear(quantized, bias, dtype)
    if on_gpu is not None:
        return on_gpu
    first = quantized[0]
    if isinstance(first, Int8Weight) and first.input is not None:
        int8 = [part for part in quantized if isinstance(part, Int8Weight)]
        ours = cpu_kernels.int8_linear(int8, bias) if dtype == torch.bfloat16 else None
        if ours is not None:
            return ours
        inner = [Int8Weight(part.codes, part.scales) for part in int8]
        return IntegerInputLinear(_make([*inner], None, dtype), first.input, bias)
    return (_packed(quantized, bias) if dtype == torch.bfloat16 else None) or TiledLinear(quantized, bias)


def _packed(parts: list[QuantizedWeight], bias: Tensor | None) -> AnyLinear | None:
    """For inputs in bfloat16. None where neither we nor PyTorch have more than plain products."""
    ours: AnyLinear | None = None
    if int8 := [part for part in parts if isinstance(part, Int8Weight)]:
        ours = cpu_kernels.int8_linear(int8, bias)
    elif groups := [part for part in parts if isinstance(part, Int8GroupWeight)]:
        ours = cpu_kernels.int8_group_linear(groups, bias)
    elif int4 := [part for part in parts if isinstance(part, Int4Weight)]:
        ours = cpu_kernels.int4_linear(int4, bias)
    elif fp8 := [part for part in parts if isinstance(part, Fp8Weight)]:
        ours = cpu_kernels.fp8_linear(fp8, bias)
    return ours or _torch_packed(parts, bias)


def _torch_packed(parts: list[QuantizedWeight], bias: Tensor | None) -> AnyLinear | None:
    if parts[0].codes.device.type != "cpu":
        return None
    int8 = [part for part in parts if isinstance(part, Int8Weight)]
    if int8 and int8[0].shape[1] % INT8_INPUTS_MULTIPLE == 0 and can_pack_int8():
        return PackedInt8Linear(int8, bias)
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    if int4 and fits_int4_product(int4) and can_pack_int4():
        return PackedInt4Linear(int4, bias)
    return None


def fits_int4_product(parts: list[Int4Weight]) -> bool:
    """Whether PyTorch's product of 4-bit weights takes these sizes."""
    num_outputs, (_, num_inputs) = sum(part.shape[0] for part in parts), parts[0].shape
    group_size = parts[0].group_size
    return (
        all(part.group_size == group_size for part in parts)
        and num_outputs % INT4_OUTPUTS_MULTIPLE == 0
        and num_inputs % group_size == 0
        and group_size in INT4_GROUP_SIZES
    )


def _middles(part: Int4Weight) -> Tensor:
    """What a code of INT4_ZERO stands for, [outputs, groups]."""
    if part.zeros is None:
        return torch.zeros_like(part.scales)
    return (INT4_ZERO - part.zeros) * part.scales


def as_integers(x: Tensor, quantization: Int8Input) -> tuple[Tensor, Tensor | float]:
    """Whole numbers and the scale by which they are x, or nearly. x: float32 [rows, inputs]."""
    low, high = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
    if quantization.scale is not None:
        zero = float(quantization.zero)
        numbers = (x / quantization.scale).round_().add_(zero).clamp_(low, high).sub_(zero)
        return numbers, quantization.scale
    if quantization.is_symmetric:
        scale = (x.abs().amax(1, keepdim=True) / high).clamp_(min=LEAST_SCALE)
        return (x / scale).round_(), scale
    least, most = (x.amin(1, keepdim=True).clamp_(max=0), x.amax(1, keepdim=True).clamp_(min=0))
    scale = ((most - least) / (high - low)).clamp_(min=LEAST_SCALE)
    zeros = (low - least / scale).round_()
    return (x / scale).round_().add_(zeros).clamp_(low, high).sub_(zeros), scale


def _plain(tile: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """For inputs in the tile's own order."""
    if isinstance(tile, Int4Weight | Int8GroupWeight):
        return tile.ordered(dtype)
    return tile.dequantized(dtype)


def _tile_height(part: QuantizedWeight) -> int:
    multiple = part.block[0] if isinstance(part, Fp8Weight) and part.block is not None else 1
    return max(1, TILE_NUMBERS // part.shape[1] // multiple) * multiple


@cache
def can_pack_int8() -> bool:
    """Whether this PyTorch has a product of 8-bit weights on this processor, and a right one."""
    x = torch.linspace(-1, 1, 3 * 64, dtype=torch.bfloat16).view(3, 64)
    codes = torch.arange(48 * 64).view(48, 64).remainder(255).sub(127).to(torch.int8)
    try:
        got = PackedInt8Linear([Int8Weight(codes, torch.linspace(0.01, 0.02, 48))], None)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    want = functional.linear(x.float(), codes.float()) * torch.linspace(0.01, 0.02, 48)
    return torch.allclose(got.float(), want, rtol=2e-2, atol=2e-2)


@cache
def can_pack_int4() -> bool:
    """The same of 4-bit weights."""
    codes = torch.arange(64 * 32).view(64, 32).remainder(251).to(torch.uint8)
    scales = torch.linspace(0.01, 0.02, 64 * 2).view(64, 2)
    weight = Int4Weight(codes, scales, torch.linspace(3, 12, 64 * 2).view(64, 2).round(), 32)
    x = torch.linspace(-1, 1, 3 * 64, dtype=torch.bfloat16).view(3, 64)
    try:
        got = PackedInt4Linear([weight], None)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    want = functional.linear(x.float(), weight.dequantized(torch.float32))
    return torch.allclose(got.float(), want, rtol=2e-2, atol=2e-2)
