"""Which kernels are checked, at which shapes: odd sizes, single tokens, every form, kind and class of rows.

Real shapes are checked where they are timed (see timed.py). What a GPU runs is not what the interpreter ran:
it has instructions of its own for 8-bit numbers and for products, and a compiler that reorders.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
from benchmarks.gpu.cases.attention import BLOCK_SIZE, Lengths, decode_case, prefill_case
from benchmarks.gpu.cases.case import Case
from benchmarks.gpu.cases.experts import (
    broken_choice_case,
    choice_case,
    experts_case,
    inputs_case,
    order_case,
    rows_case,
    sum_case,
)
from benchmarks.gpu.cases.fused import gate_case, norm_case, rotate_case
from benchmarks.gpu.cases.loop import place_step_case
from benchmarks.gpu.cases.products import (
    coded_case,
    coded_rows_case,
    codes_product_case,
    gated_case,
    many_rows_case,
    plain_numbers_case,
    thin_case,
)
from benchmarks.gpu.cases.sampling import blocks_case, broken_draw_case, draw_case, edit_case, logprobs_case
from benchmarks.gpu.cases.timed import FORMS, KV_NAMES, SAMPLINGS
from benchmarks.gpu.costs import ModelShape

from headway_runtime.kernels.triton.paged_rows import Scoring
from headway_runtime.model_config import Activation
from headway_runtime.request import SamplingParams

MODEL = ModelShape(
    vocab_size=330,
    hidden=192,
    middle=160,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    normalizes_heads=True,
    num_experts=0,
    num_used=0,
)
MIXTURE = replace(MODEL, num_experts=5, num_used=2)
# One row of each class of products, and rows that end within a tile.
ROWS = (1, 5, 16, 31, 64, 100, 300)
FEW_ROWS = (1, 5)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
DECODES: Lengths = [(1, 1), (1, 16), (1, 17), (1, 150), (1, 3000), (1, 33)]
GUESSES: Lengths = [(5, 90), (1, 40), (3, 3), (8, 700)]
CHUNKS: Lengths = [(1, 1), (200, 200), (33, 160), (17, 17), (300, 900)]
SHORT_DECODES: Lengths = [(1, 1), (1, 17), (1, 40)]
SHORT_GUESSES: Lengths = [(2, 20), (1, 5)]
SHORT_CHUNKS: Lengths = [(1, 1), (20, 20), (7, 30)]
FLOAT32_TOLERANCE = 1e-4
# Numbers of a layer in front of what is read: no 32-bit integer counts those behind. 4.3 GB in bfloat16.
SKIPPED_NUMBERS = 2**31


def checked_cases(*, is_smoke: bool) -> list[Case]:
    """Each has a name of its own. is_smoke: one of each kind, small."""
    parts = (
        _attention(is_smoke=is_smoke),
        _products(is_smoke=is_smoke),
        _experts(is_smoke=is_smoke),
        _fused(is_smoke=is_smoke),
        _sampling(is_smoke=is_smoke),
        [place_step_case(f"places of a step of {rows}", rows, 300) for rows in (1, 9)],
    )
    return list(chain(*parts))


def _attention(*, is_smoke: bool) -> Iterator[Case]:
    decodes, guesses, chunks = DECODES, GUESSES, CHUNKS
    if is_smoke:
        decodes, guesses, chunks = SHORT_DECODES, SHORT_GUESSES, SHORT_CHUNKS
    head_dims = (64, 96, 128, 256) if not is_smoke else (16,)
    scorings = {
        "window": Scoring(0.1, window=20),
        "soft cap": Scoring(0.1, soft_cap=3.0),
        "window and soft cap": Scoring(0.1, 33, 5.0),
    }
    for head_dim in head_dims:
        model = replace(MODEL, head_dim=head_dim)
        for kv in KV_NAMES:
            yield decode_case(f"decodes, heads of {head_dim}, {kv}", model, decodes, kv)
            yield decode_case(f"guesses, heads of {head_dim}, {kv}", model, guesses, kv)
            yield prefill_case(f"chunks, heads of {head_dim}, {kv}", model, chunks, kv)
    usual = replace(MODEL, head_dim=head_dims[-1] if is_smoke else 128)
    for name, scoring in scorings.items():
        for kv in KV_NAMES[:2]:
            yield decode_case(f"guesses, {name}, {kv}", usual, guesses, kv, scoring=scoring)
            yield prefill_case(f"chunks, {name}, {kv}", usual, chunks, kv, scoring=scoring)
    for num_groups in (5,) if is_smoke else (1, 5, 8):
        model = replace(usual, num_heads=2 * num_groups)
        yield decode_case(f"decodes, {num_groups} heads to one", model, decodes)
        yield decode_case(f"guesses, {num_groups} heads to one", model, guesses)
        yield prefill_case(f"chunks, {num_groups} heads to one", model, chunks)
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.float32, FLOAT32_TOLERANCE)):
        yield decode_case(f"decodes, {dtype}", usual, decodes, dtype=dtype, tolerance=tolerance)
        yield prefill_case(f"chunks, {dtype}", usual, chunks, dtype=dtype, tolerance=tolerance)
    skipped = skipped_blocks(is_smoke=is_smoke)
    yield decode_case("decodes, blocks far behind", usual, decodes, skipped=skipped)
    yield prefill_case("chunks, blocks far behind", usual, chunks, skipped=skipped)


def skipped_blocks(*, is_smoke: bool) -> int:
    """Of MODEL, on a GPU."""
    return 3 if is_smoke else SKIPPED_NUMBERS // (2 * MODEL.num_kv_heads * BLOCK_SIZE * MODEL.head_dim)


def _products(*, is_smoke: bool) -> Iterator[Case]:
    rows = FEW_ROWS if is_smoke else ROWS
    shape = (72, 384)
    for form in FORMS:
        for count in rows:
            yield coded_case(f"{form}, {count} rows", form, count, shape, has_bias=True)
        for activation in ACTIVATIONS:
            yield coded_case(f"{form}, {activation}", form, 5, (76, 384), activation=activation)
        yield coded_case(f"{form}, float16 rows", form, 3, shape, dtype=torch.float16)
        # Few outputs of many inputs, which are split among programs.
        yield coded_case(f"{form}, inputs in splits", form, 2, (70, 1536 if is_smoke else 8192))
        yield plain_numbers_case(f"{form}, plain numbers", form, (100, 384))
        yield many_rows_case(f"{form}, many rows", form, 20 if is_smoke else 400, (96, 384))
    kinds: tuple[Literal["float16", "bfloat16"], ...] = ("float16", "bfloat16")
    for group_size in (32, 64, 384):
        for zeros in kinds:
            yield coded_case(
                f"int4, groups of {group_size}, zero points beside {zeros}",
                "int4",
                4,
                shape,
                group_size=group_size,
                zeros=zeros,
            )
    yield coded_case("int8, groups of 32", "int8", 4, shape, group_size=32, zeros="float16")
    yield coded_case("fp8, blocks", "fp8", 4, (200, 384), group_size=128, scale_rows=128)
    yield coded_case("int4, inputs that fill no block", "int4", 4, (40, 160), group_size=32)
    for count in rows:
        yield codes_product_case(f"int8 by int8, {count} rows", count, shape, "int8")
        yield codes_product_case(
            f"int8 by int8 with zero points, {count} rows", count, shape, "int8 ranges", has_bias=True
        )
        yield codes_product_case(f"fp8 by fp8 in blocks, {count} rows", count, (200, 384), "fp8 blocks")
    coded = {
        "int8": {"dtype": torch.int8},
        "int8 ranges": {"dtype": torch.int8, "is_symmetric": False},
        "int8 given": {"dtype": torch.int8, "given": (0.013, -7)},
        "fp8": {"dtype": torch.float8_e4m3fn},
        "fp8 groups": {"dtype": torch.float8_e4m3fn, "in_groups": True},
    }
    for name, kinds_of in coded.items():
        yield coded_rows_case(f"rows as {name}", 5, 640, **kinds_of)  # type: ignore[arg-type]
    for count in (1, 20, 33, 64):
        yield gated_case(f"gated product, {count} rows", count, (154, 200), has_bias=count == 20)
    for count, weight in ((1, (154, 200)), (3, (77, 1000)), (16, (512, 4096))):
        name = f"thin product, {count} x {weight[0]} x {weight[1]}"
        yield thin_case(name, count, weight, has_bias=count == 3)
    for activation in ACTIVATIONS[1:]:
        yield gated_case(f"gated product, {activation}", 3, (154, 256), activation)


def _experts(*, is_smoke: bool) -> Iterator[Case]:
    model = MIXTURE if is_smoke else replace(MIXTURE, num_experts=60, num_used=4)
    for rows in (1, 23) if is_smoke else (1, 23, 400, 3000):
        yield experts_case(f"plain experts, {rows} rows", model, rows)
        for form in FORMS:
            yield experts_case(f"{form} experts, {rows} rows", model, rows, form)
        yield experts_case(f"float32 experts, {rows} rows", model, rows, dtype=torch.float32)
        for has_zeros in (False, True):
            name = f"experts of int8 by int8{', zero points' if has_zeros else ''}, {rows} rows"
            yield rows_case(name, model, rows, has_zeros=has_zeros)
        yield inputs_case(f"inputs in experts' orders, {rows} rows", model, rows, as_codes=False)
        yield inputs_case(f"inputs by experts' scales, {rows} rows", model, rows, as_codes=True)
        yield choice_case(f"choice of experts, {rows} rows", model, rows, normalizes=rows > 1)
        yield order_case(f"order of experts, {rows} rows", model, rows)
        yield sum_case(f"sum of experts, {rows} rows", model, rows)
    for num_experts in (5, 8):
        own = replace(MIXTURE, num_experts=num_experts)
        yield experts_case(f"a row of NaN to {num_experts} experts", own, 23, is_broken=True)
        for normalizes in (False, True):
            name = f"choice of {num_experts} by no numbers{', normalized' if normalizes else ''}"
            yield broken_choice_case(name, own, normalizes=normalizes)


def _fused(*, is_smoke: bool) -> Iterator[Case]:
    for size in (1, 100, 384) if is_smoke else (1, 100, 2048, 4096, 14336):
        yield norm_case(f"norm, 3 x {size}", 3, size, adds=False)
        yield norm_case(f"add and norm, 5 x {size}", 5, size)
        yield norm_case(f"norm, add and norm, 5 x {size}", 5, size, norms_delta=True)
    for dtype, short in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        yield norm_case(f"add and norm as {short}", 6, 4096, codes=dtype)
        yield gate_case(f"gate as {short}", 4, 3000, codes=dtype)
    for activation in ACTIVATIONS:
        yield gate_case(f"gate, {activation}", 3, 1500, activation)
    for head_dim in (16, 72) if is_smoke else (40, 64, 128, 256):
        model = replace(MODEL, head_dim=head_dim, normalizes_heads=head_dim > 64)
        for kv in KV_NAMES:
            rows = 5 if is_smoke else 21
            yield rotate_case(f"rotate and store, heads of {head_dim}, {kv}", model, rows, kv)
    skipped = skipped_blocks(is_smoke=is_smoke)
    model = replace(MODEL, head_dim=16) if is_smoke else MODEL
    yield rotate_case("rotate and store, blocks far behind", model, 21, skipped=skipped)


def _sampling(*, is_smoke: bool) -> Iterator[Case]:
    every = {
        **SAMPLINGS,
        "min-p": SamplingParams(min_p=0.1),
        "all filters": SamplingParams(temperature=1.3, top_k=20, top_p=0.7, min_p=0.02),
        "top-k of more than blocks": SamplingParams(top_k=2000, temperature=2.0),
    }
    for vocab_size in (330,) if is_smoke else (330, 32000, 128256, 151936):
        yield blocks_case(f"blocks of logits of {vocab_size}", 5, vocab_size)
        yield edit_case(f"edits of {vocab_size}", 4, vocab_size)
        yield logprobs_case(f"log-probabilities of {vocab_size}", 4, vocab_size, 5)
        for name, params in every.items():
            yield draw_case(f"draws of {vocab_size}, {name}", 3 if is_smoke else 16, vocab_size, params)
        for name in ("greedy", "all filters"):
            yield broken_draw_case(f"draws of {vocab_size} from no numbers, {name}", vocab_size, every[name])
