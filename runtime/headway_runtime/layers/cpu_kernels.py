"""Kernels of our own for a layer on a CPU, or None where it has to do with PyTorch's operators.

That is so where llvmlite is not installed, on systems whose OpenMP library we do not know, and for sizes that
no vector divides.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.layers.attention_layer import AttentionLayer
from headway_runtime.layers.kernel_choice import uses_cpu_kernels
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
)
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.cpu.adapter_products import AdapterProducts
    from headway_runtime.kernels.cpu.compiler import Call
    from headway_runtime.kernels.cpu.gate import ActivateAndMultiply
    from headway_runtime.kernels.cpu.grouped_linear import GroupedLinear
    from headway_runtime.kernels.cpu.integer_linear import IntegerLinear
    from headway_runtime.kernels.cpu.linear import PairsLinear
    from headway_runtime.kernels.cpu.lossless_linear import LosslessLinear
    from headway_runtime.kernels.cpu.norm import HeadNormKernel, RMSNormKernel
    from headway_runtime.kernels.cpu.paged_attention import PagedAttention
    from headway_runtime.kernels.cpu.row_numbers import RowQuantizer
    from headway_runtime.kernels.cpu.tape import Tape
    from headway_runtime.kernels.cpu.weighted_sum import WeightedSum

logger = logging.getLogger(__name__)


@cache
def _are_available() -> bool:
    try:
        from headway_runtime.kernels.cpu.compiler import are_available
    except ImportError as error:
        logger.info("no CPU kernels of our own: %s", error)
        return False
    return are_available()


def _fitting_width(device: torch.device, *sizes: int) -> int | None:
    """How many numbers kernels take at once, a divisor of all `sizes`; None where there are no kernels."""
    if not uses_cpu_kernels(device) or not _are_available():
        return None
    from headway_runtime.kernels.cpu import compiler

    return compiler.fitting_width(*sizes)


def paged_attention(
    shape: tuple[int, int, int, int],
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    kept: torch.dtype,
    device: torch.device,
) -> "PagedAttention | None":
    """shape: KV heads, query heads to one, head size, block size. kept: how the cache keeps them."""
    _, _, head_dim, block_size = shape
    width = _fitting_width(device, head_dim // 2, block_size)
    if width is None:
        return None
    from headway_runtime.kernels.cpu.compiler import elements
    from headway_runtime.kernels.cpu.kv_layout import FLOAT8_E4M3, INT8, AttentionShape, KVLayout
    from headway_runtime.kernels.cpu.paged_attention import PagedAttention
    from headway_runtime.kernels.cpu.scoring import Scoring

    codes = {torch.int8: INT8, torch.float8_e4m3fn: FLOAT8_E4M3}
    layout = KVLayout(AttentionShape(*shape), codes.get(kept) or elements(kept))
    scorings = [Scoring(layer.scale, layer.window, layer.soft_cap) for layer in layers]
    return PagedAttention(layout, scorings, dtype, width)


def rms_norm(
    size: int, epsilon: float, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> "RMSNormKernel | None":
    """weight_dtype: that of the rows, or float32."""
    width = _fitting_width(device, size)
    if width is None:
        return None
    from headway_runtime.kernels.cpu.norm import RMSNormKernel

    return RMSNormKernel(size, epsilon, dtype, weight_dtype, width)


def head_norm(
    num_heads: int, head_dim: int, epsilon: float, dtype: torch.dtype, device: torch.device
) -> "HeadNormKernel | None":
    width = _fitting_width(device, head_dim)
    if width is None:
        return None
    from headway_runtime.kernels.cpu.norm import HeadNormKernel

    return HeadNormKernel(num_heads, head_dim, epsilon, dtype, width)


def pairs_linear(parts: list[Tensor], bias: Tensor | None) -> "PairsLinear | None":
    """parts: of one weight, one below the other, [outputs, inputs] each. None too where others are faster."""
    num_inputs = parts[0].shape[1]
    width = _fitting_width(parts[0].device, *(len(part) for part in parts))
    if width is None or parts[0].dtype != torch.bfloat16 or num_inputs % 2:
        return None
    from headway_runtime.kernels.cpu import linear, processor

    if width != linear.PANEL or not processor.multiplies_pairs():
        return None
    return linear.PairsLinear(parts, bias)


def lossless_linear(parts: list[Tensor], bias: Tensor | None) -> "LosslessLinear | None":
    """As `pairs_linear`, with the same results, on weights of 12 bits. None too where these do not do."""
    first = parts[0]
    width = _fitting_width(first.device, *(len(part) for part in parts))
    if width is None or first.dtype != torch.bfloat16 or (bias is not None and bias.dtype != first.dtype):
        return None
    from headway_runtime.kernels.cpu import processor, strips
    from headway_runtime.kernels.cpu.lossless_codes import STEP_INPUTS
    from headway_runtime.kernels.cpu.lossless_encoder import encoded
    from headway_runtime.kernels.cpu.lossless_linear import LosslessLinear

    if width != strips.PANEL or first.shape[1] % STEP_INPUTS or not processor.reads_12_bits():
        return None
    weight = encoded(parts, strips.num_panels_of([len(part) for part in parts]))
    return None if weight is None else LosslessLinear(weight, bias)


def is_compressed(linear: object) -> bool:
    """Whether it is one of `lossless_linear`."""
    if not _are_available():
        return False
    from headway_runtime.kernels.cpu.lossless_linear import LosslessLinear

    return isinstance(linear, LosslessLinear)


def int8_linear(parts: list[Int8Weight], bias: Tensor | None) -> "GroupedLinear | IntegerLinear | None":
    """parts: of one weight, one below the other, that treat their input alike."""
    assert all(part.input == parts[0].input for part in parts)
    if not _fits(parts[0].codes, bias):
        return None
    from headway_runtime.kernels.cpu import coded_linear

    codes, scales = [part.codes for part in parts], [part.scales.unsqueeze(1) for part in parts]
    if parts[0].input is None:
        return coded_linear.int8_linear(codes, scales, bias)
    return coded_linear.integer_linear(codes, scales, _quantizer(parts[0].input), bias)


def _quantizer(quantization: Int8Input) -> "RowQuantizer":
    from headway_runtime.kernels.cpu.row_numbers import RowQuantizer

    if quantization.scale is not None:
        return RowQuantizer("given", quantization.scale, quantization.zero)
    return RowQuantizer("magnitude" if quantization.is_symmetric else "range")


def int8_group_linear(parts: list[Int8GroupWeight], bias: Tensor | None) -> "GroupedLinear | None":
    """parts: of one weight, one below the other, with the same order of inputs. None too where codes are
    further from their zero points than 8 bits say."""
    if not _fits(parts[0].codes, bias):
        return None
    from headway_runtime.kernels.cpu import coded_linear

    codes = [
        part.codes if part.zeros is None else coded_linear.above_zero(part.codes, part.zeros)
        for part in parts
    ]
    found = [part for part in codes if part is not None]
    if len(found) < len(parts):
        return None
    return coded_linear.int8_linear(found, [part.scales for part in parts], bias, parts[0].input_order)


def int4_linear(parts: list[Int4Weight], bias: Tensor | None) -> "GroupedLinear | None":
    """parts: of one weight, one below the other, with the same order of inputs."""
    if not _fits(parts[0].codes, bias):
        return None
    from headway_runtime.kernels.cpu import coded_linear

    codes, scales, zeros = zip(*((part.codes, part.scales, part.zeros) for part in parts), strict=True)
    return coded_linear.int4_linear(codes, scales, zeros, bias, parts[0].input_order)


def fp8_linear(parts: list[Fp8Weight], bias: Tensor | None) -> "GroupedLinear | None":
    """parts: of one weight, one below the other."""
    if not _fits(parts[0].codes, bias):
        return None
    from headway_runtime.kernels.cpu import coded_linear

    scales = []
    for part in parts:
        if part.block is None:
            scales.append(part.scales.unsqueeze(1))
            continue
        outputs, inputs = part.shape
        height, width = part.block
        if inputs % width:
            return None
        scales.append(part.scales.repeat_interleave(height, 0)[:outputs])
    return coded_linear.fp8_linear([part.codes for part in parts], scales, bias)


def multiplies_codes() -> bool:
    """Whether this processor has products of 8- and 4-bit weights with bfloat16."""
    if not _are_available():
        return False
    from headway_runtime.kernels.cpu import coded_linear

    return coded_linear.can_run()


def _fits(codes: Tensor, bias: Tensor | None) -> bool:
    """Whether there can be a kernel, as far as devices and the bias tell."""
    is_ours = uses_cpu_kernels(codes.device) and (bias is None or bias.dtype == torch.bfloat16)
    return is_ours and multiplies_codes()


def activate_and_multiply(
    activation: Activation, size: int, dtype: torch.dtype, device: torch.device
) -> "ActivateAndMultiply | None":
    width = _fitting_width(device, size)
    if width is None or activation == "gelu":
        return None
    from headway_runtime.kernels.cpu.gate import ActivateAndMultiply

    return ActivateAndMultiply(activation, size, dtype, width)


def weighted_sum(size: int, count: int, dtype: torch.dtype, device: torch.device) -> "WeightedSum | None":
    """Of `count` rows each, of so many numbers."""
    width = _fitting_width(device, size)
    if width is None:
        return None
    from headway_runtime.kernels.cpu.weighted_sum import WeightedSum

    return WeightedSum(size, count, dtype, width)


def adapter_products(
    num_inputs: int, sizes: Sequence[int], num_slots: int, dtype: torch.dtype, device: torch.device
) -> "AdapterProducts | None":
    """What adapters add to a product. sizes: outputs of its parts."""
    width = _fitting_width(device, num_inputs, *sizes)
    if width is None:
        return None
    from headway_runtime.kernels.cpu.adapter_products import AdapterProducts

    return AdapterProducts(num_inputs, sizes, num_slots, dtype, width)


def noted(compute: Callable[[], Tensor]) -> "tuple[Tensor, list[Call]]":
    """What `compute` returns, and the kernels that it called."""
    from headway_runtime.kernels.cpu.compiler import noted_calls

    with noted_calls() as calls:
        return compute(), calls


def tape(calls: "list[Call]", owners: object) -> "Tape":
    """The calls, to be made again. owners: of the memory that they read and write."""
    from headway_runtime.kernels.cpu.tape import Tape

    return Tape(calls, owners)
