"""Rows of inputs become codes of 8 bits, each row (or each 128 numbers of it) with a scale of its own.

For products of codes with codes where whatever made the rows did not make them codes at once. Floor: 2 bytes
read and 1 written for each number, 64 MB and 15 us at 4.3 TB/s for 2,048 rows of 10,240: against the 160 us
of a product that it saves. One program has a row, in loads of 16 bytes; expected 80% of the floor for many
rows.

int8 rounds halves to even numbers after a division, as the reference does, and knows zero points (a row's
least number becomes the least code) and scales that are given. fp8 is e4m3 and symmetric.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import EXACT, Kept, as_bytes, codes_of, kept_as
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)

KERNEL = "coded_rows"
GROUP = 128
# More numbers in a row than a program holds in registers.
MOST_NUMBERS = 32768
# Rows of zeros have no scale of their own.
LEAST_SCALE = 1e-12
CANDIDATES = {
    "4096": [{"num_warps": warps} for warps in (4, 8)],
    "default": [{"num_warps": warps} for warps in (8, 16)],
}

_LEAST_SCALE: tl.constexpr = tl.constexpr(LEAST_SCALE)
_GROUP: tl.constexpr = tl.constexpr(GROUP)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Numbers are (code - zero) * scale.

    codes: int8 or float8_e4m3fn [rows, size]. scales: float32 [rows], or [rows, size / 128] for groups.
    zeros: int32 [rows], or None for 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


@triton.jit
def coded_rows_kernel(
    x,
    codes,
    scales,
    zeros,
    size,
    x_stride,
    given_scale,
    given_zero,
    KEPT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows. KIND: row (symmetric), group (of 128, symmetric), range (with zero points), or given."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_inside = places < size
    numbers = tl.load(x + row * x_stride + places, mask=is_inside, other=0.0).to(tl.float32)
    largest_code: tl.constexpr = 127.0 if KEPT == "int8" else 448.0
    if KIND == "group":
        grouped = tl.reshape(numbers, [BLOCK // _GROUP, _GROUP])
        scale = tl.maximum(tl.max(tl.abs(grouped), axis=1) / largest_code, _LEAST_SCALE)
        group = tl.arange(0, BLOCK // _GROUP)
        tl.store(scales + row * (size // _GROUP) + group, scale, mask=group < size // _GROUP)
        divided = tl.reshape(tl.div_rn(grouped, tl.broadcast_to(scale[:, None], grouped.shape)), [BLOCK])
    else:
        if KIND == "row":
            scale = tl.maximum(tl.max(tl.abs(numbers), axis=0) / largest_code, _LEAST_SCALE)
        elif KIND == "range":
            least, most = tl.minimum(tl.min(numbers, axis=0), 0.0), tl.maximum(tl.max(numbers, axis=0), 0.0)
            scale = tl.maximum((most - least) / 255.0, _LEAST_SCALE)
        else:
            scale = tl.zeros([], tl.float32) + given_scale
        tl.store(scales + row, scale)
        divided = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
    if KIND == "range" or KIND == "given":
        # Adding and taking off 1.5 * 2**23 leaves no bits below 1: rounded, halves to even numbers.
        rounded = (tl.minimum(tl.maximum(divided, -1e5), 1e5) + 12582912.0) - 12582912.0
        zero = (-128.0 - tl.div_rn(least, scale) + 12582912.0) - 12582912.0 if KIND == "range" else given_zero
        tl.store(zeros + row, zero.to(tl.int32))
        divided = tl.minimum(tl.maximum(rounded + zero, -128.0), 127.0)
    tl.store(codes + row * size + places, codes_of(divided, KEPT), mask=is_inside)


def can_code(size: int) -> bool:
    return size <= MOST_NUMBERS


def coded_rows(
    x: Tensor,
    dtype: torch.dtype,
    *,
    in_groups: bool = False,
    is_symmetric: bool = True,
    given: tuple[float, int] | None = None,
) -> CodedRows:
    """x: [rows, size], plain. dtype: int8 or float8_e4m3fn. given: one scale and zero point for all rows.

    in_groups: a scale for each 128 numbers, which divide a row.
    """
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    gpu = gpu_of(x.device)
    codes = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    shape = (num_rows, size // GROUP) if in_groups else (num_rows,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    has_zeros = given is not None or not is_symmetric
    zeros = torch.empty(num_rows, dtype=torch.int32, device=x.device) if has_zeros else None
    if num_rows:
        block = max(GROUP, triton.next_power_of_2(size))
        _, options = split_options(configuration(KERNEL, str(block), gpu))
        kind = "given" if given else "group" if in_groups else "row" if is_symmetric else "range"
        given_scale, given_zero = given or (1.0, 0)
        coded_rows_kernel[(num_rows,)](
            x,
            as_bytes(codes),
            scales,
            zeros,
            size,
            x.stride(0),
            given_scale,
            float(given_zero),
            KEPT=kept_as(dtype, gpu),
            KIND=kind,
            BLOCK=block,
            **options,
            **EXACT,
        )
    return CodedRows(codes, scales, zeros)


def coded_rows_reference(
    x: Tensor,
    dtype: torch.dtype,
    *,
    in_groups: bool = False,
    is_symmetric: bool = True,
    given: tuple[float, int] | None = None,
) -> CodedRows:
    """The same by torch."""
    numbers, largest = x.float(), 127.0 if dtype == torch.int8 else 448.0
    if in_groups:
        numbers = numbers.unflatten(1, (-1, GROUP))
    zeros = None
    if given is not None:
        scales = torch.full((len(x),), given[0], device=x.device)
        zeros = torch.full((len(x),), given[1], dtype=torch.int32, device=x.device)
    elif is_symmetric:
        scales = (numbers.abs().amax(-1) / largest).clamp_(min=LEAST_SCALE)
    else:
        least, most = numbers.amin(1).clamp_(max=0), numbers.amax(1).clamp_(min=0)
        scales = ((most - least) / 255).clamp_(min=LEAST_SCALE)
        zeros = (-128 - least / scales).round_().to(torch.int32)
    divided = numbers / scales[..., None]
    if dtype == torch.int8:
        divided = divided.round_()
        if zeros is not None:
            divided = (divided + zeros[:, None]).clamp_(-128, 127)
    return CodedRows(divided.view(x.shape).to(dtype), scales, zeros)


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNEL):
        block = 32768 if one.shape_class == "default" else int(one.shape_class)
        _, options = split_options(one.values)
        forms: list[tuple[Kept, str]] = [("int8", "range"), ("float8", "group")]
        if one.shape_class == "default":
            forms += [("int8", "row"), ("float8", "row")]
        for kept, kind in forms:
            capabilities = tuple(each for each in one.capabilities if kept == "int8" or each >= 89)
            has_zeros = kind == "range"
            signature = {"x": "*bf16", "codes": "*i8" if kept == "int8" else "*u8", "scales": "*fp32"}
            signature |= dict.fromkeys(("size", "x_stride"), "i32:16")
            signature |= dict.fromkeys(("given_scale", "given_zero"), "fp32")
            constants: dict[str, object] = {"KEPT": kept, "KIND": kind, "BLOCK": block}
            if has_zeros:
                signature["zeros"] = "*i32"
            else:
                constants["zeros"] = None
            yield CompileCase(
                f"{one.label} {kept} {kind}",
                coded_rows_kernel,
                signature,
                constants,
                {**options, **EXACT},
                capabilities,
            )


COMPILED = list(_cases())
