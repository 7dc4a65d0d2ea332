"""Layers with windows in a whole engine: the tokens are those of transformers, however they come about."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits

WINDOWS = [pytest.param(one, id=f"window of {one}") for one in (1, 16, 23, 100)]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("window", WINDOWS)
def test_prompts_in_pieces_and_answers_equal_transformers(
    window: int, way: str, checkpoint: Any, give_layers: Callable[..., None], start_engine: Callable[..., Any]
) -> None:
    give_layers(window=window)
    asked = prompts(3, 40, 131, 97)
    want = [checkpoint.greedy(prompt, 24, window) for prompt in asked]
    assert want != [checkpoint.greedy(prompt, 24, None) for prompt in asked]
    for budget in (256, 37):
        driver = start_engine(envelope=Envelope(16, budget), limits=Limits(16, budget))
        for number, prompt in enumerate(asked):
            driver.add(str(number), prompt, max_tokens=24)
        driver.run()
        assert [driver.tokens(str(number)) for number in range(len(asked))] == want


@pytest.mark.parametrize("window", [16, 23])
def test_a_cached_beginning_is_as_good_as_a_computed_one(
    window: int, way: str, checkpoint: Any, give_layers: Callable[..., None], start_engine: Callable[..., Any]
) -> None:
    give_layers(window=window)
    (shared,) = prompts(100)
    asked = [shared + tail for tail in ([7, 8, 9], [11] * 30, [])]
    driver = start_engine()
    for number, prompt in enumerate(asked):
        driver.add(str(number), prompt, max_tokens=12)
        driver.run()
        assert driver.tokens(str(number)) == checkpoint.greedy(prompt, 12, window)
    assert driver.counter("cached_tokens") == 2 * 96


def test_preempted_sequences_go_on_as_if_nothing_had_been(
    way: str, checkpoint: Any, give_layers: Callable[..., None], start_engine: Callable[..., Any]
) -> None:
    give_layers(window=23)
    asked = prompts(40, 50, 60, 45)
    # 16 blocks and the null block, of 16 tokens: four of these sequences do not fit.
    bytes_per_block = 16 * 3 * 2 * 2 * 32 * 4
    driver = start_engine(kv_cache_memory_bytes=17 * bytes_per_block, enable_prefix_caching=False)
    for number, prompt in enumerate(asked):
        driver.add(str(number), prompt, max_tokens=60)
    driver.run()
    assert driver.counter("preemptions") > 0
    want = [checkpoint.greedy(prompt, 60, 23) for prompt in asked]
    assert [driver.tokens(str(number)) for number in range(len(asked))] == want


def test_layers_may_differ(
    checkpoint: Any,
    give_layers: Callable[..., None],
    start_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without kernels alike: a soft cap, a scale and a window at once."""
    from headway_runtime.layers import cpu_kernels

    give_layers(window=31, soft_cap=4.0, scale=0.4)
    asked = prompts(90, 20)
    answers = []
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
        driver = start_engine()
        for number, prompt in enumerate(asked):
            driver.add(str(number), prompt, max_tokens=20)
        driver.run()
        answers.append([driver.tokens(str(number)) for number in range(len(asked))])
    assert answers[0] == answers[1]
    give_layers(window=31, soft_cap=None, scale=0.4)
    driver = start_engine()
    driver.add("uncapped", asked[0], max_tokens=20)
    driver.run()
    assert driver.tokens("uncapped") != answers[0][0]
