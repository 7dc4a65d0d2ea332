"""How much of the configured KV cache holds tokens when it is full: by hand, and as the engine tells it."""

from dataclasses import dataclass
from typing import Any

import pytest

from headway_runtime.config import Envelope, Limits
from headway_runtime.request import FinishReason

BLOCK = 16
NUM_BLOCKS = 256
SHARED = [7] * 80


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int


def asked_of(number: int) -> Asked:
    """Long and short ones; every third begins as the others of its kind do."""
    shared = SHARED if number % 3 == 0 else []
    prompt = [
        *shared,
        *(
            (number * 31 + position * 7) % 300 + 10
            for position in range(20 + number % 50 + (0 if shared else 100))
        ),
    ]
    return Asked(prompt, 150 + number % 50)


def tokens_and_blocks(driver: Any, asked: dict[str, Asked]) -> tuple[int, int] | None:
    """What lives in the cache, from the outputs alone; None while a prompt is under way.

    A request that has generated k tokens holds its prompt and k - 1 of them: the last is not computed yet.
    """
    lengths, num_live, shared = [], 0, 0
    for name, one in asked.items():
        outputs = driver.outputs.get(name) or []
        num_generated = sum(len(output.token_ids) for output in outputs)
        if num_generated and outputs[-1].finish_reason is None:
            num_live += 1
            lengths.append(len(one.prompt) + num_generated - 1)
            shared += one.prompt[: len(SHARED)] == SHARED
    if num_live != driver.engine.num_running:
        return None
    num_shared_blocks = max(0, shared - 1) * (len(SHARED) // BLOCK)
    num_blocks = sum(-(-length // BLOCK) for length in lengths) - num_shared_blocks
    return sum(lengths) - num_shared_blocks * BLOCK, num_blocks


@pytest.mark.parametrize("spare_bytes", [0, 1000], ids=["whole blocks", "a rest of memory"])
def test_at_least_95_percent_of_the_configured_memory_holds_tokens(
    start_engine: Any, checkpoint: Any, spare_bytes: int
) -> None:
    configured = checkpoint().kv_bytes(NUM_BLOCKS) + spare_bytes
    driver = start_engine(
        kv_cache_memory_bytes=configured,
        max_model_len=512,
        envelope=Envelope(64, 1024),
        limits=Limits(64, 1024),
    )
    slots_paid_for = configured / (checkpoint().kv_bytes(1) / BLOCK)
    assert driver.engine.num_kv_tokens >= 0.95 * slots_paid_for
    asked = {f"r{number}": asked_of(number) for number in range(60)}
    for name, one in asked.items():
        driver.add(name, one.prompt, max_tokens=one.max_tokens)
    num_compared, fullest = 0, 0.0
    while driver.engine.has_work:
        driver.step()
        engine = driver.engine
        used = engine.kv_blocks_used * BLOCK - engine.kv_wasted_share * engine.num_kv_tokens
        fullest = max(fullest, used / slots_paid_for)
        counted = tokens_and_blocks(driver, asked)
        if counted is None or (engine.num_waiting and driver.counter("preemptions")):
            continue  # who has lost its blocks is not seen from outside
        num_tokens, num_blocks = counted
        num_compared += 1
        assert engine.kv_blocks_used == num_blocks
        want_wasted = (num_blocks * BLOCK - num_tokens) / engine.num_kv_tokens
        assert engine.kv_wasted_share == pytest.approx(want_wasted, abs=1e-12)
    assert driver.counter("preemptions") > 0
    assert num_compared > 100, num_compared
    assert fullest >= 0.95, fullest
    assert driver.engine.kv_wasted_share == 0.0
    assert driver.engine.kv_blocks_used == 0
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in driver.outputs.values())
