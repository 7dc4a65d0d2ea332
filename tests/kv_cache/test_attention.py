"""Attention over a cache of any type, with and without windows and soft caps, against float32 PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionLayer

KEPT = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "float32": (torch.float32, torch.float32),
    "float32 as bfloat16": (torch.float32, torch.bfloat16),
    "float32 as int8": (torch.float32, torch.int8),
    "float16 as fp8": (torch.float16, torch.float8_e4m3fn),
}
# Of the largest number: what rounding to the type may cost, scores and weights included.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.025, torch.float16: 0.003}
# KV heads, query heads that share one, head size, block size.
SHAPES = {
    "groups of two": (2, 2, 64, 16),
    "one head": (1, 1, 16, 8),
    "odd numbers": (3, 3, 96, 48),
    "wide heads": (1, 2, 256, 16),
    "groups of five": (2, 5, 32, 32),
}
# scale, window, soft cap; None for the usual scale.
LAYERS: dict[str, tuple[float | None, int | None, float | None]] = {
    "plain": (None, None, None),
    "a scale of its own": (0.31, None, None),
    "window": (None, 37, None),
    "window of one": (None, 1, None),
    "window of a block": (None, 16, None),
    "soft cap": (None, None, 3.0),
    "window and soft cap": (0.2, 50, 5.0),
}
PLAIN_AND_WINDOW = ("plain", "window", "window and soft cap")


def layer(name: str, head_dim: int) -> AttentionLayer:
    scale, window, soft_cap = LAYERS[name]
    return AttentionLayer(0, scale=scale or head_dim**-0.5, window=window, soft_cap=soft_cap)


def check(got: Tensor, *want: Tensor) -> None:
    wanted = torch.cat(want)
    limit = TOLERANCE[got.dtype] * max(1.0, float(wanted.abs().max()))
    assert got.isfinite().all()
    assert float((got.float() - wanted).abs().max()) <= limit


# Not all with all: kernels take their time to compile.
COMBINATIONS = [
    *(("groups of two", kept, name) for kept in ("bfloat16", "int8", "fp8") for name in LAYERS),
    *(("groups of two", kept, "window and soft cap") for kept in KEPT if "float32" in kept or " as " in kept),
    ("groups of two", "float32 as bfloat16", "plain"),
    *((shape, kept, "window") for shape in list(SHAPES)[1:] for kept in ("bfloat16", "int8", "fp8")),
]
CASES = [pytest.param(*one, id=", ".join(one)) for one in COMBINATIONS]


@pytest.mark.parametrize(("shape", "kept", "name"), CASES)
def test_all_of_a_step_attends_to_what_the_cache_says(
    shape: str, kept: str, name: str, way: str, make_paged: Callable[..., Any]
) -> None:
    """A prompt in two chunks, decodes beside another sequence's, and, with kernels, decodes again."""
    numbers = SHAPES[shape]
    paged = make_paged(numbers, *KEPT[kept], layer(name, numbers[2]))
    first, second, num_decodes = 75, 131, 4
    table, other = paged.table(first + second + num_decodes), paged.table(20)
    rows = paged.rows(first)
    check(paged.chunk(rows, table, 0), paged.want(rows, table, 0))
    rows = paged.rows(second)
    got = paged.chunk(rows, table, first)
    check(got, paged.want(rows, table, first))
    short = paged.rows(3)
    paged.chunk(short, other, 0)
    decoded = []
    for step in range(num_decodes):
        rows = paged.rows(2)
        positions = [first + second + step, 3 + step]
        got = paged.decodes(rows, [table, other], positions)
        check(
            got, paged.want(rows.only(0), table, positions[0]), paged.want(rows.only(1), other, positions[1])
        )
        decoded.append((rows.qkv[:1], rows.rotation[0][:1], rows.rotation[1][:1], got[:1]))
    if way == "pytorch":
        return
    before = paged.kv.numbers.view(torch.int8).clone()
    qkv, cosine, sine, want = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    again = type(rows)(qkv, (cosine, sine), rows.rotated)
    got = paged.decodes_again(again, table, first + second)
    assert torch.equal(got, want)
    assert torch.equal(paged.kv.numbers.view(torch.int8), before)


@pytest.mark.parametrize("kept", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", PLAIN_AND_WINDOW)
def test_single_tokens_and_lone_first_ones(
    kept: str, name: str, way: str, make_paged: Callable[..., Any]
) -> None:
    paged = make_paged(SHAPES["groups of two"], *KEPT[kept], layer(name, 64))
    tables = [paged.table(60) for _ in range(3)]
    rows = paged.rows(1)
    check(paged.chunk(rows, tables[0], 0), paged.want(rows, tables[0], 0))
    rows = paged.rows(1)
    check(paged.chunk(rows, tables[0], 1), paged.want(rows, tables[0], 1))
    rows = paged.rows(1)
    check(paged.decodes(rows, tables[1:2], [0]), paged.want(rows, tables[1], 0))


@pytest.mark.parametrize("kept", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 100, 127, 128, 129, 1000])
def test_windows_end_wherever_they_may(
    kept: str, window: int, way: str, make_paged: Callable[..., Any]
) -> None:
    """Across blocks, pieces of a chunk and its grains."""
    one = AttentionLayer(0, scale=0.125, window=window)
    paged = make_paged(SHAPES["groups of two"], *KEPT[kept], one)
    table = paged.table(420)
    position = 0
    for count in (5, 140, 1, 130, 64, 60):
        rows = paged.rows(count)
        got = paged.chunk(rows, table, position)
        check(got, paged.want(rows, table, position))
        position += count
    for at in range(position, position + 20):
        rows = paged.rows(1)
        check(paged.decodes(rows, [table], [at]), paged.want(rows, table, at))


@pytest.mark.parametrize("kept", ["bfloat16", "int8", "fp8"])
def test_a_token_does_not_look_before_its_window(kept: str, way: str, make_paged: Callable[..., Any]) -> None:
    """What lies there may be anything but no number; with kernels, decodes do not read it at all."""
    one = AttentionLayer(0, scale=0.125, window=40)
    paged = make_paged(SHAPES["groups of two"], *KEPT[kept], one)
    table = paged.table(200)
    paged.chunk(paged.rows(150), table, 0)
    rows = paged.rows(1)
    want = paged.decodes(rows, [table], [150])
    hidden = table[: (150 - 39) // 16]
    paged.kv.numbers.view(torch.int8)[hidden] = 0x55
    if paged.kv.scales is not None:
        paged.kv.scales[hidden] = torch.nan if way == "kernels" else 1e9
    assert torch.equal(paged.decodes(rows, [table], [150]), want)


@pytest.mark.parametrize("kept", ["bfloat16", "int8", "fp8"])
def test_a_number_that_is_none_cannot_hide_in_a_code(
    kept: str, way: str, make_paged: Callable[..., Any]
) -> None:
    """Neither a key's nor a value's: whoever attends to it gets no number, and the others do not notice."""
    for head in (2, 4):  # two of queries, two of keys, two of values
        paged = make_paged((2, 1, 64, 16), *KEPT[kept])
        tables = [paged.table(40), paged.table(40)]
        rows = paged.rows(20)
        # An infinite key of bfloat16 may also just never be looked at.
        for bad in (torch.nan,) if kept == "bfloat16" else (torch.nan, torch.inf):
            spoiled = rows.qkv.clone()
            spoiled.view(20, -1, 64)[7, head, 5] = bad
            paged.chunk(type(rows)(spoiled, rows.rotation, rows.rotated), tables[0], 0)
            paged.chunk(rows, tables[1], 0)
            got = paged.decodes(paged.rows(2), tables, [20, 20])
            assert not got[0].isfinite().all(), (head, bad)
            assert got[1].isfinite().all()
