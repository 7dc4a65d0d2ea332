"""Cuts weights along their outputs or inputs: what one of several ranks keeps, with the numbers of the whole.

Codes and scales stay as they are, so that ranks together compute what one would. Where a cut falls into a
group or block that shares a scale, the groups become smaller, and the scale is there more than once. Where
groups are of inputs in an order of their own, a rank has some of each group's: they are filled up to equal
numbers with codes that mean zero.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.layers.quantized_weights import (
    INT4_ZERO,
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantizedWeight,
    packed_nibbles,
    unpacked_nibbles,
)
from headway_runtime.parallel.share import Range

# Inputs of a filled-up group: a CPU's kernels take so many at once, a GPU's know groups of such sizes.
GROUP_MULTIPLE, GPU_GROUP_MULTIPLE = 8, 32


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (outputs) and columns (inputs) of a weight; None: all of them. Never both."""

    rows: Range | None = None
    columns: Range | None = None


ALL = Part()


def cut_plain(weight: Tensor, part: Part) -> Tensor:
    """A copy of the part of [outputs, inputs]. Rows past the end are zeros."""
    if part.columns is not None:
        return weight[:, part.columns.first : part.columns.last].contiguous()
    return weight if part.rows is None else filled_rows(weight, part.rows)


def filled_rows(weight: Tensor, rows: Range) -> Tensor:
    """A copy of those rows, of zeros where there are no more."""
    own = weight[rows.first : rows.last]
    if len(own) == len(rows):
        return own.clone()
    filled = own.new_zeros((len(rows), *own.shape[1:]))
    filled[: len(own)] = own
    return filled


def cut(weight: QuantizedWeight, part: Part) -> QuantizedWeight:
    """A copy of the part. ValueError says what cannot be cut so."""
    if part.columns is not None:
        return _cut_columns(weight, part.columns)
    if part.rows is None:
        return weight
    if part.rows.last > weight.shape[0]:
        raise ValueError(
            f"has {weight.shape[0]} outputs, which ranks cannot share in panels while they are quantized; "
            "leave this layer unquantized, or choose another tensor_parallel_size"
        )
    return _cut_rows(weight, part.rows)


def _cut_rows(weight: QuantizedWeight, rows: Range) -> QuantizedWeight:
    first, last = rows.first, rows.last
    match weight:
        case Int8Weight():
            return Int8Weight(
                weight.codes[first:last].clone(), weight.scales[first:last].clone(), weight.input
            )
        case Int4Weight() | Int8GroupWeight():
            own = weight.rows(first, last)
            zeros = None if own.zeros is None else own.zeros.clone()
            return type(weight)(
                own.codes.clone(), own.scales.clone(), zeros, weight.group_size, weight.input_order
            )
        case Fp8Weight():
            if weight.block is None:
                return Fp8Weight(weight.codes[first:last].clone(), weight.scales[first:last].clone())
            height, width = weight.block
            new_height = gcd(height, first)
            scales = weight.scales.repeat_interleave(height // new_height, 0)
            scales = scales[first // new_height : -(-last // new_height)].contiguous()
            return Fp8Weight(weight.codes[first:last].clone(), scales, (new_height, width))


def _cut_columns(weight: QuantizedWeight, columns: Range) -> QuantizedWeight:
    first, last = columns.first, columns.last
    match weight:
        case Int8Weight():
            return Int8Weight(weight.codes[:, first:last].contiguous(), weight.scales, weight.input)
        case Fp8Weight():
            codes = weight.codes[:, first:last].contiguous()
            if weight.block is None:
                return Fp8Weight(codes, weight.scales)
            height, width = weight.block
            new_width = gcd(width, first, last - first)
            scales = weight.scales.repeat_interleave(width // new_width, 1)
            return Fp8Weight(
                codes, scales[:, first // new_width : last // new_width].contiguous(), (height, new_width)
            )
        case Int4Weight():
            if first % 2 or last % 2:
                raise ValueError(
                    f"would be cut at input {first if first % 2 else last}, amid a byte of two 4-bit "
                    "codes; choose a tensor_parallel_size that leaves each rank an even number of inputs"
                )
            if weight.input_order is not None:
                return _cut_ordered(weight, weight.input_order, columns)
            codes = weight.codes[:, first // 2 : last // 2].contiguous()
            return Int4Weight(codes, *_cut_groups(weight, columns))
        case Int8GroupWeight():
            if weight.input_order is not None:
                return _cut_ordered(weight, weight.input_order, columns)
            return Int8GroupWeight(weight.codes[:, first:last].contiguous(), *_cut_groups(weight, columns))


def _cut_groups(weight: Int4Weight | Int8GroupWeight, columns: Range) -> tuple[Tensor, Tensor | None, int]:
    """Scales and zero points of groups that begin and end with the cut, and their size."""
    size = gcd(weight.group_size, columns.first, len(columns))

    def own(values: Tensor) -> Tensor:
        finer = values.repeat_interleave(weight.group_size // size, 1)
        return finer[:, columns.first // size : columns.last // size].contiguous()

    return own(weight.scales), None if weight.zeros is None else own(weight.zeros), size


def _cut_ordered(
    weight: Int4Weight | Int8GroupWeight, order: Tensor, columns: Range
) -> Int4Weight | Int8GroupWeight:
    """Of each group, the inputs among `columns`, filled up to as many as the fullest group has."""
    group_size, num_groups = weight.group_size, weight.scales.shape[1]
    is_own = ((order >= columns.first) & (order < columns.last)).view(num_groups, group_size)
    most = int(is_own.sum(1).max())
    multiple = GPU_GROUP_MULTIPLE if uses_triton(order.device) else GROUP_MULTIPLE
    new_size = -(-most // multiple) * multiple
    # Own inputs of each group first, in their order; then others', which shall mean nothing.
    places = is_own.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts = is_own.sum(1, keepdim=True)
    if new_size > group_size:
        places = torch.cat((places, places[:, :1].expand(-1, new_size - group_size)), dim=1)
    places = places[:, :new_size]
    is_filling = torch.arange(new_size, device=order.device) >= counts
    index = (places + torch.arange(num_groups, device=order.device)[:, None] * group_size).flatten()
    # What is multiplied by zero may be any input that is there.
    new_order = order[index].sub(columns.first).masked_fill_(is_filling.flatten(), 0)
    is_int4 = isinstance(weight, Int4Weight)
    codes = unpacked_nibbles(weight.codes) if is_int4 else weight.codes
    codes = codes.index_select(1, index).view(len(codes), num_groups, new_size)
    nothing = weight.zeros
    if nothing is None:
        nothing = torch.full_like(weight.scales, INT4_ZERO if is_int4 else 0)
    codes = torch.where(is_filling, nothing[:, :, None].to(codes.dtype), codes).flatten(1)
    zeros = None if weight.zeros is None else weight.zeros.clone()
    if is_int4:
        return Int4Weight(packed_nibbles(codes), weight.scales.clone(), zeros, new_size, new_order)
    return Int8GroupWeight(codes, weight.scales.clone(), zeros, new_size, new_order)
