"""A model whose layers have windows, soft caps, a scale of their own and wide heads, over every KV type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from headway_runtime.config import Envelope, Limits


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=512,
        sliding_window=24,
        query_pre_attn_scalar=144,
        attn_logit_softcapping=8.0,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model: Any = Gemma2ForCausalLM(config)
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "int8"])
def test_answers_are_the_same_in_pieces_and_from_the_cache(
    kv_cache_dtype: str, way: str, gemma: Path, start_engine: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(4)
    asked = [torch.randint(5, 320, (length,), generator=generator).tolist() for length in (40, 90, 17, 120)]
    answers = []
    for budget in (256, 29):
        limits = {"envelope": Envelope(16, budget), "limits": Limits(16, budget)}
        driver = start_engine(gemma, kv_cache_dtype=kv_cache_dtype, **limits)
        for number, prompt in enumerate(asked):
            driver.add(str(number), prompt, max_tokens=24)
        driver.run()
        driver.add("again", asked[3], max_tokens=24)
        driver.run()
        answers.append([driver.tokens(str(number)) for number in range(len(asked))])
        assert driver.tokens("again") == answers[-1][3]
        assert driver.counter("cached_tokens") == 112
    assert answers[0] == answers[1]
    assert len({tuple(one) for one in answers[0]}) == len(asked)
    assert len(set(answers[0][3])) > 4
