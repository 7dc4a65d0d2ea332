"""The engine's final configuration: what was left to choose by the device, chosen in the engine process.

Imports torch, so only the engine process may import this.
"""

from typing import get_args

import torch

from headway_runtime.config import (
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    MemoryCheck,
    ParallelConfig,
    WeightCompression,
)
from headway_runtime.engine_options import EngineOptions
from headway_runtime.errors import ConfigError


def resolve_engine_config(options: EngineOptions) -> EngineConfig:
    """ConfigError if the wanted device is not there."""
    device = _device(options.device)
    _check_gpus(device, options.parallel)
    assert options.dtype in get_args(Dtype)
    assert options.load_format in get_args(LoadFormat)
    assert options.kv_cache_dtype in get_args(KVCacheDtype)
    assert options.memory_check in get_args(MemoryCheck)
    assert options.weight_compression in get_args(WeightCompression)
    return EngineConfig(
        model_path=options.model_path,
        device=device,
        dtype=options.dtype,  # type: ignore[arg-type]
        load_format=options.load_format,  # type: ignore[arg-type]
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        envelope=options.gpu_envelope if device == "cuda" else options.envelope,
        limits=options.gpu_limits if device == "cuda" else options.limits,
        max_waiting=options.max_waiting,
        num_threads=options.num_threads,
        long_prefill_share=options.long_prefill_share,
        prefill_doubling_context=options.prefill_doubling_context,
        priority_ageing_seconds=options.priority_ageing_seconds,
        late_yield_seconds=options.late_yield_seconds,
        weight_compression=options.weight_compression,  # type: ignore[arg-type]
        memory_check=options.memory_check,  # type: ignore[arg-type]
        kv_cache_dtype=options.kv_cache_dtype,  # type: ignore[arg-type]
        enable_prefix_caching=options.enable_prefix_caching,
        structured_output_timeout_seconds=options.structured_output_timeout_seconds,
        speculative=options.speculative,
        lora=options.lora,
        offload=options.offload,
        seed=options.seed,
        parallel=options.parallel,
        enforce_eager=options.enforce_eager,
        cuda_graph_sizes=options.cuda_graph_sizes,
        overlap=options.overlap,
    )


def _device(wanted: str) -> Device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device='cuda': torch finds no CUDA device here; use --device cpu or auto")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def _check_gpus(device: Device, parallel: ParallelConfig) -> None:
    """ConfigError for fewer than this node's ranks need, one each."""
    if device != "cuda" or parallel.size == 1:
        return
    num_gpus, needed = torch.cuda.device_count(), parallel.ranks_per_node
    if num_gpus < needed:
        share = f" on each of {parallel.num_nodes} nodes" if parallel.num_nodes > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size={parallel.size}: {needed} GPUs are needed{share}, one for each rank, "
            f"and torch finds {num_gpus} here; lower it, or give the process more GPUs (CUDA_VISIBLE_DEVICES)"
        )
