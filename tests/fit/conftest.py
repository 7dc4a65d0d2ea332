"""Random checkpoints of several architectures, engines over them, and a count of what these really hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.layers.linear import PackedLinear
from headway_runtime.runner import Runner

FIXTURES = Path(__file__).parent / "fixtures"
BASE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, untied": ("Llama", {"tie_word_embeddings": False}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
}


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """write_model(shape, dtype, **fields): its folder, made once per session."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made: dict[str, Path] = {}

    def write(shape: str, dtype: str = "bfloat16", **fields: Any) -> Path:
        key = f"{shape}, {dtype}, {sorted(fields.items())}"
        if key not in made:
            name, own = SHAPES[shape]
            torch.manual_seed(sorted(SHAPES).index(shape))
            config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
            config = getattr(transformers, config_name)(**BASE | own | fields)
            model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, dtype))
            made[key] = tmp_path_factory.mktemp("model")
            model.save_pretrained(made[key])
        return made[key]

    return write


@pytest.fixture(scope="session")
def engine_config() -> Callable[..., EngineConfig]:
    """engine_config(folder, **changes)."""

    def make(folder: Path, **changes: Any) -> EngineConfig:
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=512,
            block_size=16,
            kv_cache_memory_bytes=64 * 2**20,
            envelope=Envelope(64, 1024),
            limits=Limits(64, 1024),
            max_waiting=100,
            num_threads=2,
        )
        return replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def held_bytes() -> Callable[[Any], int]:
    """held_bytes(thing): of the memory behind all tensors that can be reached from it, counted once."""
    return lambda thing: sum(_found(thing).values())


def _found(thing: Any) -> dict[int, int]:
    """By address."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, PackedLinear):
            # oneDNN tells nobody where it is.
            found[id(one)] = one.num_inputs * one.num_outputs * one.weight.itemsize
            left.append(one.bias)
        elif isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            left.extend(one)
        elif type(one).__module__.startswith("headway_runtime"):
            slots = [name for each in type(one).__mro__ for name in getattr(each, "__slots__", ())]
            left.extend(getattr(one, name) for name in slots if hasattr(one, name))
            left.extend(getattr(one, "__dict__", {}).values())
    return found


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """peak_bytes(work): how far PyTorch's own CPU allocations went above where they were."""

    def measure(work: Callable[[], object]) -> int:
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            work()
        results: Any = profile.profiler
        events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
        assert events
        total = peak = 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            total += event.nbytes()
            peak = max(peak, total)
        return peak

    return measure


@pytest.fixture(scope="session")
def start_runner(engine_config: Callable[..., EngineConfig]) -> Callable[..., Runner]:
    return lambda folder, **changes: Runner(engine_config(folder, **changes))


@pytest.fixture(scope="session")
def fixture_folder() -> Callable[[str], Path]:
    """fixture_folder(name): a folder with a published model's config.json and nothing else."""
    return lambda name: FIXTURES / name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `any_shape` is run for each of SHAPES."""
    if "any_shape" in metafunc.fixturenames:
        metafunc.parametrize("any_shape", SHAPES)
