"""Our CPU kernels against float32 PyTorch, on random inputs of many shapes."""

import math
from typing import Any

import pytest
import torch
from tests.runtime_core.closeness import close
from torch import Tensor

pytest.importorskip("llvmlite")

from headway_runtime.kernels.cpu.scoring import Scoring
from headway_runtime.kernels.cpu.softmax import CausalSoftmax
from headway_runtime.layers import cpu_kernels
from headway_runtime.layers.attention import AttentionLayer, KVCache, KVShape
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.norm import HeadNorm, RMSNorm
from headway_runtime.layers.rotary import rotate_
from headway_runtime.model_config import Activation

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# KV heads, query heads that share one, head size, block size.
SHAPES = [
    pytest.param((2, 1, 64, 16), id="one query head each"),
    pytest.param((8, 2, 64, 16), id="groups of two"),
    pytest.param((3, 4, 128, 16), id="groups of four"),
    pytest.param((1, 8, 32, 32), id="one KV head"),
    pytest.param((2, 7, 128, 16), id="groups of seven"),
    pytest.param((5, 3, 96, 48), id="odd numbers"),
    pytest.param((2, 2, 16, 8), id="small heads and blocks"),
    pytest.param((2, 2, 8, 4), id="the smallest"),
]

pytestmark = pytest.mark.skipif(
    cpu_kernels.activate_and_multiply("silu", 64, torch.float32, CPU) is None,
    reason="this machine compiles no CPU kernels",
)


class Paged:
    """A cache of random numbers, some sequences in it, and what one step adds to them."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        lengths: list[int],
        generator: torch.Generator,
    ) -> None:
        self.heads, self.groups, self.dim, self.block_size = shape
        widths = [-(-length // self.block_size) for length in lengths]
        num_blocks = sum(widths) + 3
        kv_shape = KVShape(1, num_blocks, self.block_size, self.heads, self.dim)
        self.cache = KVCache(kv_shape, self.groups, dtype, CPU, [AttentionLayer(0, scale=self.dim**-0.5)])
        assert self.cache.kernels is not None
        self.kernels = self.cache.kernels
        self.blocks = self.cache.layers[0].numbers
        self.blocks.copy_(torch.randn(self.blocks.shape, generator=generator))
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.tables = torch.zeros((len(lengths), max(widths) + 1), dtype=torch.int64)
        for row, width in zip(self.tables, widths, strict=True):
            row[:width] = torch.tensor([ids.pop() for _ in range(width)])
        self.positions = torch.tensor(lengths) - 1
        num_heads = (self.groups + 2) * self.heads
        self.qkv = torch.randn((len(lengths), num_heads * self.dim), generator=generator).to(dtype)
        angles = torch.rand((len(lengths), self.dim // 2), generator=generator) * 2 * math.pi
        self.cosine = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sine = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)

    def rotated(self) -> Tensor:
        """Queries, keys and values as float32 [tokens, heads, head_dim], rotated."""
        heads = self.qkv.float().view(len(self.qkv), -1, self.dim).clone()
        rotate_(heads[:, : -self.heads], self.cosine.float(), self.sine.float())
        return heads

    def slots(self) -> Tensor:
        block = self.tables.gather(1, (self.positions // self.block_size).unsqueeze(1)).squeeze(1)
        return block * self.block_size + self.positions % self.block_size

    def stored(self) -> Tensor:
        """What the cache holds at the new tokens' slots: [tokens, 2 * kv_heads, head_dim]."""
        slots = self.slots()
        return self.blocks[slots // self.block_size, :, slots % self.block_size]


def attended(paged: Paged, before: Tensor, row: int) -> Tensor:
    """One sequence's attention in float32, over the cache as it was and its own new token.

    Queries, keys and values are rounded once rotated, as a step without the kernel does: a score moves by
    more than the tolerance where a key is not, in heads of few numbers one time in a thousand.
    """
    length = int(paged.positions[row]) + 1
    by_head = before[paged.tables[row]].transpose(0, 1).flatten(1, 2)[:, :length].float()
    rotated = paged.rotated()[row].to(paged.qkv.dtype).float()
    by_head[:, -1] = rotated[-2 * paged.heads :]
    query = rotated[: paged.heads * paged.groups].view(paged.heads, paged.groups, paged.dim)
    key, value = by_head.chunk(2)
    scores = query @ key.transpose(1, 2) * paged.dim**-0.5
    result: Tensor = scores.softmax(-1) @ value
    return result.flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_attend_and_store(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    size = shape[3]
    lengths = [1, 2, size - 1, size, size + 1, 3 * size, 5 * size + size // 2, 411]
    paged = Paged(shape, dtype, lengths, generator)
    # Past each sequence's end lies what others left; it must not be looked at.
    for row, length in zip(paged.tables, lengths, strict=True):
        if length % size:
            paged.blocks[row[length // size], :, length % size :] = math.nan
    before = paged.blocks.clone()
    out = torch.full((len(lengths), paged.heads * paged.groups * paged.dim), math.nan, dtype=dtype)
    paged.kernels.attend_decodes[0](
        paged.qkv, paged.cosine, paged.sine, paged.blocks, paged.tables, paged.positions, out
    )
    for row in range(len(lengths)):
        assert close(out[row], attended(paged, before, row)), f"sequence of {lengths[row]} tokens"
    assert close(paged.stored(), paged.rotated()[:, -2 * paged.heads :])
    slots = paged.slots()
    changed = (paged.blocks.view(torch.int8) != before.view(torch.int8)).any(-1).any(1).nonzero().tolist()
    assert {block * size + offset for block, offset in changed} <= set(slots.tolist())


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_decodes_are_the_same_whoever_else_is_there(num_threads: int, generator: torch.Generator) -> None:
    """However the work is shared out, a sequence's numbers are added in one order."""
    threads_before = torch.get_num_threads()
    paged = Paged(
        (8, 2, 64, 16), torch.bfloat16, torch.randint(1, 500, (9,), generator=generator).tolist(), generator
    )
    size = 8 * 2 * 64
    outs = []
    try:
        for count, rows in ((1, slice(0, 9)), (num_threads, slice(0, 9)), (num_threads, slice(4, 5))):
            torch.set_num_threads(count)
            out = torch.empty((len(paged.tables[rows]), size), dtype=torch.bfloat16)
            paged.kernels.attend_decodes[0](
                paged.qkv[rows],
                paged.cosine[rows],
                paged.sine[rows],
                paged.blocks,
                paged.tables[rows],
                paged.positions[rows],
                out,
            )
            outs.append(out)
    finally:
        torch.set_num_threads(threads_before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0][4:5], outs[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_come_out_the_same_when_they_are_computed_again(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Rows of one sequence, stored together and attended at once, equal the decodes that they once were."""
    size = shape[3]
    first, end = size + 3, 4 * size + 2
    paged = Paged(shape, dtype, list(range(first, end)), generator)
    paged.tables[:] = paged.tables[-1].clone()
    lost = paged.blocks.clone()
    want = torch.empty((end - first, paged.heads * paged.groups * paged.dim), dtype=dtype)
    for row in range(end - first):
        one = slice(row, row + 1)
        rotation = paged.cosine[one], paged.sine[one]
        paged.kernels.attend_decodes[0](
            paged.qkv[one], *rotation, paged.blocks, paged.tables[one], paged.positions[one], want[one]
        )
    kept = paged.blocks.clone()
    paged.blocks.copy_(lost)
    paged.kernels.rotate_and_store(paged.qkv, paged.cosine, paged.sine, paged.slots(), paged.blocks)
    got = torch.full_like(want, math.nan)
    tables = paged.tables[-1].expand(end - first, -1)
    paged.kernels.attend_decodes[0].attend_stored(paged.qkv, paged.blocks, tables, paged.positions, got)
    assert torch.equal(paged.blocks, kept)
    assert torch.equal(got, want)


def test_a_key_that_is_no_number_spoils_its_sequence_alone(generator: torch.Generator) -> None:
    paged = Paged((2, 2, 64, 16), torch.bfloat16, [40, 40], generator)
    paged.blocks[paged.tables[0, 1], 0, 3, 5] = math.nan
    out = torch.empty((2, 2 * 2 * 64), dtype=torch.bfloat16)
    paged.kernels.attend_decodes[0](
        paged.qkv, paged.cosine, paged.sine, paged.blocks, paged.tables, paged.positions, out
    )
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_rotated_stored_and_gathered(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    paged = Paged(shape, dtype, [1, 17, 40, 200], generator)
    want = paged.rotated()
    paged.kernels.rotate_and_store(paged.qkv, paged.cosine, paged.sine, paged.slots(), paged.blocks)
    assert close(paged.qkv.view(4, -1, paged.dim), want)
    assert close(paged.stored(), want[:, -2 * paged.heads :])
    for row in paged.tables:
        gathered = paged.kernels.gather(paged.blocks, row)
        assert torch.equal(gathered, paged.blocks[row].transpose(0, 1).flatten(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "groups", "num_seen", "context"),
    [(1, 2, 1, 16), (5, 1, 40, 48), (130, 3, 700, 832), (4, 2, 30, 32)],
)
def test_chunks_see_no_later_tokens(
    tokens: int, groups: int, num_seen: int, context: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    scores = torch.randn((2, tokens * groups, context), generator=generator).mul_(9).to(dtype)
    seen = (num_seen + torch.arange(tokens)).clamp(max=context).repeat_interleave(groups)
    is_seen = torch.arange(context) < seen.unsqueeze(1)
    want = scores.float().masked_fill(~is_seen, -math.inf).softmax(-1)
    scores.masked_fill_(~is_seen, math.nan)
    CausalSoftmax(groups, Scoring(scale=1.0), dtype, 16)(scores, num_seen)
    assert close(scores, want)
    assert (scores[~is_seen.expand_as(scores)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1024), (70, 2816), (5, 24)])
def test_norms_equal_pytorchs(rows: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, delta = (torch.randn((rows, size), generator=generator).mul_(3).to(dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).add_(0.5).to(dtype)
    norm = RMSNorm(weight, 1e-5)
    want = torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    assert close(norm(x), want)
    total = x + delta
    got = norm.add_(x, delta)
    assert torch.equal(x, total)
    assert close(got, torch.nn.functional.rms_norm(total.float(), (size,), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("whose", ["our kernels", "PyTorch's operators"])
def test_norms_take_finer_weights_than_rows(
    whose: str, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "_are_available", lambda: whose == "our kernels")
    x = torch.randn((3, 1024), generator=generator).to(dtype)
    # Most of these are the same number in the rows' type.
    weight = 1 + torch.randn(1024, generator=generator).mul_(1e-3)
    want = torch.nn.functional.rms_norm(x.float(), (1024,), weight, 1e-6).to(dtype)
    coarse = torch.nn.functional.rms_norm(x.float(), (1024,), weight.to(dtype).float(), 1e-6).to(dtype)
    got = RMSNorm(weight, 1e-6, dtype)(x)
    assert (got != want).sum() < 0.01 * want.numel() < (coarse != want).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whose", ["our kernels", "PyTorch's operators"])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 3, 64), (70, 5, 128), (5, 2, 24)])
def test_heads_are_normed_each_by_itself_and_values_left_alone(
    rows: int,
    heads: int,
    size: int,
    whose: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_kernels, "_are_available", lambda: whose == "our kernels")
    # Queries' heads, then one of keys, then one of values.
    qkv = torch.randn((rows, (heads + 2) * size), generator=generator).mul_(7).to(dtype)
    query_weight, key_weight = torch.rand((2, size), generator=generator) + 0.5
    split = qkv.float().view(rows, heads + 2, size).clone()
    want = torch.cat(
        [
            torch.nn.functional.rms_norm(split[:, :heads], (size,), query_weight, 1e-6),
            torch.nn.functional.rms_norm(split[:, heads : heads + 1], (size,), key_weight, 1e-6),
        ],
        dim=1,
    )
    HeadNorm([(query_weight, heads), (key_weight, 1)], 1e-6, dtype).norm_(qkv)
    got = qkv.view(rows, heads + 2, size)
    assert close(got[:, :-1], want)
    assert torch.equal(got[:, -1].float(), split[:, -1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 2816), (70, 320), (5, 24)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_equal_pytorchs(
    activation: Activation, rows: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    gate_up = torch.randn((rows, 2 * size), generator=generator).mul_(20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -300.0, 300.0, -88.0])
    gate, up = gate_up.float().chunk(2, -1)
    activated = {
        "silu": torch.nn.functional.silu(gate),
        "gelu": torch.nn.functional.gelu(gate),
        "gelu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
    }[activation]
    assert close(Gate(activation, size, dtype, CPU)(gate_up), activated * up)


def test_what_is_no_number_stays_none() -> None:
    x = torch.ones((2, 64), dtype=torch.bfloat16)
    x[1, 5] = math.nan
    normed = RMSNorm(torch.ones(64, dtype=torch.bfloat16), 1e-5)(x)
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()
    for activation in ("silu", "gelu_tanh"):
        gated = Gate(activation, 32, torch.bfloat16, CPU)(x)
        assert gated.isnan().nonzero().tolist() == [[1, 5]]


def test_without_a_compiler_pytorch_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
    layers = [AttentionLayer(0, scale=0.125)]
    assert KVCache(KVShape(1, 4, 16, 2, 64), 2, torch.bfloat16, CPU, layers).kernels is None
    x: Any = torch.randn(3, 64)
    weight = torch.rand(64)
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5))


def test_bfloat16_is_rounded_alike_with_and_without_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway_runtime.kernels.cpu import compiler
    from headway_runtime.kernels.cpu.elements import Elements

    # Sums that lie between two numbers of the type, in the middle of them too.
    delta = torch.arange(-2048, 2048, dtype=torch.int32).mul_(8).add_(0x3F80_0000).view(torch.float32)
    x = torch.rand(4096).to(torch.bfloat16)
    deltas = delta.to(torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    results = []
    for in_hardware in (compiler.elements(torch.bfloat16).rounds_in_hardware, False):
        monkeypatch.setattr(compiler, "elements", lambda dtype, it=in_hardware: Elements("bfloat16", 2, it))
        monkeypatch.setattr("headway_runtime.kernels.cpu.norm.elements", compiler.elements)
        total = x.clone().view(1, -1)
        normed = RMSNorm(weight, 1e-5).add_(total, deltas.view(1, -1))
        assert torch.equal(total[0], x + deltas)
        results.append(normed)
    assert torch.equal(*results)
