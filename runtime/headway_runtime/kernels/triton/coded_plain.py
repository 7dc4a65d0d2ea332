"""The plain numbers of a weight of codes, for a product of many rows by cuBLAS.

A product of `coded_product.py` widens its codes again for every tile of 128 rows, and between two products
of tensor cores; with hundreds of rows that costs more than writing the numbers once (2 bytes each) and
reading them once. Floor: 0.5 or 1 byte read and 2 written for each weight over the bandwidth of memory: 68
us for the 117 million weights of 4 bits of an 8B Llama's gate and up projections at 4.3 TB/s, where cuBLAS
then spends 600 us on 2,048 rows. Expected: 80% of it; loads as in coded_weight.py, stores of 64 bytes of
each output, which meet in the second level of cache.
"""

from collections.abc import Iterator
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.coded_weight import BLOCK_INPUTS, CodedWeight, Form
from headway_runtime.kernels.triton.launch import (
    CompileCase,
    Gpu,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.widening import (
    nibbles,
    scale_and_zero,
    two_bytes,
)

KERNEL = "coded_plain"
CANDIDATES = {
    "default": [
        {"block_outputs": outputs, "most_product_rows": rows, "num_warps": 4, "num_stages": 1}
        for outputs in (32, 64, 128)
        for rows in (256, 384, 512, 1024)
    ]
}


@triton.jit
def coded_plain_kernel(
    codes,
    meanings,
    out,
    num_outputs,
    num_inputs,
    form: tl.constexpr,
    meaning: tl.constexpr,
    group_size: tl.constexpr,
    scale_rows: tl.constexpr,
    block_outputs: tl.constexpr,
):
    """Grid: tiles of outputs, blocks of inputs. out: [num_outputs, num_inputs], rounded once."""
    dtype: tl.constexpr = out.dtype.element_ty
    usual_zero: tl.constexpr = 8.0 if form == "int4" else 0.0
    is_small: tl.constexpr = group_size != 0 and group_size < 128
    num_words: tl.constexpr = (group_size // 2 if is_small else 64) if form == "fp8" else 32
    codes_per_word: tl.constexpr = 4 if form == "int4" else 2
    num_loads: tl.constexpr = 128 // num_words // codes_per_word
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    block = tl.program_id(1)
    places = tl.arange(0, num_words)
    is_output = outputs < num_outputs
    own = tl.minimum(outputs, num_outputs - 1)
    meanings_at = meanings + own // scale_rows
    num_meanings = tl.cdiv(num_outputs, scale_rows)
    # A word of fp8 has neighbours, others have codes 32 inputs apart.
    num_planes: tl.constexpr = 1 if form == "fp8" else codes_per_word
    for load in tl.static_range(num_loads):
        if form == "fp8":
            start_of_load = block * 64 + load * num_words
            is_code = (start_of_load + places < num_inputs // 2)[None, :]
            start = own.to(tl.int64)[:, None] * (num_inputs // 2) + start_of_load
            words = tl.load(codes + start + places[None, :], mask=is_code, other=0)
        else:
            start = block.to(tl.int64) * num_outputs * (32 * num_loads) + load * 32
            words = tl.load(codes + start + own[:, None] * (32 * num_loads) + places[None, :])
        if form == "int4":
            planes = nibbles(words, tl.zeros([block_outputs, 32], tl.float32), tl.float16)
        else:
            planes = two_bytes(words, form, tl.float16)
        for plane in tl.static_range(num_planes):
            first = block * 128 + (load * codes_per_word + plane) * num_words
            if form == "fp8":
                inputs = first + tl.arange(0, 2 * num_words)
                numbers = tl.interleave(planes[0], planes[1]).to(tl.float32)
            else:
                inputs = first + places
                numbers = planes[plane].to(tl.float32)
            group = first // group_size if group_size else 0
            scales, zeros = scale_and_zero(tl.load(meanings_at + group * num_meanings), meaning, usual_zero)
            plain = (numbers - zeros[:, None]) * scales[:, None]
            out_at = out + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
            tl.store(out_at, narrow(plain, dtype), mask=is_output[:, None] & (inputs < num_inputs)[None, :])


def most_product_rows(weight: CodedWeight) -> int:
    """With more rows than this, plain numbers are faster."""
    return configuration(KERNEL, weight.form, gpu_of(weight.codes.device))["most_product_rows"]


def all_most_product_rows(gpu: Gpu) -> set[int]:
    """Those of all forms of weights."""
    return {configuration(KERNEL, form, gpu)["most_product_rows"] for form in get_args(Form)}


def coded_plain(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]"""
    device = weight.codes.device
    out = torch.empty((weight.num_outputs, weight.num_inputs), dtype=dtype, device=device)
    values = configuration(KERNEL, weight.form, gpu_of(device))
    values.pop("most_product_rows")
    constants, options = split_options(values)
    grid = (triton.cdiv(weight.num_outputs, constants["block_outputs"]), weight.num_blocks)
    coded_plain_kernel[grid](
        weight.codes.view(torch.int16),
        weight.meanings,
        out,
        weight.num_outputs,
        weight.num_inputs,
        form=weight.form,
        meaning=weight.meaning,
        group_size=weight.group_size,
        scale_rows=weight.scale_rows,
        **constants,
        **options,
    )
    return out


def plain_reference(weight: CodedWeight) -> Tensor:
    """float32 [outputs, inputs], by torch."""
    usual = 8.0 if weight.form == "int4" else 0.0
    numbers = weight.codes.float() if weight.form == "fp8" else _unpacked(weight)
    words = weight.meanings.repeat_interleave(weight.scale_rows, 1)[:, : weight.num_outputs].t()
    if weight.meaning == "float32":
        scales, zeros = words, torch.full_like(words, usual)
    else:
        half = torch.float16 if weight.meaning == "float16" else torch.bfloat16
        scales, zeros = words.to(torch.int16).view(half).float(), (words >> 16).float()
    group_size = weight.group_size or weight.num_blocks * BLOCK_INPUTS
    scales, zeros = (
        each.repeat_interleave(group_size, 1)[:, : weight.num_inputs] for each in (scales, zeros)
    )
    plain: Tensor = (numbers - zeros) * scales
    return plain


def _unpacked(weight: CodedWeight) -> Tensor:
    """float32 [outputs, inputs], of words."""
    bits = 4 if weight.form == "int4" else 8
    words = weight.codes.transpose(0, 1).unflatten(2, (-1, 1, 32)).int()
    shifts = torch.arange(0, 16, bits, device=words.device, dtype=torch.int32)[:, None]
    codes = ((words >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)[:, : weight.num_inputs]
    numbers: Tensor = codes if weight.form == "int4" else codes.view(torch.int8)
    return numbers.float()


def _cases() -> Iterator[CompileCase]:
    for one in configurations(KERNEL):
        constants, options = split_options(one.values)
        constants.pop("most_product_rows")
        for form, meaning, group_size in (
            ("int4", "float16", 128),
            ("int8", "float16", 32),
            ("fp8", "float32", 0),
            ("fp8", "float32", 32),
        ):
            yield CompileCase(
                f"{one.label} {form} groups of {group_size}",
                coded_plain_kernel,
                {
                    "codes": "*i16",
                    "meanings": "*fp32" if meaning == "float32" else "*i32",
                    "out": "*bf16",
                    "num_outputs": "i32:16",
                    "num_inputs": "i32:16",
                },
                {"form": form, "meaning": meaning, "group_size": group_size, "scale_rows": 1, **constants},
                options,
                one.capabilities,
            )


COMPILED = list(_cases())
