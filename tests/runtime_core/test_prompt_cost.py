"""What a prompt's tokens cost a step, and the chunks that the scheduler makes of long prompts by it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime_core.test_scheduler import Driver
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headway_runtime.batch import Batch, Chunk, Sample, StepResult
from headway_runtime.config import Envelope, Limits
from headway_runtime.doubling_context import ATTENTION_SLOWDOWN, CODED_KV_SLOWDOWN, estimated_doubling_context
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ConfigError
from headway_runtime.model_config import read_model_config
from headway_runtime.prompt_cost import PromptCost
from headway_runtime.request import Request, SamplingParams
from headway_runtime.scheduler import Scheduler

CONTEXTS = st.sampled_from([0, 1, 3, 100, 9957])


def summed(doubling_context: int, start: int, num_tokens: int) -> float:
    """Token by token."""
    attended = range(start + 1, start + num_tokens + 1)
    return sum(1 + (one / doubling_context if doubling_context else 0.0) for one in attended)


@given(CONTEXTS, st.integers(0, 5000), st.integers(0, 300))
def test_a_chunk_costs_what_its_tokens_do(doubling_context: int, start: int, num_tokens: int) -> None:
    found = PromptCost(doubling_context).of(start, num_tokens)
    assert abs(found - summed(doubling_context, start, num_tokens)) <= 0.5 + 1e-6


@given(CONTEXTS, st.integers(0, 10**6), st.integers(1, 20_000))
def test_no_more_tokens_would_fit(doubling_context: int, start: int, budget: int) -> None:
    cost = PromptCost(doubling_context)
    found = cost.most_tokens(start, budget)
    assert cost.of(start, found) <= budget
    pairs = (found + 1) * start + (found + 1) * (found + 2) // 2
    # In whole numbers, since a budget may be met to the last one.
    if doubling_context:
        assert (found + 1) * doubling_context + pairs > budget * doubling_context
    else:
        assert found == budget


def test_without_a_budget_there_is_no_token() -> None:
    for doubling_context in (0, 100):
        assert PromptCost(doubling_context).most_tokens(50, 0) == 0
        assert PromptCost(doubling_context).most_tokens(50, -3) == 0


def parts_of(driver: Driver, name: str) -> list[Chunk]:
    """The chunks of a request's prompt, step by step, until it is computed; each step is run."""
    found: list[Chunk] = []
    while not driver.tokens[name]:
        assert len(found) < 1000, "it is never computed"
        found += [one for one in driver.step().batch.chunks if one.request_id == name]
    return found


def test_chunks_beside_a_decode_get_shorter_and_cost_the_same() -> None:
    cost = PromptCost(40)
    driver = Driver(num_blocks=256, max_model_len=512, limits=Limits(4, 32), prompt_cost=cost)
    driver.add("decodes", 3, 200)
    driver.step()
    driver.add("long", 300, 2)
    chunks = parts_of(driver, "long")
    lengths = [one.num_tokens for one in chunks]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert lengths[0] > 20 > 5 > lengths[-2]
    assert sum(lengths) == 300
    # One token of the 32 is the decode's; no chunk could have had a token more.
    for one in chunks[:-1]:
        assert cost.of(one.start, one.num_tokens) <= 31 <= cost.of(one.start, one.num_tokens + 1)
    assert len(driver.tokens["decodes"]) == len(chunks) + 1, "a decode missed a step"


def test_where_nobody_decodes_chunks_are_whole_steps() -> None:
    driver = Driver(num_blocks=256, max_model_len=512, limits=Limits(4, 32), prompt_cost=PromptCost(40))
    driver.add("long", 300, 2)
    assert [one.num_tokens for one in parts_of(driver, "long")] == [32] * 9 + [12]


def test_a_token_that_costs_more_than_a_step_is_computed_all_the_same() -> None:
    driver = Driver(num_blocks=256, max_model_len=512, limits=Limits(4, 4), prompt_cost=PromptCost(1))
    driver.add("decodes", 3, 200)
    driver.step()
    driver.add("long", 100, 2)
    # The first two cost 2 and 3 of the 3 that the decode leaves, all others more.
    assert [one.num_tokens for one in parts_of(driver, "long")] == [1] * 100
    driver.run()


def test_who_comes_with_a_short_prompt_gets_his_share_by_cost() -> None:
    """Of a long prompt far on, half of a step is a few tokens; the short one has the other half."""
    driver = Driver(
        num_blocks=256,
        max_model_len=512,
        limits=Limits(4, 32),
        long_prefill_share=0.5,
        prompt_cost=PromptCost(40),
    )
    driver.add("decodes", 3, 200)
    driver.step()
    driver.add("long", 300, 2)
    while driver.scheduler.running[-1].num_computed < 200:
        driver.step()
    driver.add("short", 10, 2)
    tokens = {one.request_id: one.num_tokens for one in driver.step().batch.chunks}
    assert tokens["decodes"] == 1
    assert tokens["short"] == 10
    assert 1 <= tokens["long"] <= 4


def test_who_shares_a_beginning_waits_for_it_beside_a_decode() -> None:
    """Three requests for the same 2,000 tokens: one computes them, the others find them."""
    scheduler = Scheduler(
        num_blocks=1000,
        block_size=4,
        max_model_len=2100,
        limits=Limits(8, 128),
        long_prefill_share=0.5,
        prompt_cost=PromptCost(300),
    )
    names = ("a", "b", "c")
    for name, prompt in (("decodes", (5,) * 3), *((name, (7,) * 2000) for name in names)):
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=400), 0.0))
        if name == "decodes":
            step(scheduler)
    num_tokens = dict.fromkeys(names, 0)
    for _ in range(300):
        for chunk in step(scheduler).chunks:
            if chunk.request_id in names and chunk.start < 2000:
                num_tokens[chunk.request_id] += chunk.num_tokens
    assert num_tokens["a"] == 2000
    assert num_tokens["b"] + num_tokens["c"] < 300


def test_no_long_prompt_is_admitted_by_what_rounding_leaves_of_another() -> None:
    """It would hold blocks for all of its tokens while it gets a few."""
    driver = Driver(
        num_blocks=512,
        max_model_len=1000,
        limits=Limits(8, 32),
        long_prefill_share=0.5,
        prompt_cost=PromptCost(100),
    )
    driver.add("decodes", 3, 500)
    driver.step()
    driver.add("first", 600, 2)
    driver.add("second", 600, 2)
    while not driver.tokens["first"]:
        assert "second" not in {one.request_id for one in driver.step().batch.chunks} or (
            driver.tokens["first"] or driver.scheduler.running[1].num_pending <= 5
        )
    driver.run()


def test_several_prompts_beside_a_decode_cost_a_step_at_most() -> None:
    """But for one token, which a prompt gets whatever it costs."""
    cost = PromptCost(50)
    driver = Driver(
        num_blocks=2048, max_model_len=1000, limits=Limits(8, 64), long_prefill_share=0.5, prompt_cost=cost
    )
    driver.add("decodes", 3, 900)
    driver.step()
    for index, num_prompt in enumerate((500, 20, 90, 300, 7, 41)):
        driver.add(f"prompt {index}", num_prompt, 3)
    while driver.scheduler.num_running + driver.scheduler.num_waiting > 1:
        chunks = driver.step().batch.chunks
        parts = [one for one in chunks if one.num_tokens > 1 or not one.samples]
        spent = sum(cost.of(one.start, one.num_tokens) for one in parts) + len(chunks) - len(parts)
        dearest = max((cost.of(one.start + one.num_tokens, 1) for one in parts), default=0)
        assert spent <= 64 + dearest


def step(scheduler: Scheduler) -> Batch:
    """The next step of a scheduler, run; every sample is a 9."""
    batch = scheduler.schedule(1.0).batch
    samples = tuple(Sample(9) if one.samples else None for one in batch.chunks)
    scheduler.commit(batch, StepResult(samples), 1.0)
    scheduler.check_integrity()
    return batch


def folder_of(config: PreTrainedConfig, path: Path, **changes: Any) -> Path:
    config.save_pretrained(path)
    told = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(told))
    return path


def weights_of_token(make: Callable[[], nn.Module], *, experts: float = 1.0) -> float:
    """By transformers' own modules: of the linear ones without the head, the experts' in part."""
    with torch.device("meta"):
        model = make()
    total = 0.0
    for name, one in model.named_parameters():
        if one.dim() >= 2 and "embed" not in name and "lm_head" not in name:
            total += one.numel() * (experts if "experts" in name else 1.0)
    return total


def test_the_estimate_is_operations_of_weights_over_those_of_attention(tmp_path: Path) -> None:
    """Llama 3.1 8B's shape; published prompts of it on two A100 make 9,957 tokens (docs/simulate.md)."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    )
    folder = folder_of(config, tmp_path, architectures=["LlamaForCausalLM"])
    found = estimated_doubling_context(read_model_config(folder))
    attention = ATTENTION_SLOWDOWN * 4 * 32 * 32 * 128
    assert found == pytest.approx(
        2 * weights_of_token(lambda: LlamaForCausalLM(config)) / attention, rel=0.01
    )
    assert 0.67 < found / 9957 < 1.5
    for kv_cache_dtype in ("fp8", "int8"):
        slower = estimated_doubling_context(read_model_config(folder), kv_cache_dtype)
        assert slower == pytest.approx(found / CODED_KV_SLOWDOWN, rel=0.01)


def test_of_experts_only_those_count_that_a_token_goes_through(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
    )
    folder = folder_of(config, tmp_path, architectures=["Qwen3MoeForCausalLM"])
    found = estimated_doubling_context(read_model_config(folder))
    attention = ATTENTION_SLOWDOWN * 4 * 3 * 8 * 32
    assert found == pytest.approx(
        2 * weights_of_token(lambda: Qwen3MoeForCausalLM(config), experts=4 / 16) / attention, rel=0.02
    )


def test_a_model_all_of_whose_layers_have_a_window_has_no_dear_tokens(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=512,
    )
    folder = folder_of(config, tmp_path, architectures=["MistralForCausalLM"])
    assert estimated_doubling_context(read_model_config(folder)) == 0


def test_the_flag_goes_before_the_estimate(checkpoint: Any) -> None:
    folder = checkpoint().folder
    estimated = estimated_doubling_context(read_model_config(folder))
    assert estimated > 0
    assert keyword_options(folder, {}).prefill_doubling_context == estimated
    assert keyword_options(folder, {"prefill_doubling_context": 0}).prefill_doubling_context == 0
    assert keyword_options(folder, {"prefill_doubling_context": 77}).prefill_doubling_context == 77
    with pytest.raises(ConfigError, match=r"prefill_doubling_context=-1"):
        keyword_options(folder, {"prefill_doubling_context": -1})


def test_an_engine_answers_the_same_in_chunks_by_cost_and_tells_what_prompts_cost(
    checkpoint: Any, start_engine: Any, random_prompts: Any, transformers_greedy: Any
) -> None:
    prompts = random_prompts(7, (9, 200))
    want = [transformers_greedy(checkpoint().model, prompt, 12) for prompt in prompts]
    cost, lengths = PromptCost(30), {}
    for doubling_context in (0, cost.doubling_context):
        driver = start_engine(
            envelope=Envelope(4, 48), limits=Limits(4, 48), prefill_doubling_context=doubling_context
        )
        driver.add("short", prompts[0], temperature=0.0, max_tokens=40)
        driver.step()
        driver.add("long", prompts[1], temperature=0.0, max_tokens=12)
        num_steps = 0
        while not driver.tokens("long"):
            driver.step()
            num_steps += 1
        driver.run()
        assert driver.tokens("short")[:12] == want[0]
        assert driver.tokens("long") == want[1]
        lengths[doubling_context] = num_steps
        moments = driver.metrics.snapshot().moments
        each = [PromptCost(doubling_context).of(0, len(prompt)) for prompt in prompts]
        assert moments.prompts == (2, sum(each), sum(one * one for one in each))
        # Rounded by chunk.
        assert abs(moments.prompt_steps[1] - sum(each)) <= num_steps / 2
    assert lengths[0] == 5
    assert lengths[30] > 12
