"""Two ranks, real processes with gloo between them, that load one model after another; and engines over them.

Rank 0 is this process. The checkpoints are those of the tests of models and of quantization.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headway_runtime.config import EngineConfig, Envelope, Limits, ParallelConfig
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.parallel import spawn
from headway_runtime.parallel.leader import Leader
from headway_runtime.parallel.started import start_ranks
from headway_runtime.runner import Runner

HERE = Path(__file__).parent


def load_beside(path: str, name: str) -> ModuleType:
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(name, HERE / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


models = load_beside("../models/conftest.py", "parallel_models")
quantization = load_beside("../quantization/conftest.py", "parallel_quantization")
fit = load_beside("../fit/conftest.py", "parallel_fit")
shared_rank = load_beside("shared_rank.py", "parallel_shared_rank")

checkpoint = models.checkpoint
held_bytes = fit.held_bytes
random_prompts = models.random_prompts
packers = quantization.packers
write_checkpoint = quantization.write_checkpoint
change_tensors = quantization.change_tensors
logits_of = quantization.logits_of


@pytest.fixture(scope="session")
def quantized_cases() -> dict[str, Any]:
    """Name: what config.json says, and the packer of the tensors with its arguments."""
    cases: dict[str, Any] = load_beside(
        "../quantization/test_checkpoints.py", "parallel_quantization_cases"
    ).CASES
    return cases


@pytest.fixture(scope="session")
def quantized_architectures() -> ModuleType:
    """CASES, and what writes a checkpoint of one."""
    return load_beside("../quantization/test_architectures.py", "parallel_quantization_architectures")


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="auto",
        load_format="auto",
        max_model_len=256,
        block_size=16,
        kv_cache_memory_bytes=8 * 2**20,
        envelope=Envelope(16, 256),
        limits=Limits(16, 256),
        max_waiting=100,
        num_threads=1,
    )
    return replace(config, **changes)


@pytest.fixture(scope="session")
def engine_config() -> Callable[..., EngineConfig]:
    """engine_config(folder, **changes)."""
    return make_config


@pytest.fixture(scope="session")
def pair() -> Iterator[Any]:
    """A runner of two ranks: pair.load(config) on both, and all else that a runner does."""
    command = spawn.RANK_COMMAND
    spawn.RANK_COMMAND = (sys.executable, str(HERE / "shared_rank.py"))
    try:
        parallel = ParallelConfig(size=2, timeout_seconds=120.0)
        config = make_config(HERE, parallel=parallel)
        leader = Leader(start_ranks(parallel, 1, {}, log_level="warning"), config)
    finally:
        spawn.RANK_COMMAND = command
    yield shared_rank.SharedRunner(leader)
    leader.close()


@pytest.fixture(scope="session")
def pair_driver(pair: Any) -> Callable[..., Any]:
    """pair_driver(folder, **changes): an engine over both ranks, driven as one over a single rank is."""

    def start(folder: Path, **changes: Any) -> Any:
        config = make_config(folder, parallel=ParallelConfig(size=2), **changes)
        pair.load(config)
        driver = models.EngineDriver.__new__(models.EngineDriver)
        driver.metrics, driver.outputs = EngineMetrics(), {}
        driver.engine = engine_over(pair, config, driver.metrics)
        return driver

    return start


def engine_over(runner: Runner, config: EngineConfig, metrics: EngineMetrics) -> EngineCore:
    """An engine whose runner has loaded already."""
    import headway_runtime.engine as engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "open_ranks", lambda *_: runner.ranks)
        patch.setattr(engine, "Runner", lambda *_: runner)
        return EngineCore(config, metrics)


@pytest.fixture(scope="session")
def single_driver() -> Callable[..., Any]:
    """single_driver(folder, **changes): an engine of one rank."""
    return lambda folder, **changes: models.EngineDriver(make_config(folder, **changes))


@pytest.fixture(scope="session")
def logits_on_both(pair: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """logits_on_both(config, token_ids): of one rank and of two, in two chunks, float32 [tokens, vocab]."""

    def compute(config: EngineConfig, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        single = Runner(config)
        pair.load(replace(config, parallel=ParallelConfig(size=2)))
        return all_logits(single, token_ids), all_logits(pair, token_ids)

    return compute


def all_logits(runner: Runner, token_ids: list[int]) -> torch.Tensor:
    from array import array

    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.request import SamplingParams

    table = array("q", range(1, 2 + len(token_ids) // 16))
    middle = len(token_ids) // 2
    found = []
    for start, end in ((0, middle), (middle, len(token_ids))):
        chunk = Chunk("a", token_ids, start, end - start, table, 0, False, SamplingParams())
        found.append(runner.all_logits(Batch((chunk,), 0, end - start)).float().clone())
    return torch.cat(found)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """wait_until(condition, seconds): polls; fails when the time is up."""

    def wait(condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.02)

    return wait
