"""Models of which only the config is there, and engines of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.config import EngineConfig, Envelope, Limits

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    # Of so many inputs that they are split.
    "wide": DENSE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 1},
    "experts": DENSE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "windows": DENSE
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


@pytest.fixture
def engine_of(tmp_path: Path) -> Callable[..., EngineConfig]:
    """engine_of(model, **changes of the config)."""

    def make(model: str = "dense", **changes: Any) -> EngineConfig:
        folder = tmp_path / model
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        config = EngineConfig(
            model_path=str(folder),
            device="cuda",
            dtype="auto",
            load_format="auto",
            max_model_len=256,
            block_size=16,
            kv_cache_memory_bytes=None,
            envelope=Envelope(4, 64),
            limits=Limits(4, 64),
            max_waiting=100,
            num_threads=1,
            cuda_graph_sizes=(2,),
        )
        return replace(config, **changes)

    return make
