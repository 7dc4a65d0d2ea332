"""How a step is laid out in tensors: which decodes share a gather, and what padding that costs."""

import random
from array import array
from typing import Any

import pytest
import torch

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import Envelope, Limits
from headway_runtime.layers.attention import FirstChunk, GatheredCall, KVShape
from headway_runtime.request import SamplingParams
from headway_runtime.step_inputs import (
    CPU_WORKSPACE_BYTES,
    SMALL_CONTEXT_BLOCKS,
    StepInputBuilder,
    StepInputs,
    round_up,
)

BLOCK_SIZE = 16
NUM_HEADS = 3


@pytest.fixture
def builder(engine_config: Any) -> StepInputBuilder:
    config = engine_config(max_model_len=4096, envelope=Envelope(32, 512), limits=Limits(32, 512))
    shape = KVShape(num_layers=1, num_blocks=5000, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=4)
    return StepInputBuilder(config, shape, NUM_HEADS, torch.float32, torch.device("cpu"))


def chunk(start: int, num_tokens: int, first_block: int, *, samples: bool = True) -> Chunk:
    known = start + num_tokens + (0 if samples else 1)
    num_blocks = -(-known // BLOCK_SIZE)
    return Chunk(
        request_id=str(first_block),
        token_ids=[1000 * first_block + position for position in range(known)],
        start=start,
        num_tokens=num_tokens,
        block_table=array("q", range(first_block, first_block + num_blocks)),
        num_generated=0,
        samples=samples,
        sampling=SamplingParams(),
    )


def build(builder: StepInputBuilder, *chunks: Chunk) -> StepInputs:
    num_decodes = sum(one.num_tokens == 1 for one in chunks)
    return builder.build(Batch(chunks, num_decodes, sum(one.num_tokens for one in chunks)))


def gathered(inputs: StepInputs) -> list[GatheredCall]:
    return [call for call in inputs.attention.calls if isinstance(call, GatheredCall)]


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
    assert isinstance(decodes, GatheredCall)
    assert (decodes.start, decodes.end, decodes.is_chunk) == (0, 2, False)
    assert decodes.blocks.tolist() == [10, 11, 12, 1, 2, 0]
    assert first == FirstChunk(2, 5)
    assert isinstance(later, GatheredCall)
    assert (later.start, later.end, later.is_chunk) == (5, 7, True)
    assert later.mask is None
    assert later.first_position == 16


def test_masks_hide_what_lies_past_each_decode(builder: StepInputBuilder) -> None:
    (call,) = gathered(build(builder, chunk(20, 1, 1), chunk(21, 1, 10)))
    assert call.mask is not None
    assert call.mask.shape == (1, 2, NUM_HEADS, 2 * BLOCK_SIZE)
    seen = (call.mask == 0).sum(dim=-1)
    assert seen.tolist() == [[[22] * NUM_HEADS, [21] * NUM_HEADS]]
    assert call.mask[0, 1, 0, :21].eq(0).all()


def test_gathered_blocks_are_bounded_but_for_one_sequence(builder: StepInputBuilder) -> None:
    chunks = [chunk(4000, 1, 300 * index + 1) for index in range(12)]
    calls = gathered(build(builder, *chunks))
    block_bytes = BLOCK_SIZE * 2 * 4 * 4
    assert [call.end for call in calls][-1] == 12
    for call in calls:
        num_sequences = call.end - call.start
        assert num_sequences == 1 or len(call.blocks) * block_bytes <= CPU_WORKSPACE_BYTES
    assert len(calls) == -(-12 // (CPU_WORKSPACE_BYTES // (251 * block_bytes)))


def test_one_long_decode_does_not_pad_the_short_ones(builder: StepInputBuilder) -> None:
    chunks = [chunk(100, 1, 10 * index + 1) for index in range(20)]
    calls = gathered(build(builder, *chunks, chunk(4000, 1, 1000)))
    assert [(call.start, call.end) for call in calls] == [(0, 1), (1, 21)]
    assert [len(call.blocks) for call in calls] == [251, 20 * 7]


@pytest.mark.parametrize("seed", range(5))
def test_padding_at_most_doubles_what_is_gathered(seed: int, builder: StepInputBuilder) -> None:
    rng = random.Random(seed)
    chunks = [chunk(int(4095 * rng.random() ** 3), 1, 1 + 130 * index) for index in range(32)]
    calls = gathered(build(builder, *chunks))
    num_real = sum(one.start // BLOCK_SIZE + 1 for one in chunks)
    num_gathered = sum(len(call.blocks) for call in calls)
    assert num_real <= num_gathered <= 2 * num_real + SMALL_CONTEXT_BLOCKS * len(chunks)
    assert len(calls) <= 8


def test_workspace_grows_and_is_then_kept(builder: StepInputBuilder) -> None:
    (small,) = gathered(build(builder, chunk(20, 1, 1)))
    (large,) = gathered(build(builder, chunk(900, 1, 1)))
    (again,) = gathered(build(builder, chunk(900, 1, 1)))
    assert small.gathered.data_ptr() != large.gathered.data_ptr() == again.gathered.data_ptr()


@pytest.fixture
def rounding_builder(engine_config: Any) -> StepInputBuilder:
    """As on a CPU in bfloat16, where every shape costs."""
    config = engine_config(max_model_len=1024, envelope=Envelope(64, 512), limits=Limits(64, 512))
    shape = KVShape(num_layers=1, num_blocks=5000, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=4)
    return StepInputBuilder(config, shape, NUM_HEADS, torch.bfloat16, torch.device("cpu"))


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


def test_contexts_of_decodes_end_in_null_blocks_within_the_longest_possible(
    rounding_builder: StepInputBuilder,
) -> None:
    for num_blocks, want in ((3, 3), (9, 10), (33, 40), (64, 64)):
        inputs = build(rounding_builder, chunk(num_blocks * BLOCK_SIZE - 1, 1, 1))
        [call] = gathered(inputs)
        assert call.blocks.tolist() == [*range(1, num_blocks + 1), *[0] * (want - num_blocks)]
        assert call.mask is not None
        assert (call.mask[0, 0, 0] == 0).sum() == num_blocks * BLOCK_SIZE


def test_many_steps_meet_few_shapes(rounding_builder: StepInputBuilder) -> None:
    rng = random.Random(5)
    met = set()
    for _ in range(400):
        decodes = [chunk(rng.randrange(1000), 1, 1 + 64 * index) for index in range(rng.randrange(40))]
        inputs = build(rounding_builder, *decodes, chunk(0, rng.randrange(2, 400), 4000))
        met.add(inputs.token_ids.shape[0])
    assert len(met) <= 16 + 5 * 8
