"""The engine with Triton kernels gives the tokens that it gives by PyTorch's operators."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from headway_runtime.inprocess import Engine
from headway_runtime.kernels.triton.paged_attention import PagedAttention
from headway_runtime.layers import kernel_choice
from headway_runtime.sampling_params import SamplingParams
from headway_runtime.sources import resolve

KVCacheDtype = Literal["auto", "bfloat16", "fp8", "int8"]


@pytest.fixture
def generate(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> Iterator[Callable[..., list[list[int]]]]:
    """Greedy tokens of an engine whose layers get those kernels."""

    def tokens(kernels: str, model: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        monkeypatch.setenv(kernel_choice.VARIABLE, kernels)
        kernel_choice.forget_choice()
        sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        options = {
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "kv_cache_memory_bytes": 1 << 22,
            "generation_config": "none",
            "device": device.type,
            **options,
        }
        launched: list[int] = []
        attend = PagedAttention.attend

        def counted(self: PagedAttention, layer: int, *arguments: Any) -> None:
            launched.append(layer)
            attend(self, layer, *arguments)

        with monkeypatch.context() as patch, Engine(model, **options) as engine:
            patch.setattr(PagedAttention, "attend", counted)
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert bool(launched) == (kernels == "triton")
        return [list(output.outputs[0].token_ids) for output in outputs]

    yield tokens
    kernel_choice.forget_choice()


@pytest.fixture
def prompts(device: torch.device, generator: torch.Generator) -> list[list[int]]:
    """More sequences than one step takes, so that prompts are cut and decodes go beside them."""
    return [
        torch.randint(5, 500, (length,), device=device, generator=generator).tolist()
        for length in (1, 16, 41, 5, 60)
    ]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_a_model_with_grouped_queries_gives_the_same_tokens(
    kv_cache_dtype: KVCacheDtype, generate: Callable[..., list[list[int]]], prompts: list[list[int]]
) -> None:
    model = "bundled://headway-tiny"
    if kv_cache_dtype != "auto":
        # An interpreter takes its time for each token; these are still cut, and go beside decodes.
        prompts = [prompt[:24] for prompt in prompts]

    want = generate("torch", model, prompts, kv_cache_dtype=kv_cache_dtype)
    got = generate("triton", model, prompts, kv_cache_dtype=kv_cache_dtype)

    assert got == want


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Random weights; every second layer has a window, all have a soft cap, heads are of an odd size."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "vocab_size": 1536,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "max_position_embeddings": 512,
        "sliding_window": 24,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    bundled = Path(resolve("bundled://headway-tiny"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled / name).read_bytes())
    return tmp_path


def test_a_model_with_windows_and_soft_caps_gives_the_same_tokens(
    gemma: Path, generate: Callable[..., list[list[int]]], prompts: list[list[int]]
) -> None:
    want = generate("torch", str(gemma), prompts, load_format="dummy")
    got = generate("triton", str(gemma), prompts, load_format="dummy")

    assert got == want
    assert len({tuple(one) for one in got}) > 1


def test_guesses_are_checked_with_the_same_result(generate: Callable[..., list[list[int]]]) -> None:
    model, prompts = "bundled://headway-tiny", [[7, 8, 9, 10] * 6, [20, 21, 22] * 5]
    guessing = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}

    want = generate("torch", model, prompts)
    got = generate("triton", model, prompts, speculative_config=guessing)

    assert got == want
