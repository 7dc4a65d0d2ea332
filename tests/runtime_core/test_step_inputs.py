"""How a step is laid out in tensors: which decodes share a gather, and what padding that costs."""

import random
from array import array
from typing import Any

import pytest
import torch

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import Envelope, Limits
from headway_runtime.layers.attention import (
    AttentionLayer,
    Decodes,
    DecodesAgain,
    FirstChunk,
    KVCache,
    KVShape,
    LaterChunk,
)
from headway_runtime.layers.linear import round_up
from headway_runtime.request import SamplingParams
from headway_runtime.step_inputs import SMALL_CONTEXT_BLOCKS, StepInputBuilder, StepInputs
from headway_runtime.verification import with_drafts

BLOCK_SIZE = 16
NUM_HEADS = 3


def cache(dtype: torch.dtype, head_dim: int = 4) -> KVCache:
    """By default with heads too small for the kernels, so that masks are made."""
    shape = KVShape(1, num_blocks=5000, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=head_dim)
    layers = [AttentionLayer(0, scale=head_dim**-0.5)]
    return KVCache(shape, NUM_HEADS, dtype, torch.device("cpu"), layers)


@pytest.fixture
def builder(engine_config: Any) -> StepInputBuilder:
    config = engine_config(max_model_len=4096, envelope=Envelope(32, 512), limits=Limits(32, 512))
    return StepInputBuilder(config, cache(torch.float32), torch.float32, torch.device("cpu"), rounds=False)


def chunk(
    start: int, num_tokens: int, first_block: int, *, samples: bool = True, num_generated: int = 0
) -> Chunk:
    known = start + num_tokens + (0 if samples else 1)
    num_blocks = -(-known // BLOCK_SIZE)
    return Chunk(
        request_id=str(first_block),
        token_ids=[1000 * first_block + position for position in range(known)],
        start=start,
        num_tokens=num_tokens,
        block_table=array("q", range(first_block, first_block + num_blocks)),
        num_generated=num_generated,
        samples=samples,
        sampling=SamplingParams(),
    )


def build(builder: StepInputBuilder, *chunks: Chunk) -> StepInputs:
    num_decodes = sum(one.num_tokens == 1 for one in chunks)
    return builder.build(Batch(chunks, num_decodes, sum(one.num_tokens for one in chunks)))


def decodes_of(inputs: StepInputs) -> list[Decodes]:
    return [call for call in inputs.attention.calls if isinstance(call, Decodes)]


def test_rows_are_decodes_longest_first_then_chunks(builder: StepInputBuilder) -> None:
    inputs = build(
        builder, chunk(20, 1, 1), chunk(40, 1, 10), chunk(0, 3, 20), chunk(16, 2, 30, samples=False)
    )
    assert inputs.positions.tolist() == [40, 20, 0, 1, 2, 16, 17]
    assert inputs.token_ids.tolist() == [10040, 1020, 20000, 20001, 20002, 30016, 30017]
    want_blocks = [12, 2, 20, 20, 20, 31, 31]
    assert inputs.attention.slots.tolist() == [
        block * BLOCK_SIZE + position % BLOCK_SIZE
        for block, position in zip(want_blocks, inputs.positions.tolist(), strict=True)
    ]
    assert inputs.sample_rows.tolist() == [0, 1, 4]
    assert inputs.sampled == [1, 0, 2]
    decodes, first, later = inputs.attention.calls
    assert isinstance(decodes, Decodes)
    assert (decodes.start, decodes.end) == (0, inputs.attention.num_decodes) == (0, 2)
    assert decodes.tables.tolist() == [[10, 11, 12], [1, 2, 0]]
    assert decodes.positions.tolist() == [40, 20]
    assert isinstance(first, FirstChunk)
    assert (first.start, first.end) == (2, 5)
    assert (first.masks.within(2) == 0).tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
    assert isinstance(later, LaterChunk)
    assert (later.start, later.end, later.first_position) == (5, 7, 16)
    assert later.table.tolist() == [30, 31]
    assert (later.masks.within(None) == 0).sum(dim=-1).tolist() == [17, 18]
    assert (later.masks.within(5) == 0).sum(dim=-1).tolist() == [5, 5]


def test_masks_hide_what_lies_past_each_decode(builder: StepInputBuilder) -> None:
    (call,) = decodes_of(build(builder, chunk(20, 1, 1), chunk(21, 1, 10)))
    mask = call.masks.within(None)
    assert mask.shape == (2, 2 * BLOCK_SIZE)
    assert (mask == 0).sum(dim=-1).flatten().tolist() == [22, 21]
    assert mask[1, :21].eq(0).all()
    assert call.masks.within(None) is mask


@pytest.mark.parametrize(("window", "want"), [(1, [21, 20]), (3, [19, 18]), (21, [1, 0]), (22, [0, 0])])
def test_masks_hide_what_lies_before_a_window(
    window: int, want: list[int], builder: StepInputBuilder
) -> None:
    (call,) = decodes_of(build(builder, chunk(20, 1, 1), chunk(21, 1, 10)))
    seen = call.masks.within(window) == 0
    assert seen.int().argmax(dim=-1).tolist() == want
    assert seen.sum(dim=-1).tolist() == [22 - want[0], 21 - want[1]]


@pytest.fixture
def kernel_builder(engine_config: Any) -> StepInputBuilder:
    own = cache(torch.float32, head_dim=64)
    if own.kernels is None:
        pytest.skip("this machine compiles no CPU kernels")
    config = engine_config(max_model_len=4096, envelope=Envelope(32, 512), limits=Limits(32, 512))
    return StepInputBuilder(config, own, torch.float32, torch.device("cpu"), rounds=False)


def test_no_mask_is_made_before_a_layer_asks(kernel_builder: StepInputBuilder) -> None:
    inputs = build(kernel_builder, chunk(20, 1, 1, num_generated=1), chunk(0, 3, 20), chunk(16, 2, 30))
    decodes, _, later = inputs.attention.calls
    assert isinstance(decodes, Decodes)
    assert isinstance(later, LaterChunk)
    assert decodes.masks.num_made == later.masks.num_made == 0
    assert decodes.masks.within(7) is not decodes.masks.within(None)
    assert decodes.masks.num_made == 2


def test_with_kernels_tokens_are_attended_as_they_were_the_first_time(
    kernel_builder: StepInputBuilder,
) -> None:
    """A prompt's lone token as its other tokens, a generated one as a decode."""
    inputs = build(
        kernel_builder,
        chunk(20, 1, 1),
        chunk(40, 1, 10, num_generated=1),
        chunk(18, 5, 20, num_generated=3),
        chunk(16, 20, 30, num_generated=20),
    )
    assert inputs.positions.tolist() == [40, *range(16, 36), 20, *range(18, 23)]
    assert (inputs.order, inputs.sampled) == ([1, 3, 0, 2], [1, 3, 0, 2])
    assert inputs.sample_rows.tolist() == [0, 20, 21, 26]
    decodes, all_again, lone, prompt, again = inputs.attention.calls
    assert isinstance(decodes, Decodes)
    assert (decodes.start, decodes.end) == (0, inputs.attention.num_decodes) == (0, 1)
    assert isinstance(all_again, DecodesAgain)
    assert (all_again.start, all_again.end) == (1, 21)
    assert all_again.tables.tolist() == [[30, 31, 32]] * 20
    assert isinstance(lone, LaterChunk)
    assert (lone.start, lone.end, lone.first_position, lone.table.tolist()) == (21, 22, 20, [1, 2])
    assert isinstance(prompt, LaterChunk)
    assert (prompt.start, prompt.end, prompt.first_position) == (22, 24, 18)
    assert isinstance(again, DecodesAgain)
    assert (again.start, again.end, again.positions.tolist()) == (24, 27, [20, 21, 22])
    assert again.tables.tolist() == [[20, 21]] * 3


def test_guesses_of_all_sequences_attend_in_one_call_and_are_sampled_after_each(
    kernel_builder: StepInputBuilder,
) -> None:
    own = [chunk(start, 1, first, num_generated=1) for start, first in ((20, 1), (40, 10), (33, 20))]
    batch = with_drafts(Batch(tuple(own), 3, 6, 3), {0: (7, 8), 2: (9,)})
    inputs = kernel_builder.build(batch)
    assert inputs.positions.tolist() == [40, 20, 21, 22, 33, 34]
    assert inputs.token_ids.tolist()[2:4] == [7, 8]
    assert inputs.token_ids.tolist()[5] == 9
    assert (inputs.order, inputs.sampled) == ([1, 0, 2], [1, 0, 0, 0, 2, 2])
    assert inputs.sample_rows.tolist() == [0, 1, 2, 3, 4, 5]
    _, guesses = inputs.attention.calls
    assert isinstance(guesses, DecodesAgain)
    assert (guesses.start, guesses.end) == (1, 6)
    assert guesses.tables.tolist() == [[1, 2, 0]] * 3 + [[20, 21, 22]] * 2


def test_without_kernels_lone_tokens_are_decodes_and_lost_ones_a_chunk(builder: StepInputBuilder) -> None:
    inputs = build(builder, chunk(20, 1, 1), chunk(18, 5, 20, num_generated=3))
    decodes, chunk_call = inputs.attention.calls
    assert isinstance(decodes, Decodes)
    assert isinstance(chunk_call, LaterChunk)
    assert (chunk_call.start, chunk_call.end) == (1, 6)


def test_one_long_decode_does_not_pad_the_short_ones(builder: StepInputBuilder) -> None:
    chunks = [chunk(100, 1, 10 * index + 1) for index in range(20)]
    calls = decodes_of(build(builder, *chunks, chunk(4000, 1, 1000)))
    assert [(call.start, call.end) for call in calls] == [(0, 1), (1, 21)]
    assert [call.tables.shape for call in calls] == [(1, 251), (20, 7)]


@pytest.mark.parametrize("seed", range(5))
def test_padding_at_most_doubles_what_is_gathered(seed: int, builder: StepInputBuilder) -> None:
    rng = random.Random(seed)
    chunks = [chunk(int(4095 * rng.random() ** 3), 1, 1 + 130 * index) for index in range(32)]
    calls = decodes_of(build(builder, *chunks))
    num_real = sum(one.start // BLOCK_SIZE + 1 for one in chunks)
    num_gathered = sum(call.tables.numel() for call in calls)
    assert num_real <= num_gathered <= 2 * num_real + SMALL_CONTEXT_BLOCKS * len(chunks)
    assert len(calls) <= 8


@pytest.fixture
def rounding_builder(engine_config: Any) -> StepInputBuilder:
    """As on a CPU whose products are oneDNN's, where every shape costs."""
    config = engine_config(max_model_len=1024, envelope=Envelope(64, 512), limits=Limits(64, 512))
    return StepInputBuilder(config, cache(torch.bfloat16), torch.bfloat16, torch.device("cpu"), rounds=True)


def test_sizes_are_rounded_up_to_few() -> None:
    assert [round_up(size, per_octave=8) for size in (0, 1, 16, 17, 33, 100, 2048)] == [
        *(0, 1, 16, 18, 36, 104, 2048)
    ]
    sizes = {round_up(size, per_octave=8) for size in range(1, 2049)}
    assert len(sizes) == 16 + 7 * 8
    for size in range(1, 2049):
        assert size <= round_up(size, per_octave=8) <= max(16, size * 1.125)


def test_rows_of_nobody_follow_the_last_token(rounding_builder: StepInputBuilder) -> None:
    inputs = build(rounding_builder, chunk(20, 1, 1), chunk(0, 100, 10))
    assert inputs.token_ids.shape == inputs.positions.shape == (104,)
    assert inputs.token_ids[101:].tolist() == inputs.positions[101:].tolist() == [0, 0, 0]
    assert inputs.attention.num_padding == 3
    assert len(inputs.attention.slots) == 101, "what belongs to nobody is stored nowhere"
    assert inputs.sample_rows.tolist() == [0, 100]
    # The buffer is used again: what a longer step left must not come back.
    build(rounding_builder, chunk(0, 120, 10))
    again = build(rounding_builder, chunk(20, 1, 1), chunk(0, 100, 10))
    assert again.token_ids.tolist() == inputs.token_ids.tolist()


def test_many_steps_meet_few_shapes(rounding_builder: StepInputBuilder) -> None:
    rng = random.Random(5)
    met = set()
    for _ in range(400):
        decodes = [chunk(rng.randrange(1000), 1, 1 + 64 * index) for index in range(rng.randrange(40))]
        inputs = build(rounding_builder, *decodes, chunk(0, rng.randrange(2, 400), 4000))
        met.add(inputs.token_ids.shape[0])
    assert len(met) <= 16 + 5 * 8
