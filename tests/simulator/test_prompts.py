"""Requests made of hash ids: blocks have one key if, and only if, all tokens up to their end are the same."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.conftest import SMALL

from headway_runtime.blocks import BlockPool
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.sequence import Sequence
from headway_simulator.cluster import Simulation
from headway_simulator.control import headway
from headway_simulator.engine import SimulatedEngine
from headway_simulator.prompts import Prompts
from headway_simulator.trace import Arrival, Trace

BLOCK_SIZE = 16


def arrivals(number: int, block_tokens: int) -> list[Arrival]:
    """Of some conversations, each with a few beginnings; some repeat a block, and some begin anew."""
    chance = random.Random(number * 1000 + block_tokens)
    made: list[Arrival] = []
    for _ in range(number):
        hash_ids = tuple(chance.randrange(4) for _ in range(chance.randrange(5)))
        tokens = len(hash_ids) * block_tokens - chance.randrange(block_tokens if hash_ids else 1)
        tokens += chance.choice((0, 0, 5, 40)) if hash_ids else 30
        made.append(
            Arrival(
                float(len(made)),
                max(1, tokens),
                chance.randrange(1, 60),
                hash_ids=hash_ids,
                hash_block_tokens=block_tokens,
                user_space=chance.randrange(2),
            )
        )
    return made


@pytest.mark.parametrize("block_tokens", [(16,), (24,), (100,), (512,), (16, 48, 512)])
def test_blocks_are_alike_where_their_hashes_are(block_tokens: tuple[int, ...]) -> None:
    """Some requests come twice, as they do when a pod dies."""
    prompts, cache = Prompts(), PrefixCache(BlockPool(10), BLOCK_SIZE, is_enabled=True)
    numbered: list[bytes] = []
    hashed: list[bytes] = []
    made = [arrival for tokens in block_tokens for arrival in arrivals(60, tokens)]
    for index, arrival in enumerate([*made, *made[:20]]):
        request = prompts.request(str(index), arrival, 0.0)
        sequence = Sequence(request, index)
        sequence.token_ids += [prompts.answer_token()] * arrival.output_tokens
        count = len(sequence.token_ids) // BLOCK_SIZE
        cache.extend_keys(sequence, count)
        keys = prompts.block_keys(arrival, BLOCK_SIZE)
        assert len(keys) == count
        numbered += keys
        hashed += sequence.block_keys
    assert len(set(numbered)) == len(set(hashed)) < len(hashed)
    assert len(set(zip(numbered, hashed, strict=True))) == len(set(hashed))


def test_what_becomes_of_requests_hangs_on_no_key(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory, so that some are preempted and find their own blocks again."""
    made = [replace(one, at_seconds=0.05 * one.at_seconds) for one in arrivals(300, 512)]
    trace = Trace("shared", tuple(made), 15.0)
    setting = build.setting(engine={"model": replace(SMALL, kv_cache_tokens=2800), "max_model_len": 2500})
    numbered = Simulation(trace, setting, headway()).result()
    add = SimulatedEngine.add
    monkeypatch.setattr(
        SimulatedEngine, "add", lambda self, request, token, now, keys: add(self, request, token, now)
    )
    hashed = Simulation(trace, setting, headway()).result()
    assert numbered.flights == hashed.flights
    assert numbered.num_cached_tokens > 0
    assert numbered.num_preemptions > 0
