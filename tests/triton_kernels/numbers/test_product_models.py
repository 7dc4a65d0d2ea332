"""Small models of quantized weights and of experts generate by Triton's kernels what they do by PyTorch's."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.kernels.triton.coded_product import CodedProduct
from headway_runtime.layers import kernel_choice
from headway_runtime.layers.fused_experts import FusedExperts
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, SamplingParams

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [53], list(range(20)))
NUM_TOKENS = 5


def tokens_of(folder: Path, quantization: str) -> list[list[int]]:
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        max_model_len=64,
        block_size=16,
        kv_cache_memory_bytes=8 * 2**20,
        envelope=Envelope(4, 64),
        limits=Limits(4, 64),
        max_waiting=10,
        num_threads=1,
        quantization=quantization,
    )
    engine = EngineCore(config, EngineMetrics())
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        now = time.monotonic()
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        engine.add_request(Request(str(number), tuple(prompt), sampling, now), now)
    while engine.has_work:
        for one in engine.step(time.monotonic()).outputs:
            found[int(one.request_id)] += one.token_ids
    return found


def counting(call: Callable[..., Tensor], launches: list[int]) -> Callable[..., Tensor]:
    def counted(*operands: Any) -> Tensor:
        launches.append(1)
        return call(*operands)

    return counted


@pytest.mark.parametrize("quantization", ["none", "int4", "int8", "fp8"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_tokens_are_those_of_torch(
    model: dict[str, Any],
    quantization: str,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cuda":
        pytest.skip("what float32 goes through on a GPU is PyTorch's in either case")
    launches: list[int] = []
    for kernel in (CodedProduct, FusedExperts):
        counted = counting(kernel.__call__, launches)
        monkeypatch.setattr(kernel, "__call__", counted)
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = {}
    for choice in ("torch", "triton"):
        monkeypatch.setattr(kernel_choice, "_choice", lambda own=choice: own)
        found[choice] = tokens_of(tmp_path, quantization)
        assert bool(launches) == (choice == "triton" and (quantization != "none" or model is EXPERTS))

    assert [len(tokens) for tokens in found["torch"]] == [NUM_TOKENS] * len(PROMPTS)
    assert found["triton"] == found["torch"]
