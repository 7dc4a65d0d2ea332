"""What several nodes must say alike of one engine, and the first difference, for people. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from headway_runtime.checkpoint_digest import told_checkpoint_file
from headway_runtime.checkpoint_files import checkpoint_files
from headway_runtime.config import (
    Envelope,
    LoraConfig,
    OffloadConfig,
    ParallelConfig,
    SpeculativeConfig,
)
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
    def gpu_envelope(self) -> Envelope: ...
    @property
    def weight_compression(self) -> str: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def speculative(self) -> SpeculativeConfig | None: ...
    @property
    def lora(self) -> LoraConfig | None: ...
    @property
    def offload(self) -> OffloadConfig | None: ...
    @property
    def enforce_eager(self) -> bool: ...
    @property
    def cuda_graph_sizes(self) -> tuple[int, ...] | None: ...
    @property
    def overlap(self) -> bool | None: ...
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
        "max_num_seqs (on a GPU)": engine.gpu_envelope.max_num_seqs,
        "weight_compression": engine.weight_compression,
        "enable_prefix_caching": engine.enable_prefix_caching,
        **_told_speculation(engine.speculative),
        **_told_adapters(engine.lora),
        "kv_offloading_bytes": None if engine.offload is None else engine.offload.host_memory_bytes,
        "enforce_eager": engine.enforce_eager,
        "cuda_graph_sizes": None if engine.cuda_graph_sizes is None else list(engine.cuda_graph_sizes),
        "overlap": engine.overlap,
        "seed": engine.seed,
    }


def _told_speculation(speculative: SpeculativeConfig | None) -> dict[str, object]:
    """Where the draft lies is a node's own business."""
    if speculative is None:
        return {"speculative_config": None}
    told = asdict(speculative) | {"model_path": None}
    return {f"speculative_config's {name}": value for name, value in told.items() if value is not None}


def _told_adapters(lora: LoraConfig | None) -> dict[str, object]:
    """Likewise of adapters."""
    if lora is None:
        return {"enable_lora": False}
    return {
        "enable_lora": True,
        "max_loras": lora.max_loras,
        "max_cpu_loras": lora.max_cpu_loras,
        "max_lora_rank": lora.max_lora_rank,
        "lora_modules": [module.name for module in lora.modules],
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
