"""Answers with adapters: those of transformers with the weights that PEFT has merged, in any company."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits, SpeculativeConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.adapters.conftest import Checkpoint, StartEngine

NAMES = ("", "one", "two")


def test_each_request_of_a_mixed_batch_answers_as_alone_with_merged_weights(
    any_shape: str,
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    one = checkpoint(any_shape)
    driver = start_engine(one.folder, one.adapters)
    prompts = random_prompts(3, (5, 19, 33, 40, 70, 1, 16))
    for number, (prompt, name) in enumerate(zip(prompts, cycle(NAMES))):
        driver.add(str(number), prompt, name, max_tokens=24)
    driver.run()
    for number, (prompt, name) in enumerate(zip(prompts, cycle(NAMES))):
        assert driver.tokens(str(number)) == one.greedy(name, prompt, 24), (number, name)
    answers = [tuple(tuple(one.greedy(name, prompt, 24)) for prompt in prompts) for name in NAMES]
    assert len(set(answers)) == len(NAMES), "the adapters make no difference"


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_chunks_of_prompts_guesses_and_lost_blocks_change_nothing(
    speculation: str | None,
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    one = checkpoint()
    changes: dict[str, Any] = {"limits": Limits(8, 24)}
    if speculation is not None:
        changes = {
            "limits": Limits(8, 24, 3),
            "envelope": Envelope(16, 256, 3),
            "speculative": SpeculativeConfig("ngram", prompt_lookup_min=1, adaptive=False),
        }
    # Room for 18 blocks: sequences of 100 tokens push each other out.
    driver = start_engine(
        one.folder,
        one.adapters,
        max_model_len=128,
        kv_cache_memory_bytes=2 * 3 * 2 * 16 * 4 * 16 * 19,
        **changes,
    )
    prompts = random_prompts(5, (60, 50, 40, 70, 30, 20))
    repeated = [prompt[:10] * 2 + prompt for prompt in prompts]
    for number, (prompt, name) in enumerate(zip(repeated, cycle(NAMES))):
        driver.add(str(number), prompt, name, max_tokens=30)
    driver.run()
    for number, (prompt, name) in enumerate(zip(repeated, cycle(NAMES))):
        assert driver.tokens(str(number)) == one.greedy(name, prompt, 30), (number, name)
    assert driver.counter("preemptions") > 0
    if speculation is not None:
        assert driver.metrics.snapshot().drafts.num_accepted > 0


FIELDS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 12},
        "alpha_pattern": {"up_proj": 5, "^model.layers.2.self_attn.v_proj": 40},
    },
    "a pattern of targets": {"target_modules": r".*layers\.[02]\.mlp\.(up|down)_proj"},
    "some layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "without some": {"exclude_modules": ["k_proj"]},
    "all layers": {"target_modules": "all-linear"},
    "only the output": {"target_modules": ["o_proj"]},
    "a large rank, by its root": {"r": 64, "lora_alpha": 3, "use_rslora": True},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_what_a_configuration_may_say(
    fields: dict[str, Any],
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    one = checkpoint()
    one.make_adapter("special", tmp_path, seed=9, **fields)
    driver = start_engine(one.folder, {"special": one.adapters.pop("special")})
    (prompt,) = random_prompts(7, (30,))
    driver.add("it", prompt, "special", max_tokens=24)
    driver.run()
    want = one.greedy("special", prompt, 24)
    assert driver.tokens("it") == want
    assert want != one.greedy("", prompt, 24)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_a_quantized_model_gets_the_same_changes(
    quantization: str,
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    """The merged model's logits come closer than any other's: what an adapter adds is not quantized away."""
    one = checkpoint("qwen3")
    driver = start_engine(one.folder, one.adapters, quantization=quantization)
    prompts = random_prompts(11, (20, 30, 40))
    for number, prompt in enumerate(prompts):
        for name in NAMES:
            driver.add(f"{number}{name}", prompt, name, max_tokens=1, num_logprobs=20)
    driver.run()
    for number, prompt in enumerate(prompts):
        told = {name: driver.outputs[f"{number}{name}"][0].logprobs[0].top for name in NAMES}
        with torch.inference_mode():
            exact = {
                name: (one.merged[name] if name else one.model)(torch.tensor([prompt]))
                .logits[0, -1]
                .log_softmax(-1)
                for name in NAMES
            }
        for name in NAMES:
            distance = {
                other: sum(abs(value - float(exact[other][token])) for token, value in told[name])
                for other in NAMES
            }
            assert min(distance, key=lambda one: distance[one]) == name, (number, name, distance)


def test_a_model_in_bfloat16_stays_near_its_merged_weights(
    checkpoint: Callable[..., Checkpoint],
    start_engine: StartEngine,
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    one = checkpoint()
    driver = start_engine(one.folder, one.adapters, dtype="bfloat16")
    prompts = random_prompts(13, (20, 45))
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, "one", max_tokens=1, num_logprobs=10)
    driver.run()
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            exact = one.merged["one"](torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        for token, value in driver.outputs[str(number)][0].logprobs[0].top:
            assert abs(value - float(exact[token])) < 0.5, (number, token)
