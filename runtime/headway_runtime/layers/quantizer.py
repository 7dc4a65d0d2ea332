"""Quantizes plain weights: each to the nearest number that its codes can say, without a look at any data."""

import torch
from torch import Tensor

from headway_runtime.layers.quantized_weights import (
    INT4_LARGEST,
    INT4_ZERO,
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
    packed_nibbles,
)
from headway_runtime.quantization.choice import Online
from headway_runtime.quantization.scheme import Scheme

LARGEST_INT8 = 127
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Inputs that share a scale, the first that divides a layer's; all of them where none does.
INT4_GROUP_SIZES = (128, 64, 32)
# A scale of 0 would divide by it; its weights are all 0.
LEAST_SCALE = 1e-12
# So many outputs at once: what is computed on the way is several times as large as the weight.
ROWS_AT_ONCE = 1024
# A group's extremes are few: a smaller step serves the others better. Which is best is tried.
SHRINKS = (0.95, 0.9, 0.85, 0.8)


def quantized(weight: Tensor, kind: Online) -> QuantizedWeight:
    """weight: [outputs, inputs]."""
    match kind:
        case "int8":
            return _int8(weight, None)
        case "fp8":
            return _fp8(weight)
        case "int4":
            return _int4(weight, int4_group_size(weight.shape[1]), None)


def quantized_as(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """As a checkpoint of that scheme would hold it, for weights that are made up."""
    inputs = weight.shape[1]
    group_size = scheme.group_size or inputs
    order = torch.arange(inputs, device=weight.device) if scheme.has_input_order else None
    match scheme.form:
        case "fp8":
            return _fp8(weight)
        case "int8":
            dynamic = None if scheme.input is None else Int8Input(is_symmetric=scheme.input.is_symmetric)
            return _int8(weight, dynamic)
        case "int4":
            return _int4(weight, group_size, order)
        case "int8 group":
            whole = _int8(weight, None)
            scales = whole.scales[:, None].expand(-1, inputs // group_size).contiguous()
            zeros = None if scheme.is_symmetric else torch.zeros_like(scales)
            return Int8GroupWeight(whole.codes, scales, zeros, group_size, order)


def int4_group_size(inputs: int) -> int:
    return next((size for size in INT4_GROUP_SIZES if inputs % size == 0), inputs)


def _int8(weight: Tensor, scheme_of_input: Int8Input | None) -> Int8Weight:
    numbers = weight.float()
    scales = (numbers.abs().amax(1) / LARGEST_INT8).clamp_(min=LEAST_SCALE)
    return Int8Weight((numbers / scales[:, None]).round_().to(torch.int8), scales, scheme_of_input)


def _fp8(weight: Tensor) -> Fp8Weight:
    numbers = weight.float()
    scales = (numbers.abs().amax(1) / LARGEST_FP8).clamp_(min=LEAST_SCALE)
    return Fp8Weight((numbers / scales[:, None]).to(torch.float8_e4m3fn), scales)


def _int4(weight: Tensor, group_size: int, order: Tensor | None) -> Int4Weight:
    """Symmetric. A group's number of largest magnitude becomes -8, which has no opposite."""
    pieces = [
        _int4_piece(weight[first : first + ROWS_AT_ONCE], group_size)
        for first in range(0, len(weight), ROWS_AT_ONCE)
    ]
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return Int4Weight(codes, scales, None, group_size, order)


def _int4_piece(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [outputs, inputs // 2] and scales [outputs, groups]."""
    numbers = weight.float().view(-1, group_size)
    extremes = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    scales = _kept(extremes / -INT4_ZERO)
    errors = _errors(numbers, scales)
    for shrink in SHRINKS:
        others = _kept(extremes * (-shrink / INT4_ZERO))
        other_errors = _errors(numbers, others)
        is_better = other_errors < errors
        scales, errors = torch.where(is_better, others, scales), torch.where(is_better, other_errors, errors)
    codes = _int4_codes(numbers, scales).add_(INT4_ZERO)
    return packed_nibbles(codes.view(len(weight), -1)), scales.view(len(weight), -1)


def _kept(scales: Tensor) -> Tensor:
    """As they are kept: numbers that float16 holds take half the memory beside the codes."""
    scales = scales.half().float()
    return torch.where(scales == 0, 1.0, scales)


def _int4_codes(numbers: Tensor, scales: Tensor) -> Tensor:
    """With sign."""
    return (numbers / scales).round_().clamp_(-INT4_ZERO, INT4_LARGEST - INT4_ZERO)


def _errors(numbers: Tensor, scales: Tensor) -> Tensor:
    """Of each row, by a norm."""
    lost = _int4_codes(numbers, scales).mul_(scales).sub_(numbers)
    errors: Tensor = torch.linalg.vector_norm(lost, dim=1, keepdim=True)
    return errors
