"""What several nodes must say alike of one engine, and the first difference, for people. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.config import Envelope, ParallelConfig


class EngineWords(Protocol):
    """An engine's options or its configuration: both have these."""

    @property
    def model_path(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def load_format(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def envelope(self) -> Envelope: ...
    @property
    def seed(self) -> int: ...
    @property
    def parallel(self) -> ParallelConfig: ...


def agreed_words(engine: EngineWords) -> dict[str, object]:
    """Plain data, by name."""
    folder = Path(engine.model_path)
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else ""
    is_dummy = engine.load_format == "dummy"
    files = [] if is_dummy else [(path.name, path.stat().st_size) for path in checkpoint_files(folder)]
    return {
        "model's config.json (digest)": digest,
        "model's weight files": files,
        "tensor_parallel_size": engine.parallel.size,
        "nnodes": engine.parallel.num_nodes,
        "dtype": engine.dtype,
        "load_format": engine.load_format,
        "quantization": engine.quantization,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "kv_cache_dtype": engine.kv_cache_dtype,
        **asdict(engine.envelope),
        "seed": engine.seed,
    }


def difference(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """The first of another node's words that is not rank 0's."""
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            return (
                f"its {name} is {theirs.get(name)!r}, node 0's {ours.get(name)!r}; give all nodes the same "
                "model and flags"
            )
    return None
