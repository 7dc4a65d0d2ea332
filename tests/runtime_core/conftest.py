"""Small random Llama checkpoints, the same models in transformers as the reference, and engines over them."""

import copy
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, RequestOutput, SamplingParams

VOCAB_SIZE = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What differs from the base shape below. head_dim is hidden_size / heads unless given.
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "wide heads": {"head_dim": 32, "num_hidden_layers": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


def generate_greedily(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates. The mask keeps it from taking some of the prompt for padding."""
    token_ids = torch.tensor([prompt])
    generated = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


@dataclass(frozen=True)
class Checkpoint:
    """A folder in Hugging Face's layout, the same model in transformers, and that in float32 arithmetic."""

    folder: Path
    model: LlamaForCausalLM
    exact: LlamaForCausalLM

    def logits(self, token_ids: list[int], *, exact: bool = False) -> torch.Tensor:
        """float32 [tokens, vocab]: the reference's logits after each token."""
        model = self.exact if exact else self.model
        with torch.inference_mode():
            output: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
        return output

    def kv_bytes(self, num_blocks: int, block_size: int = 16) -> int:
        """Memory that a KV cache of so many blocks, the null block included, takes."""
        config: Any = self.model.config
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return int(num_blocks * block_size * per_token * self.model.dtype.itemsize)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that transformers generates."""
        return generate_greedily(self.model, prompt, count)


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown if the test fails
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Checkpoint]:
    """checkpoint(shape, dtype): one of SHAPES with random weights, made once per session."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made: dict[tuple[str, str], Checkpoint] = {}

    def make(shape: str = "gqa", dtype: str = "float32") -> Checkpoint:
        if (shape, dtype) not in made:
            torch.manual_seed(sorted(SHAPES).index(shape))
            base: dict[str, Any] = {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 112,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "tie_word_embeddings": True,
                # Large enough for logits that differ clearly from each other.
                "initializer_range": 0.2,
            }
            model = LlamaForCausalLM(LlamaConfig(**base | SHAPES[shape])).to(getattr(torch, dtype)).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(0.0, 0.2)
                    elif name.endswith("norm.weight"):
                        parameter.uniform_(0.5, 1.5)
            folder = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(folder)
            exact = model if dtype == "float32" else copy.deepcopy(model).float()
            made[shape, dtype] = Checkpoint(folder, model, exact)
        return made[shape, dtype]

    return make


@pytest.fixture(scope="session")
def engine_config(checkpoint: Callable[..., Checkpoint]) -> Callable[..., EngineConfig]:
    """engine_config(folder, **changes): a config for a small engine."""

    def make(folder: Path | None = None, **changes: Any) -> EngineConfig:
        config = EngineConfig(
            model_path=str(folder or checkpoint().folder),
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
        return replace(config, **changes)

    return make


class EngineDriver:
    """An engine, stepped to the end of its work with all invariants checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, request_id: str, prompt: Iterable[int], **sampling: Any) -> None:
        now = time.monotonic()
        self.engine.add_request(Request(request_id, tuple(prompt), SamplingParams(**sampling), now), now)
        self.outputs[request_id] = []

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step(time.monotonic()).outputs
        self.engine.check_integrity()
        for one in outputs:
            seen = self.outputs[one.request_id]
            assert not seen or seen[-1].finish_reason is None, "output after the terminal one"
            seen.append(one)
        return outputs

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
def start_engine(engine_config: Callable[..., EngineConfig]) -> Callable[..., EngineDriver]:
    """start_engine(folder, **changes of the config)."""

    def start(folder: Path | None = None, **changes: Any) -> EngineDriver:
        return EngineDriver(engine_config(folder, **changes))

    return start


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """write_config(**changes): a folder with the config.json of a small Llama; None removes a field."""

    def write(**changes: Any) -> Path:
        fields: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "dtype": "float32",
        }
        fields = {name: value for name, value in (fields | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(seed, lengths): token ids."""

    def make(seed: int, lengths: Iterable[int], vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]

    return make


@pytest.fixture(scope="session")
def transformers_greedy() -> Callable[[Any, list[int], int], list[int]]:
    """transformers_greedy(model, prompt, count): what any causal model of transformers generates."""
    return generate_greedily
