"""Small random checkpoints of each architecture, the same models in transformers, and engines over them."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.config_classes import SIZES
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.request import Request, RequestOutput, SamplingParams

VOCAB_SIZE = 320
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large enough for logits that differ clearly from each other.
    "initializer_range": 0.2,
}
# Fewer tokens than most prompts of the tests have.
WINDOW = 24
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    "original_max_position_embeddings": 256,
}
GEMMA: dict[str, Any] = {
    # What scores are divided by the root of: not head_dim.
    "query_pre_attn_scalar": 24,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "initializer_range": 0.3,
}
# Name of the model and configuration classes, and what differs from the base.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, yarn by mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False, "beta_fast": 9}},
    ),
    "llama, longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama, proportional rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    ),
    "llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows above": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied, biases, windows by layer": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma2, no caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window_pattern": 3}),
    "gemma3, scaled": (
        "Gemma3",
        GEMMA
        | {
            "final_logit_softcapping": 7.0,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3 within another model": ("Gemma3Conditional", GEMMA | {"sliding_window_pattern": 2}),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, window, one tensor for all experts": ("Mixtral", MIXTRAL | {"sliding_window": WINDOW}),
    "qwen3 moe": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, some layers dense": (
        "Qwen3Moe",
        QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3 moe, window, one tensor for all experts": (
        "Qwen3Moe",
        QWEN3_MOE | {"use_sliding_window": True, "sliding_window": WINDOW},
    ),
}


def make_model(name: str, fields: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    fields = BASE | fields
    if name == "Gemma3Conditional":
        vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**fields).to_dict(),
            vision_config=vision | {"hidden_size": 32, "intermediate_size": 32},
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    model_class: Any = getattr(transformers, f"{name}ForCausalLM")
    return model_class(getattr(transformers, config_name)(**fields))


def randomize(model: Any) -> None:
    """Give all that starts as zeros or ones something to tell it by."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name and name.endswith("weight"):
                middle = 0.0 if "Gemma" in type(model).__name__ else 1.0
                parameter.uniform_(middle - 0.5, middle + 0.5)
            elif name.endswith("gate.weight"):
                parameter.normal_(0.0, 0.2)


@dataclass(frozen=True)
class Checkpoint:
    """A folder in Hugging Face's layout, the same model in transformers, and that in float32 arithmetic."""

    folder: Path
    model: Any
    exact: Any

    def logits(self, token_ids: list[int], *, exact: bool = False) -> torch.Tensor:
        """float32 [tokens, vocab]: the reference's logits after each token."""
        model = self.exact if exact else self.model
        with torch.inference_mode():
            output: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
        return output

    def kv_bytes(self, num_blocks: int, block_size: int = 16) -> int:
        """Memory that a KV cache of so many blocks, the null block included, takes."""
        config: Any = self.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        return int(num_blocks * block_size * per_token * self.model.dtype.itemsize)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that transformers generates. The mask keeps it from taking some for padding."""
        token_ids = torch.tensor([prompt])
        generated = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = generated[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """checkpoint(shape, dtype): one of SHAPES, made once per session; with **fields, a variation of it."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made: dict[tuple[str, str, str], Checkpoint] = {}

    def make(shape: str, dtype: str = "float32", **fields: Any) -> Checkpoint:
        key = (shape, dtype, json.dumps(fields, sort_keys=True))
        if key not in made:
            torch.manual_seed(sorted(SHAPES).index(shape))
            name, own = SHAPES[shape]
            model = make_model(name, own | fields).to(getattr(torch, dtype)).eval()
            randomize(model)
            folder = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(folder, save_original_format="one tensor" not in shape)
            # Read again: turning a model into bfloat16 would do it to its rotary frequencies too.
            model, exact = (
                type(model).from_pretrained(folder, dtype=getattr(torch, one)).eval()
                for one in (dtype, "float32")
            )
            made[key] = Checkpoint(folder, model, exact)
        return made[key]

    return make


class EngineDriver:
    """An engine, stepped to the end of its work with all invariants checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, request_id: str, prompt: Iterable[int], **sampling: Any) -> None:
        now = time.monotonic()
        sampling = {"temperature": 0.0} | sampling
        self.engine.add_request(Request(request_id, tuple(prompt), SamplingParams(**sampling), now), now)
        self.outputs[request_id] = []

    def step(self) -> None:
        outputs = self.engine.step(time.monotonic()).outputs
        self.engine.check_integrity()
        for one in outputs:
            self.outputs[one.request_id].append(one)

    def run(self, max_steps: int = 10000) -> None:
        while self.engine.has_work:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [token for one in self.outputs[request_id] for token in one.token_ids]

    def counter(self, name: str) -> int:
        return self.metrics.snapshot().counters[name]


@pytest.fixture(scope="session")
def start_engine() -> Callable[..., EngineDriver]:
    """start_engine(folder, **changes of the config): a small engine."""

    def start(folder: Path, **changes: Any) -> EngineDriver:
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=256,
            block_size=16,
            kv_cache_memory_bytes=64 * 2**20,
            envelope=Envelope(16, 256),
            limits=Limits(16, 256),
            max_waiting=100,
            num_threads=1,
        )
        return EngineDriver(replace(config, **changes))

    return start


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(seed, lengths): token ids."""

    def make(seed: int, lengths: Iterable[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `any_shape` is run for each of SHAPES."""
    if "any_shape" in metafunc.fixturenames:
        metafunc.parametrize("any_shape", SHAPES)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """read(architecture, **fields): what becomes of a config.json; a field given as ... is left out."""

    def read_config(architecture: str, **fields: Any) -> ModelConfig:
        values = {"architectures": [architecture]} | SIZES | fields
        values = {name: value for name, value in values.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_config(tmp_path)

    return read_config
