"""A sequence's numbers are the same however its tokens come to be computed: cut up, beside others, or again.

To the last bit where products are our own; PyTorch's add up in an order that depends on the number of rows.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from headway_runtime import model_loading
from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import Dtype, EngineConfig, Envelope, KVCacheDtype, Limits
from headway_runtime.kernels.cpu.processor import multiplies_pairs
from headway_runtime.models.decoder import Decoder
from headway_runtime.request import SamplingParams
from headway_runtime.runner import Runner
from headway_runtime.sources import resolve

NUM_PROMPT_TOKENS, NUM_GENERATED = 117, 23
BLOCK_SIZE = 16
NUM_TOKENS = NUM_PROMPT_TOKENS + NUM_GENERATED
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE) + 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# Each token that was generated was a step of its own.
ONE_BY_ONE = list(range(NUM_PROMPT_TOKENS, NUM_TOKENS))


class Windowed(Decoder):
    """Every second layer sees a window that ends within blocks, with a soft cap."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for layer in self._layers[::2]:
            layer._attention.layer = replace(layer.attention, window=37, soft_cap=20.0)


class Replay:
    """Computes the same tokens again and again, in other pieces and other company."""

    def __init__(self, dtype: Dtype, kv_cache_dtype: KVCacheDtype, quantization: str) -> None:
        folder = str(resolve("bundled://headway-tiny"))
        limits = Limits(8, 512)
        envelope = Envelope(8, 512)
        # A number in FP8 that is rounded to the other side is a sixteenth off; 0.6 was seen, 0.16 otherwise.
        self.rounded = 1.5 if kv_cache_dtype == "fp8" else 0.5
        self._runner = Runner(
            EngineConfig(
                folder,
                "cpu",
                dtype,
                "auto",
                256,
                BLOCK_SIZE,
                1 << 22,
                envelope,
                limits,
                8,
                1,
                kv_cache_dtype=kv_cache_dtype,
                quantization=quantization,
            )
        )
        seed = random.randrange(2**31)
        print(f"seed {seed}")  # shown if a test fails
        self._random = random.Random(seed)
        self._token_ids = [self._random.randrange(5, 1500) for _ in range(NUM_TOKENS)]
        self._logits: list[torch.Tensor] = []
        compute = self._runner._model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            self._logits.append(compute(hidden).clone())
            return self._logits[-1]

        self._runner._model.logits = logits  # type: ignore[method-assign]

    def last_logits(self, starts: Sequence[int], num_others: int = 0) -> torch.Tensor:
        """Of the whole sequence, computed in pieces that begin at 0 and at `starts`, beside other decodes."""
        self._runner.clear_blocks(array("q", range(1, 4 * NUM_BLOCKS + 1)))
        for start, end in pairwise([0, *starts, NUM_TOKENS]):
            # Some of them longer and some shorter than this one.
            others = [self._chunk(40 * place, 40 * place + 1, place) for place in range(1, num_others + 1)]
            batch = (*others, self._chunk(start, end, 0))
            num_decodes = sum(chunk.num_tokens == 1 for chunk in batch)
            self._logits.clear()
            self._runner.execute(Batch(batch, num_decodes, sum(chunk.num_tokens for chunk in batch)))
        # Nobody else samples.
        return self._logits[0][0]

    def _chunk(self, start: int, end: int, place: int) -> Chunk:
        is_own = place == 0
        known = self._token_ids[: max(end, NUM_PROMPT_TOKENS)] if is_own else self._token_ids[:end]
        num_generated = max(0, end - NUM_PROMPT_TOKENS) if is_own else 1
        blocks = array("q", range(1 + place * NUM_BLOCKS, 1 + (place + 1) * NUM_BLOCKS))
        samples = is_own and end == NUM_TOKENS
        return Chunk(str(place), known, start, end - start, blocks, num_generated, samples, GREEDY)


def same(got: torch.Tensor, want: torch.Tensor, rounded: float) -> bool:
    """rounded: what roundings make of the logits, whose deviation is about 4, where sums have no order."""
    if want.dtype == torch.float32:
        return torch.allclose(got, want, rtol=0, atol=1e-4)
    if not multiplies_pairs():
        return torch.allclose(got, want, rtol=0, atol=rounded)
    return torch.equal(got, want)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bfloat16", "auto", Decoder), id="bfloat16"),
        pytest.param(("float32", "auto", Decoder), id="float32"),
        pytest.param(("bfloat16", "auto", Windowed), id="windows"),
        pytest.param(("bfloat16", "fp8", Decoder), id="fp8"),
        pytest.param(("bfloat16", "int8", Decoder), id="int8"),
        pytest.param(("bfloat16", "int8", Windowed), id="int8, windows"),
        pytest.param(("bfloat16", "auto", Decoder, "int8"), id="weights in int8"),
        pytest.param(("bfloat16", "auto", Decoder, "int4"), id="weights in int4"),
        pytest.param(("bfloat16", "fp8", Decoder, "fp8"), id="weights and KV in fp8"),
    ],
)
def replay(request: pytest.FixtureRequest) -> Iterator[Replay]:
    dtype, kv_cache_dtype, model, *quantization = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "Decoder", model)
        yield Replay(dtype, kv_cache_dtype, *(quantization or ["auto"]))


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([48, *ONE_BY_ONE], id="a prompt in two chunks"),
        pytest.param([1, 2, 50, 51, 116, *ONE_BY_ONE], id="lone tokens of a prompt"),
        pytest.param([*range(1, NUM_PROMPT_TOKENS), *ONE_BY_ONE], id="all of a prompt one by one"),
        pytest.param([], id="all lost after the last token"),
        pytest.param([112], id="all lost but whole blocks of the prompt"),
        pytest.param([128], id="lost from among the generated tokens"),
        pytest.param([100, 120, 121, 130], id="lost and computed in pieces"),
        pytest.param([139], id="lost but for the last token"),
    ],
)
def test_a_sequence_is_the_same_however_it_is_cut(starts: list[int], replay: Replay) -> None:
    want = replay.last_logits(ONE_BY_ONE)
    assert same(replay.last_logits(starts), want, replay.rounded)


@pytest.mark.parametrize("starts", [ONE_BY_ONE, [], [60, 125]], ids=["one by one", "at once", "in pieces"])
def test_a_sequence_is_the_same_whoever_runs_beside_it(starts: list[int], replay: Replay) -> None:
    want = replay.last_logits(ONE_BY_ONE)
    for num_others in (1, 3):
        assert same(replay.last_logits(starts, num_others), want, replay.rounded)
