"""Tokens and log-probabilities of every architecture against transformers', on fresh random models.

float32 must give exactly the same tokens. In bfloat16 a token may differ from the best one only where the
two are closer than the reference itself can tell. Most contexts are longer than the windows of those that
have any.
"""

from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits

VOCAB_SIZE = 320
NUM_TOKENS = 64
LENGTHS = (1, 3, 16, 17, 40, 100, 150)
# Between float32 logits of one model computed in another order of additions.
FLOAT32_TOLERANCE = 3e-4
# Three sequences cannot grow to their ends without preemption.
SCARCE_BLOCKS = 92
# How a batch is run; each must give the tokens that a sequence gets alone.
CONDITIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunked prefill": {"envelope": Envelope(16, 24), "limits": Limits(16, 24)},
}
SMALL_BLOCK = 4


def test_float32_tokens_alone_equal_the_reference(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape)
    (prompt,) = random_prompts(sum(map(ord, any_shape)), [37])
    driver = start_engine(reference.folder)
    driver.add("a", prompt, max_tokens=NUM_TOKENS)
    driver.run()
    assert driver.tokens("a") == reference.greedy(prompt, NUM_TOKENS)


def test_float32_logprobs_equal_the_reference(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape)
    driver = start_engine(reference.folder, envelope=Envelope(16, 32), limits=Limits(16, 32))
    prompts = random_prompts(13, [5, 130, 70, 33])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=8, num_logprobs=VOCAB_SIZE)
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        want = reference.logits(prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        got = logprobs_of(driver, str(index))
        torch.testing.assert_close(got, want, atol=FLOAT32_TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_float32_tokens_in_mixed_batches_equal_the_reference(
    any_shape: str, condition: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape)
    driver = start_engine(reference.folder, **CONDITIONS[condition])
    prompts = random_prompts(7, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=NUM_TOKENS)
        # Each joins while the ones before it are at work, so that steps mix prompts and decodes.
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        check_greedy(reference.logits(prompt + tokens)[len(prompt) - 1 : -1], tokens, 0.0)


def test_float32_tokens_equal_the_reference_through_preemptions(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape)
    memory = reference.kv_bytes(SCARCE_BLOCKS, SMALL_BLOCK)
    driver = start_engine(reference.folder, kv_cache_memory_bytes=memory, block_size=SMALL_BLOCK)
    prompts = random_prompts(11, [90, 60, 80, 20, 75])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=NUM_TOKENS)
    driver.run()
    assert driver.counter("preemptions") >= 2
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        check_greedy(reference.logits(prompt + tokens)[len(prompt) - 1 : -1], tokens, 0.0)


def test_float32_tokens_after_prefix_cache_hits_equal_the_reference(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape)
    driver = start_engine(reference.folder)
    shared, *rests = random_prompts(5, [100, 0, 9, 40])
    for index, rest in enumerate(rests):
        driver.add(str(index), shared + rest, max_tokens=NUM_TOKENS)
        driver.run()
    assert driver.counter("cached_tokens") == 2 * 96
    for index, rest in enumerate(rests):
        tokens = driver.tokens(str(index))
        rows = slice(len(shared + rest) - 1, -1)
        check_greedy(reference.logits(shared + rest + tokens)[rows], tokens, 0.0)


def test_bfloat16_tokens_differ_only_where_the_reference_is_undecided(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape, "bfloat16")
    driver = start_engine(reference.folder, **CONDITIONS["chunked prefill"])
    prompts = random_prompts(17, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=NUM_TOKENS)
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        rounded = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
        exact = reference.logits(prompt + tokens, exact=True)[len(prompt) - 1 : -1]
        # Two logits, each half as wrong again as the reference's may be.
        tolerance = 3 * float((rounded - exact).abs().max())
        check_greedy(exact, tokens, tolerance, share=0.9 if is_mixture(any_shape) else 1.0)


def test_bfloat16_logprobs_are_as_exact_as_the_reference(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(any_shape, "bfloat16")
    driver = start_engine(reference.folder)
    prompts = random_prompts(29, [60, 90, 20])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=NUM_TOKENS, num_logprobs=VOCAB_SIZE)
    driver.run()
    own, its = [], []
    for index, prompt in enumerate(prompts):
        known, rows = prompt + driver.tokens(str(index)), slice(len(prompt) - 1, -1)
        rounded = reference.logits(known)[rows].log_softmax(-1)
        exact = reference.logits(known, exact=True)[rows].log_softmax(-1)
        own.append((logprobs_of(driver, str(index)) - exact).abs())
        its.append((rounded - exact).abs())
    limit = 2.0 if is_mixture(any_shape) else 1.1
    assert torch.cat(own).mean() <= limit * torch.cat(its).mean()


def test_dummy_weights_serve(any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any) -> None:
    folder = checkpoint(any_shape).folder
    (prompt,) = random_prompts(3, [40])
    answers = []
    for seed in (1, 1, 2):
        driver = start_engine(folder, load_format="dummy", seed=seed)
        driver.add("a", prompt, max_tokens=16, num_logprobs=1)
        driver.run()
        assert all(torch.tensor(one.logprobs[0].chosen).isfinite() for one in driver.outputs["a"])
        answers.append([one.logprobs[0].chosen for one in driver.outputs["a"]])
    assert answers[0] == answers[1] != answers[2]


def test_weights_and_kv_in_8_bits_cost_little(
    any_shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    """Every linear layer goes through the one place where weights are quantized at load."""
    folder = checkpoint(any_shape, "bfloat16").folder
    (prompt,) = random_prompts(3, [60])
    told = []
    for changes in ({}, {"quantization": "int8", "kv_cache_dtype": "int8"}):
        driver = start_engine(folder, **changes)
        driver.add("a", prompt, max_tokens=1, num_logprobs=VOCAB_SIZE)
        driver.run()
        told.append(logprobs_of(driver, "a"))
    plain, quantized = told
    divergence = float((plain.exp() * (plain - quantized)).sum())
    assert 0 < divergence < (0.5 if is_mixture(any_shape) else 0.1)


def logprobs_of(driver: Any, request_id: str) -> torch.Tensor:
    """Those of a request that asked for all, [tokens, vocab]."""
    outputs = driver.outputs[request_id]
    got = torch.empty((len(outputs), VOCAB_SIZE))
    for row, output in zip(got, outputs, strict=True):
        top = output.logprobs[0].top
        row[[token for token, _ in top]] = torch.tensor([value for _, value in top])
    return got


def is_mixture(shape: str) -> bool:
    """Of experts. It sends a token to others for a hair's breadth: in bfloat16, errors are partly chance."""
    return "moe" in shape or "mixtral" in shape


def check_greedy(logits: torch.Tensor, tokens: list[int], tolerance: float, share: float = 1.0) -> None:
    """Tokens must be the best of their rows of logits [tokens, vocab], or be within `tolerance` of it.

    share: of the tokens that must be so.
    """
    assert len(tokens) == NUM_TOKENS
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    worst = float((logits.max(dim=-1).values - chosen).quantile(share))
    assert worst <= tolerance, f"a token is {worst} below the best, with tolerance {tolerance}"
