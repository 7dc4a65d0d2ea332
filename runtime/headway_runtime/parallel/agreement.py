"""What several nodes must say alike of one engine, and the first difference, for people. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from headway_runtime.checkpoint_digest import told_checkpoint_file
from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.config import Envelope, ParallelConfig
from headway_runtime.errors import ModelLoadError
from headway_runtime.quantization.choice import OLD_FILES


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
    """Plain data, by name. ModelLoadError for files of the model that cannot be read."""
    folder = Path(engine.model_path)
    return {
        "tensor_parallel_size": engine.parallel.size,
        "nnodes": engine.parallel.num_nodes,
        **{f"model's {name} (digest)": _digest(folder / name) for name in ("config.json", *OLD_FILES)},
        **_told_weights(engine, folder),
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


def _digest(path: Path) -> str:
    """Of a small file; "" where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); copy the model again") from error


def _told_weights(engine: EngineWords, folder: Path) -> dict[str, str]:
    """By file, where nodes have their own: weights of equal shapes load on any node, and answer nonsense."""
    if engine.load_format == "dummy" or engine.parallel.num_nodes == 1:
        return {}
    return {f"model's {path.name}": told_checkpoint_file(path) for path in checkpoint_files(folder)}


def difference(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """The first of another node's words that is not rank 0's."""
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            return (
                f"its {name} is {theirs.get(name)!r}, node 0's {ours.get(name)!r}; give all nodes the same "
                "model and flags"
            )
    return None
