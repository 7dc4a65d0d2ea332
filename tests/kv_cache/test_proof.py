"""What a finite sample proves in a model whose layers have windows: no more than they let it see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_runtime.blocks import BlockPool
from headway_runtime.config import Envelope, Limits
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.request import Request, SamplingParams
from headway_runtime.sequence import Sequence

BLOCK = 16


def computed(cache: PrefixCache, length: int, num_steps: int = 0) -> Sequence:
    """A prompt computed in one step, then so many tokens of its answer, each with a finite sample."""
    one = Sequence(Request("one", tuple(range(length)), SamplingParams(), 0.0), 0)
    cache.take(one, cache.find(one))
    for _ in range(num_steps + 1):
        one.num_computed = one.num_confirmed = one.num_given = len(one.token_ids)
        cache.publish(one)
        cache.prove(one)
        one.token_ids.append(7)
        if len(one.token_ids) > len(one.block_table) * BLOCK:
            cache.allocate(one, 1)
    return one


@pytest.mark.parametrize(
    ("reach", "num_unproven"), [(None, 0), (1000, 0), (100, 0), (99, 1), (52, 3), (36, 4), (20, 5), (4, 6)]
)
@pytest.mark.parametrize("caching", ["cached", "not cached"])
def test_blocks_before_the_reach_are_cleared_before_they_are_written_again(
    reach: int | None, num_unproven: int, caching: str
) -> None:
    """A prompt of 100 tokens: six whole blocks, and four tokens of the seventh."""
    is_enabled = caching == "cached"
    cache = PrefixCache(BlockPool(7), BLOCK, is_enabled=is_enabled, proof_reach=reach)
    one = computed(cache, 100)
    unproven = set(one.block_table[:num_unproven])
    cache.release(one)
    cache.allocate(Sequence(Request("two", (1,), SamplingParams(), 0.0), 1), 7)
    cleared = set(cache.blocks_to_clear())
    if is_enabled:
        # The partial one is not known to be good where anything before it is not.
        assert cleared - {7} == unproven
        assert (7 in cleared) == bool(num_unproven)
    else:
        assert cleared >= unproven
        assert bool(cleared) == bool(num_unproven)


def test_what_is_generated_is_proven_token_by_token() -> None:
    cache = PrefixCache(BlockPool(20), BLOCK, is_enabled=True, proof_reach=40)
    one = computed(cache, 100, num_steps=100)
    assert cache._unproven == set(one.block_table[:4])


def test_a_bad_beginning_beyond_all_windows_does_not_reach_others(
    give_layers: Callable[..., None], start_engine: Callable[..., Any]
) -> None:
    """A block whose KV is no number, which no sample saw, is used again by others and does not show."""
    give_layers(window=20)
    per_block = 16 * 3 * 2 * 2 * 32 * 4
    # Chunks of a few tokens: only what is gathered is read to the end of a block, behind a mask.
    limits = {"envelope": Envelope(4, 24), "limits": Limits(4, 24)}
    want = start_engine(**limits)
    want.add("short", range(20, 60), max_tokens=8)
    want.run()
    driver = start_engine(kv_cache_memory_bytes=18 * per_block, enable_prefix_caching=False, **limits)
    if driver.engine._runner._cache.kernels is None:
        pytest.skip("PyTorch's operators look at all of a context, so that nothing can hide there")
    driver.add("long", range(250), max_tokens=3)
    launch = driver.engine._runner.launch

    def spoiled(batch: Any) -> Any:
        pending = launch(batch)
        data = driver.engine._runner._cache.layers[0].numbers
        with torch.inference_mode():
            if batch.chunks[0].start > 200:
                data[torch.tensor(batch.chunks[0].block_table[:3])] = torch.nan
        return pending

    driver.engine._runner.launch = spoiled
    driver.run()
    assert len(driver.tokens("long")) == 3
    driver.engine._runner.launch = launch
    for number in range(6):
        driver.add(str(number), range(20, 60), max_tokens=8)
        driver.add(f"beside {number}", range(30, 51), max_tokens=8)
        driver.run()
        assert driver.tokens(str(number)) == want.tokens("short")
