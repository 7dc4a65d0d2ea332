"""Norms of heads, rotation and the store into the cache, in one kernel."""

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton.rotate_and_store import RotateAndStore, rotate_and_store_by_torch
from headway_runtime.layers.kv_cache import KVCache, KVShape
from headway_runtime.layers.kv_numbers import LayerKV
from headway_runtime.layers.rotary import RotaryTable
from headway_runtime.model_config_rope import Rope

BLOCK_SIZE, NUM_BLOCKS = 8, 12
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
KEPT = pytest.mark.parametrize("kept", [None, torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)


def make_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype, kept: torch.dtype | None) -> LayerKV:
    shape = KVShape(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return KVCache(shape, 2, dtype, torch.device("cpu"), [], kept).layers[1]


def copy_of(kv: LayerKV) -> LayerKV:
    return LayerKV(kv.numbers.clone(), None if kv.scales is None else kv.scales.clone())


def rotation_of(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return RotaryTable(Rope(10000.0, None), head_dim, 200, dtype, torch.device("cpu")).at(positions)


@KEPT
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "normed", "dtype"),
    [
        (4, 2, 64, False, torch.bfloat16),
        (4, 2, 64, True, torch.float32),
        (3, 1, 40, True, torch.bfloat16),
        (10, 5, 16, False, torch.float16),
        (2, 2, 256, True, torch.bfloat16),
        (40, 4, 16, True, torch.float32),
    ],
    ids=str,
)
def test_rows_and_cache_become_what_they_do_by_torch(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,  # noqa: FBT001
    dtype: torch.dtype,
    kept: torch.dtype | None,
) -> None:
    num_heads = query_heads + 2 * kv_heads
    qkv = torch.randn(6, num_heads * head_dim).to(dtype)
    # In blocks in any order; one is stored nowhere, and the last row has no slot.
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:5]
    slots[2] = -1
    rotation = rotation_of(torch.randint(0, 200, (6,)), head_dim, dtype)
    norms = (1.0 + torch.randn(2, head_dim) / 4, 1e-6) if normed else None
    kv = make_kv(kv_heads, head_dim, dtype, kept)
    kv.numbers.copy_(torch.randn(kv.numbers.shape).to(kv.numbers.dtype))
    want_kv, want = copy_of(kv), qkv.clone()
    rotate_and_store_by_torch(want, rotation, slots, want_kv.numbers, want_kv.scales, norms)
    given = qkv.clone()

    run = RotateAndStore(query_heads, kv_heads, head_dim, BLOCK_SIZE)
    run(qkv, rotation, slots, kv.numbers, kv.scales, norms)

    tolerance = TOLERANCES[dtype]
    code = {torch.int8: 1.01 / 127, torch.float8_e4m3fn: 2**-3}.get(kv.numbers.dtype, 0.0)
    # Keys of float32 differ in their last bits, and so are rounded to either neighbour in one of bfloat16.
    rounded = 2**-7 if kv.numbers.dtype is torch.bfloat16 else 0.0
    query_size = query_heads * head_dim
    torch.testing.assert_close(qkv[:, :query_size], want[:, :query_size], rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv[:, query_size:], given[:, query_size:])
    values = slice(kv_heads, 2 * kv_heads)
    # Values are not computed with: they are the same to the last bit. So is all that was not written.
    as_bytes = (kv.numbers.view(torch.uint8), want_kv.numbers.view(torch.uint8))
    assert torch.equal(*(one[:, values] for one in as_bytes))
    touched = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    touched.view(-1)[slots[slots >= 0]] = True
    assert torch.equal(*(one.transpose(1, 2)[~touched] for one in as_bytes))
    torch.testing.assert_close(
        kv.numbers.float() if kv.scales is None else kv.numbers.float() * kv.scales[..., None],
        want_kv.numbers.float()
        if want_kv.scales is None
        else want_kv.numbers.float() * want_kv.scales[..., None],
        rtol=tolerance + code + rounded,
        atol=tolerance + 4 * code,
    )
    if kv.scales is not None and want_kv.scales is not None:
        assert torch.equal(kv.scales[:, values], want_kv.scales[:, values])


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_keys_are_rounded_as_the_reference_rounds_them(kept: torch.dtype) -> None:
    """Without a turn keys, too, are the reference's to the last bit."""
    qkv = torch.randn(40, 3 * 64).to(torch.bfloat16)
    rotation = rotation_of(torch.zeros(40, dtype=torch.int64), 64, torch.bfloat16)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:40]
    kv = make_kv(1, 64, torch.bfloat16, kept)
    want = copy_of(kv)
    # Keys and values as the layer would store them.
    want.store((slots // BLOCK_SIZE, slots % BLOCK_SIZE), qkv.view(40, 3, 64)[:, 1:])

    RotateAndStore(1, 1, 64, BLOCK_SIZE)(qkv, rotation, slots, kv.numbers, kv.scales)

    assert torch.equal(kv.numbers.view(torch.uint8), want.numbers.view(torch.uint8))
    assert kv.scales is not None
    assert want.scales is not None
    assert torch.equal(kv.scales, want.scales)


def test_no_rows_are_no_launch() -> None:
    kv = make_kv(1, 16, torch.float32, None)
    none = torch.empty(0, 3 * 16)

    RotateAndStore(1, 1, 16, BLOCK_SIZE)(
        none, (torch.empty(0, 16), torch.empty(0, 16)), torch.empty(0, dtype=torch.int64), kv.numbers, None
    )

    assert (kv.numbers == 0).all()
