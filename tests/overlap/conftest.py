"""Small models without weights of their own, and engines over them whose steps overlap, or do not."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs

VOCAB_SIZE = 96
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MIXTURE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ACT_ORDER: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": True,
    "lm_head": False,
}


def integers() -> dict[str, Any]:
    """A quantization config of int8 weights whose inputs are integers, too."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


SHAPES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "head norms": DENSE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "experts": MIXTURE,
    "experts, coded inputs": MIXTURE | {"quantization_config": integers()},
    "experts, act-order": MIXTURE | {"quantization_config": ACT_ORDER},
    "experts, narrow blocks": MIXTURE
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 32]}},
    # No kernel multiplies 4 and 8 bits at once.
    "experts, unlike": MIXTURE
    | {"quantization_config": ACT_ORDER | {"dynamic": {r"+:.*experts\.[024]\..*": {"bits": 8}}}},
    # Every second layer has a window.
    "windows": DENSE
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 12,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    # Products of codes want sizes that kernels have tiles for.
    "wide": DENSE | {"hidden_size": 128, "intermediate_size": 192},
    "coded inputs": DENSE
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "quantization_config": integers(),
    },
}


@dataclass
class Driver:
    """An engine, and what came out of it; all invariants are checked after every turn."""

    engine: EngineCore
    metrics: EngineMetrics
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def add(
        self, name: str, prompt: Sequence[int], *, priority: int = 0, salt: str = "", **sampling: Any
    ) -> None:
        now = time.monotonic()
        request = Request(name, tuple(prompt), SamplingParams(**sampling), now, priority, salt)
        self.engine.add_request(request, now)
        self.outputs[name] = []

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step(time.monotonic()).outputs
        self.engine.check_integrity()
        for one in outputs:
            assert self.reason(one.request_id) is None, "output after the terminal one"
            self.outputs[one.request_id].append(one)
        return outputs

    def run(self, max_steps: int = 5000) -> None:
        while self.engine.has_work:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for one in self.outputs[name] for token in one.token_ids]

    def logprobs(self, name: str) -> list[TokenLogprobs]:
        return [entry for one in self.outputs[name] for entry in one.logprobs]

    def reason(self, name: str) -> FinishReason | None:
        seen = self.outputs[name]
        return seen[-1].finish_reason if seen else None

    def counter(self, name: str) -> int:
        return self.metrics.snapshot().counters[name]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """model_folder(fields): a config.json."""
    made: dict[str, Path] = {}

    def make(fields: dict[str, Any]) -> Path:
        text = json.dumps(fields)
        if text not in made:
            made[text] = tmp_path_factory.mktemp("model")
            (made[text] / "config.json").write_text(text)
        return made[text]

    return make


@pytest.fixture(scope="session")
def start(model_folder: Callable[[dict[str, Any]], Path]) -> Callable[..., Driver]:
    """start(shape, **changes of the config)."""

    def make(shape: str = "dense", *, num_layers: int = 2, num_blocks: int = 64, **changes: Any) -> Driver:
        fields = SHAPES[shape] | {"num_hidden_layers": num_layers}
        bytes_per_token = 2 * num_layers * fields["num_key_value_heads"] * fields["head_dim"] * 4
        config = EngineConfig(
            model_path=str(model_folder(fields)),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            max_model_len=128,
            block_size=16,
            kv_cache_memory_bytes=(num_blocks + 1) * 16 * bytes_per_token,
            envelope=Envelope(8, 64),
            limits=Limits(8, 64),
            max_waiting=100,
            num_threads=1,
            overlap=True,
        )
        metrics = EngineMetrics()
        return Driver(EngineCore(replace(config, **changes), metrics), metrics)

    return make
