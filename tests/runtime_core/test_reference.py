"""The engine's tokens and log-probabilities against transformers', on fresh random models.

float32 must give exactly the same tokens. In bfloat16 a token may differ from the best one only where the
two are closer than the reference itself can tell: its own bfloat16 logits miss those of float32 arithmetic on
the same weights by as much. Choices are judged one position at a time, along the engine's tokens.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway_runtime.config import Envelope, Limits
from headway_runtime.layers import cpu_kernels, kv_cache, linear
from headway_runtime.sources import BUNDLED_FOLDER, bundled_names

NUM_TOKENS = 64
LENGTHS = (1, 3, 16, 17, 40, 100, 150)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
# Between float32 logits of one model computed in another order of additions.
FLOAT32_TOLERANCE = 2e-4
# Six blocks of slack over one sequence of 256 tokens: three sequences cannot grow without preemption.
SCARCE_BLOCKS = 23

SHAPES = ["gqa", "mha, untied", "mqa", "llama3 rope", "linear rope", "wide heads", "biases"]
# How a batch is run; each must give the tokens that a sequence gets alone.
CONDITIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunked prefill": {"envelope": Envelope(16, 24), "limits": Limits(16, 24)},
    "small blocks": {"block_size": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_tokens_alone_equal_the_reference(
    shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape)
    (prompt,) = random_prompts(sum(map(ord, shape)), [37])
    driver = start_engine(reference.folder)
    driver.add("a", prompt, **GREEDY)
    driver.run()
    assert driver.tokens("a") == reference.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_float32_tokens_in_mixed_batches_equal_the_reference(
    shape: str, condition: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape)
    driver = start_engine(reference.folder, **CONDITIONS[condition])
    prompts = random_prompts(7, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
        # Each joins while the ones before it are at work, so that steps mix prompts and decodes.
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        check_greedy(reference.logits(prompt + tokens)[len(prompt) - 1 : -1], tokens, 0.0)


@pytest.mark.parametrize("missing", ["attends_by_products", "paged_attention"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_float32_tokens_without_products_or_kernels_equal_the_reference(
    condition: str,
    missing: str,
    checkpoint: Any,
    start_engine: Any,
    random_prompts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CPUs attend in float16, and as devices other than CPUs do."""
    place = cpu_kernels if missing == "paged_attention" else kv_cache
    monkeypatch.setattr(place, missing, lambda *what: None)
    reference = checkpoint("gqa")
    driver = start_engine(reference.folder, **CONDITIONS[condition])
    prompts = random_prompts(31, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        check_greedy(reference.logits(prompt + tokens)[len(prompt) - 1 : -1], tokens, 0.0)


@pytest.mark.parametrize("shape", ["gqa", "mqa", "llama3 rope"])
def test_float32_tokens_equal_the_reference_through_preemptions(
    shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape)
    driver = start_engine(reference.folder, kv_cache_memory_bytes=reference.kv_bytes(SCARCE_BLOCKS))
    prompts = random_prompts(11, [90, 60, 80, 20, 75])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
    driver.run()
    assert driver.counter("preemptions") >= 2
    for index, prompt in enumerate(prompts):
        assert driver.tokens(str(index)) == reference.greedy(prompt, NUM_TOKENS)
    assert driver.counter("prompt_tokens") == sum(map(len, prompts))
    assert driver.counter("generated_tokens") == len(prompts) * NUM_TOKENS


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logprobs_equal_the_reference(
    shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape)
    vocab_size = reference.model.config.vocab_size
    driver = start_engine(reference.folder, envelope=Envelope(16, 32), limits=Limits(16, 32))
    prompts = random_prompts(13, [5, 70, 33])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, temperature=0.0, max_tokens=8, num_logprobs=vocab_size)
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        want = reference.logits(prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        for output, row in zip(driver.outputs[str(index)], want, strict=True):
            (logprobs,) = output.logprobs
            got = torch.empty(vocab_size)
            got[[token for token, _ in logprobs.top]] = torch.tensor([value for _, value in logprobs.top])
            torch.testing.assert_close(got, row, atol=FLOAT32_TOLERANCE, rtol=0.0)
            assert logprobs.chosen == pytest.approx(float(row[output.token_ids[0]]), abs=FLOAT32_TOLERANCE)
            values = [value for _, value in logprobs.top]
            assert values == sorted(values, reverse=True)


@pytest.fixture(params=["ours where there are any", "oneDNN's products", "PyTorch's"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernels compute: different processors and systems have different ones."""
    if request.param != "ours where there are any":
        monkeypatch.setattr(linear, "pairs_linear", lambda parts, bias: None)
    if request.param == "PyTorch's":
        monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
        monkeypatch.setattr(linear, "can_pack", lambda: False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", ["gqa", "mha, untied", "llama3 rope", "biases"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_bfloat16_tokens_differ_only_where_the_reference_is_undecided(
    shape: str, condition: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape, "bfloat16")
    driver = start_engine(reference.folder, **CONDITIONS[condition])
    prompts = random_prompts(17, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        rounded = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
        exact = reference.logits(prompt + tokens, exact=True)[len(prompt) - 1 : -1]
        # Two logits, each half as wrong again as the reference's may be.
        check_greedy(exact, tokens, 3 * float((rounded - exact).abs().max()))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", ["gqa", "llama3 rope", "biases"])
def test_bfloat16_logprobs_are_as_exact_as_the_reference(
    shape: str, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint(shape, "bfloat16")
    driver = start_engine(reference.folder)
    (prompt,) = random_prompts(29, [60])
    vocab_size = reference.model.config.vocab_size
    driver.add("a", prompt, temperature=0.0, max_tokens=NUM_TOKENS, num_logprobs=vocab_size)
    driver.run()
    tokens = driver.tokens("a")
    rounded = reference.logits(prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    exact = reference.logits(prompt + tokens, exact=True)[len(prompt) - 1 : -1].log_softmax(-1)
    got = torch.empty_like(exact)
    for row, output in zip(got, driver.outputs["a"], strict=True):
        top = output.logprobs[0].top
        row[[token for token, _ in top]] = torch.tensor([value for _, value in top])
    assert (got - exact).abs().mean() <= 1.25 * (rounded - exact).abs().mean()


def check_greedy(logits: torch.Tensor, tokens: list[int], tolerance: float) -> None:
    """Each token must be the best of its row of logits [tokens, vocab], or be within `tolerance` of it."""
    assert len(tokens) == NUM_TOKENS
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    worst = float((best - chosen).max())
    assert worst <= tolerance, f"a token is {worst} below the best, with tolerance {tolerance}"


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_model_matches_transformers(
    name: str, start_engine: Any, random_prompts: Any, transformers_greedy: Any
) -> None:
    folder = BUNDLED_FOLDER / name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = random_prompts(19, [9, 60, 120], model.config.vocab_size)
    driver = start_engine(folder, dtype="float32")
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
    driver.run()
    for index, prompt in enumerate(prompts):
        assert driver.tokens(str(index)) == transformers_greedy(model, prompt, NUM_TOKENS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")
def test_cuda_tokens_equal_the_reference(checkpoint: Any, start_engine: Any, random_prompts: Any) -> None:
    reference = checkpoint("gqa")
    driver = start_engine(reference.folder, device="cuda", envelope=Envelope(16, 24), limits=Limits(16, 24))
    prompts = random_prompts(23, LENGTHS)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, **GREEDY)
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        tokens = driver.tokens(str(index))
        check_greedy(reference.logits(prompt + tokens)[len(prompt) - 1 : -1], tokens, 0.0)
