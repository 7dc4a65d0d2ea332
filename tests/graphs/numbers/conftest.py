"""Engines whose decode steps are recorded by `Recorder`, on the CPU with interpreted kernels.

Triton decides when it is imported whether it interprets, so these run in processes of their own, as
`TRITON_INTERPRET=1 HEADWAY_KERNELS=triton pytest tests/graphs/numbers`; `test_interpreted.py` does so.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.fast_interpreter import hasten

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.graphs import opening
from headway_runtime.graphs.decode_graphs import DecodeGraphs
from headway_runtime.graphs.recording import Recorder
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, RequestOutput, SamplingParams

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("HEADWAY_KERNELS") == "triton"

if IS_INTERPRETED:
    hasten()

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 330,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """write_model(**changes): a folder with the config.json of a small model."""

    def write(**changes: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPE | changes))
        return folder

    return write


class Driver:
    """An engine of random weights, stepped to the end of its work."""

    def __init__(self, config: EngineConfig, recorder: Recorder) -> None:
        self.recorder = recorder
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.engine._runner.graphs
        assert graphs is not None
        return graphs

    @property
    def num_replays(self) -> int:
        return sum(work.num_replays for work in self.recorder.works)

    def add(self, request_id: str, prompt: list[int], **sampling: Any) -> None:
        now = time.monotonic()
        self.engine.add_request(Request(request_id, tuple(prompt), SamplingParams(**sampling), now), now)
        self.outputs[request_id] = []

    def step(self) -> None:
        for one in self.engine.step(time.monotonic()).outputs:
            assert one.error is None, one.error
            self.outputs[one.request_id].append(one)
        self.engine.check_integrity()

    def record_all(self) -> None:
        """What is recorded while there is nothing else to do."""
        while self.engine.has_idle_work:
            self.engine.work_idly()

    @property
    def num_recorded_steps(self) -> int:
        return self.metrics.snapshot().counters["recorded_steps"]

    @property
    def num_steps(self) -> int:
        return self.metrics.snapshot().counters["steps"]

    def run(self) -> dict[str, list[int]]:
        while self.engine.has_work:
            self.step()
        return {name: [token for one in own for token in one.token_ids] for name, own in self.outputs.items()}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, write_model: Callable[..., Path]) -> Callable[..., Driver]:
    """start(folder=None, **changes of the config): an engine whose decode steps are recorded."""

    def make(folder: Path | None = None, *, recorder: Recorder | None = None, **changes: Any) -> Driver:
        own = recorder or Recorder()
        monkeypatch.setattr(opening, "make_capturer", lambda device: own)
        config = EngineConfig(
            model_path=str(folder or write_model()),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            max_model_len=128,
            block_size=16,
            kv_cache_memory_bytes=1 << 22,
            envelope=Envelope(6, 64),
            limits=Limits(6, 64),
            max_waiting=100,
            num_threads=1,
        )
        return Driver(replace(config, **changes), own)

    return make


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random numbers, whose seed is told by a test that fails."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
