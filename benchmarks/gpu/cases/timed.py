"""Which kernels are timed and tuned, at which shapes: those of real models at a server's batch sizes.

What the goals are about comes first, so that a cut loses what matters least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from benchmarks.gpu.cases.attention import decode_case, prefill_case
from benchmarks.gpu.cases.case import Case
from benchmarks.gpu.cases.experts import (
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
    plain_case,
    plain_numbers_case,
    thin_case,
)
from benchmarks.gpu.cases.sampling import blocks_case, draw_case, edit_case, logprobs_case
from benchmarks.gpu.costs import KVName, ModelShape, model_shape
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MOE, TINY_QWEN3

from headway_runtime.kernels.triton.coded_weight import Form
from headway_runtime.kernels.triton.gated_product import MOST_ROWS as GATED_ROWS
from headway_runtime.request import SamplingParams

FORMS: tuple[Form, ...] = ("int4", "fp8", "int8")
KV_NAMES: tuple[KVName, ...] = ("bfloat16", "fp8", "int8")
# Rows of an fp8 weight that go through `coded_product.py`; more are multiplied as fp8 themselves.
MOST_FP8_ROWS = 64
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k": SamplingParams(top_k=50),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """llama, qwen: plain models. mixture: one with experts.

    rows: of a decode step. prompt_rows: of a step of prompts. decodes: batch and context. prompts: rows and
    context. verified: rows of each sequence where guesses are checked.
    """

    llama: ModelShape
    qwen: ModelShape
    mixture: ModelShape
    rows: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    verified: tuple[int, int, int]


FULL = Sizes(
    llama=model_shape(LLAMA_8B),
    qwen=model_shape(QWEN3_8B),
    mixture=model_shape(QWEN3_30B_A3B),
    rows=(1, 8, 16, 32, 64, 128, 256),
    prompt_rows=(512, 2048, 8192),
    decodes=((32, 8192), (1, 8192), (1, 512), (32, 1024), (256, 1024)),
    prompts=((8192, 8192), (2048, 2048), (2048, 16384), (8192, 32768)),
    verified=(8, 5, 2048),
)
# For the interpreter. Sizes that groups of 128 divide, as real ones are.
_WIDER = {"hidden_size": 128, "intermediate_size": 256}
SMOKE = Sizes(
    llama=model_shape(TINY | _WIDER),
    qwen=model_shape(TINY_QWEN3 | _WIDER | {"vocab_size": 330, "intermediate_size": 384}),
    mixture=model_shape(TINY_MOE | {"num_experts": 4, "num_experts_per_tok": 2}),
    rows=(1, 3),
    prompt_rows=(20,),
    decodes=((2, 40),),
    prompts=((16, 16), (16, 33)),
    verified=(2, 3, 20),
)


def timed_cases(sizes: Sizes) -> list[Case]:
    """Each has a name of its own. The same at every call, so that processes can agree on one by its name."""
    parts = (_attention(sizes), _products(sizes), _experts(sizes), _fused(sizes), _sampling(sizes))
    return list(chain(*parts))


def _attention(sizes: Sizes) -> Iterator[Case]:
    llama, mixture = sizes.llama, sizes.mixture
    for place, (batch, context) in enumerate(sizes.decodes):
        for kv in KV_NAMES if place == 0 else KV_NAMES[:1]:
            yield decode_case(
                f"decode attention, {batch} at {context}, {kv}", llama, [(1, context)] * batch, kv
            )
    batch, context = sizes.decodes[0]
    yield decode_case(
        f"decode attention, 8 heads to one, {batch} at {context}", mixture, [(1, context)] * batch
    )
    unlike = [(1, context if index % 8 == 0 else context // 16) for index in range(batch)]
    yield decode_case(f"decode attention, {batch} of unlike lengths", llama, unlike)
    batch, queries, context = sizes.verified
    yield decode_case(
        f"decode attention, {queries} tokens of {batch} at {context}", llama, [(queries, context)] * batch
    )
    for kv in KV_NAMES:
        yield decode_case(
            f"decode attention, 8 heads to one, {queries} tokens of {batch} at {context}, {kv}",
            mixture,
            [(queries, context)] * batch,
            kv,
        )
    for place, (rows, context) in enumerate(sizes.prompts):
        for kv in KV_NAMES if place == 0 else KV_NAMES[:1]:
            yield prefill_case(f"prefill attention, {rows} of {context}, {kv}", llama, [(rows, context)], kv)
    rows, context = sizes.prompts[0]
    yield prefill_case(f"prefill attention, 8 heads to one, {rows} of {context}", mixture, [(rows, context)])
    piece = max(1, rows // 16)
    yield prefill_case(f"prefill attention, 16 prompts of {piece}", llama, [(piece, piece)] * 16)


def _products(sizes: Sizes) -> Iterator[Case]:
    yield from _coded_products(sizes)
    yield from _plain_products(sizes)
    yield from _many_rows(sizes)


def _coded_products(sizes: Sizes) -> Iterator[Case]:
    """The gate and up projection with its gate, at all batch sizes; of few rows the others too."""
    shapes = sizes.llama.projections
    wide = shapes["gate_up"]
    for form in FORMS:
        for rows in sizes.rows:
            name = f"{form} product, {rows} x {wide[0]} x {wide[1]}"
            if form == "fp8" and rows > MOST_FP8_ROWS:
                yield many_rows_case(f"{name}, as layers do", form, rows, wide)
            else:
                yield coded_case(name, form, rows, wide, activation="silu")
        for rows in sizes.rows[:2]:
            for label in ("qkv", "output", "down"):
                own = shapes[label]
                yield coded_case(f"{form} {label}, {rows} x {own[0]} x {own[1]}", form, rows, own)


def _plain_products(sizes: Sizes) -> Iterator[Case]:
    llama = sizes.llama
    shapes = llama.projections | {"head": (llama.vocab_size, llama.hidden)}
    wide, other = shapes["gate_up"], sizes.qwen.projections["gate_up"]
    for rows in sizes.rows:
        if rows <= GATED_ROWS:
            yield gated_case(f"gated product, {rows} x {wide[0]} x {wide[1]}", rows, wide)
    first = sizes.rows[0]
    yield gated_case(f"gated product, {first} x {other[0]} x {other[1]}", first, other)
    for label in ("qkv", "output", "down"):
        for rows in sizes.rows[:3]:
            own = shapes[label]
            yield thin_case(f"thin product, {label}, {rows} x {own[0]} x {own[1]}", rows, own)
    for label, shape in shapes.items():
        for rows in sizes.rows if label == "gate_up" else sizes.rows[:1]:
            yield plain_case(f"cublas {label}, {rows} x {shape[0]} x {shape[1]}", rows, shape)


def _many_rows(sizes: Sizes) -> Iterator[Case]:
    """Of prompts, and what turns rows or weights into what is multiplied."""
    shapes = sizes.llama.projections
    wide = shapes["gate_up"]
    shape = f"{wide[0]} x {wide[1]}"
    for rows in sizes.prompt_rows:
        yield plain_case(f"cublas gate_up, {rows} x {shape}", rows, wide)
        for form in FORMS:
            yield many_rows_case(f"{form} many rows, {rows} x {shape}", form, rows, wide)
    for form in FORMS:
        yield plain_numbers_case(f"{form} to plain numbers, {shape}", form, wide)
    for rows in (*sizes.rows[:5:2], *sizes.prompt_rows[-2:]):
        yield codes_product_case(f"int8 by int8, {rows} x {shape}", rows, wide, "int8")
    for rows in (sizes.rows[-1], *sizes.prompt_rows[-2:]):
        yield codes_product_case(f"fp8 blocks by fp8, {rows} x {shape}", rows, wide, "fp8 blocks")
    for size in (shapes["output"][1], shapes["down"][1]):
        for rows in (sizes.rows[-1], sizes.prompt_rows[-1]):
            yield coded_rows_case(f"rows as fp8, {rows} x {size}", rows, size, torch.float8_e4m3fn)
            yield coded_rows_case(f"rows as int8, {rows} x {size}", rows, size, torch.int8)


def _experts(sizes: Sizes) -> Iterator[Case]:
    model = sizes.mixture
    for rows in (*sizes.rows, *sizes.prompt_rows[-2:]):
        yield experts_case(f"experts, {rows} rows", model, rows)
    for form in FORMS[:2]:
        for rows in (*sizes.rows[:1], *sizes.rows[3:6:2], *sizes.prompt_rows[-1:]):
            yield experts_case(f"{form} experts, {rows} rows", model, rows, form)
    yield experts_case("float32 experts", model, sizes.rows[0], dtype=torch.float32)
    for rows in (*sizes.rows[:1], *sizes.rows[3:6:2], *sizes.prompt_rows[-1:]):
        yield rows_case(f"experts of int8 by int8, {rows} rows", model, rows)
    for rows in (sizes.rows[-1], sizes.prompt_rows[-1]):
        yield inputs_case(f"inputs in experts' orders, {rows} rows", model, rows, as_codes=False)
        yield inputs_case(f"inputs by experts' scales, {rows} rows", model, rows, as_codes=True)
        yield choice_case(f"choice of experts, {rows} rows", model, rows)
        yield order_case(f"order of experts, {rows} rows", model, rows)
        yield sum_case(f"sum of experts, {rows} rows", model, rows)


def _fused(sizes: Sizes) -> Iterator[Case]:
    llama, qwen, mixture = sizes.llama, sizes.qwen, sizes.mixture
    few, many = sizes.rows[0], sizes.prompt_rows[-1]
    for rows in (few, sizes.rows[-1], many):
        for size in (llama.hidden, mixture.hidden):
            yield norm_case(f"add and norm, {rows} x {size}", rows, size)
        yield rotate_case(f"rotate and store, {rows} rows", llama, rows)
        yield rotate_case(f"norm heads, rotate and store, {rows} rows", qwen, rows)
        yield gate_case(f"gate, {rows} x {llama.middle}", rows, llama.middle)
    for kv in KV_NAMES[1:]:
        yield rotate_case(f"rotate and store as {kv}, {many} rows", llama, many, kv)
    for dtype, short in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        yield norm_case(f"add and norm as {short}, {many} x {llama.hidden}", many, llama.hidden, codes=dtype)
        yield gate_case(f"gate as {short}, {many} x {llama.middle}", many, llama.middle, codes=dtype)


def _sampling(sizes: Sizes) -> Iterator[Case]:
    some = tuple(dict.fromkeys((sizes.rows[0], sizes.rows[len(sizes.rows) // 2], sizes.rows[-1])))
    for vocab_size, numbers in ((sizes.llama.vocab_size, some), (sizes.qwen.vocab_size, some[1:2])):
        for rows in numbers:
            yield blocks_case(f"blocks of logits, {rows} x {vocab_size}", rows, vocab_size)
            for name, params in SAMPLINGS.items():
                yield draw_case(f"draw, {name}, {rows} x {vocab_size}", rows, vocab_size, params)
    context = sizes.decodes[0][1]
    for rows in some:
        yield place_step_case(f"places of a step, {rows} at {context}", rows, context)
    vocab_size = sizes.llama.vocab_size
    for rows in (sizes.rows[0], sizes.rows[-1]):
        yield edit_case(f"edits, {rows} rows", rows, vocab_size)
        yield logprobs_case(f"log-probabilities and 5 likeliest, {rows} rows", rows, vocab_size, 5)
