"""How many KV blocks an engine gets of the memory of its device: looks at the device, and asks `memory.py`.

On a GPU the largest steps are run first, and what they took is left to them. On a CPU, whose cache is taken
only as it fills, it is a share of what is free.
"""

import gc
from dataclasses import dataclass

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.memory import (
    CPU_FRACTION,
    DeviceMemory,
    check_free,
    default_kv_cache_memory_bytes,
    free_memory_bytes,
    least_cache_bytes,
    num_kv_blocks,
    usable_cache_bytes,
)
from headway_runtime.model_config import ModelConfig
from headway_runtime.model_loading import make_cache, make_inputs
from headway_runtime.models.model import Model
from headway_runtime.parallel.ranks import Ranks
from headway_runtime.profile_step import CudaMeter, StepBytes, StepProfile, draft_profile
from headway_runtime.speculator import LoadedDraft


@dataclass(frozen=True, slots=True)
class KVBudget:
    """num_blocks: without the null block. graph_bytes: what recorded decode steps may take; None: all."""

    num_blocks: int
    graph_bytes: int | None


def free_bytes_for(device: torch.device, ranks: Ranks, host_memory_bytes: int) -> int:
    """Memory of the device that this rank may still take. ConfigError on a machine that does not tell.

    host_memory_bytes: of main memory, what is set aside for other things.
    """
    if device.type == "cuda":
        return gpu_memory(device)[0]
    # Ranks of one machine share its memory.
    return max(0, free_memory_bytes() // ranks.num_local - host_memory_bytes)


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and all there are.

    What closed engines of this process held is given back before: they lie in cycles, which nobody else may
    collect for long, and PyTorch keeps what it was given.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def adapters_bytes(config: EngineConfig, bank: AdapterBank | None) -> int:
    """Of all adapters that there may be; they come when the cache has taken its share."""
    if config.lora is None or bank is None:
        return 0
    return config.lora.max_cpu_loras * bank.num_bytes(config.lora.max_lora_rank)


def cpu_budget(
    config: EngineConfig, bytes_per_token: int, free_bytes: int | None, reserved: int, step_bytes: int
) -> KVBudget:
    """free_bytes: None for a machine that does not tell; then what the user says is all there is to go by.

    reserved: that others will take. step_bytes: that the largest step will.
    """
    wanted = config.kv_cache_memory_bytes
    if free_bytes is None:
        assert wanted is not None
        free_bytes = wanted
    else:
        free_bytes = max(0, free_bytes - reserved)
    if wanted is None:
        wanted = default_kv_cache_memory_bytes(
            bytes_per_token=bytes_per_token,
            max_num_seqs=config.envelope.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            free_bytes=free_bytes,
            fraction=CPU_FRACTION,
            step_bytes=step_bytes,
        )
    check_free(wanted, free_bytes)
    return KVBudget(_num_blocks(config, bytes_per_token, wanted), None)


def cuda_budget(
    config: EngineConfig,
    bytes_per_token: int,
    step: StepBytes,
    graphs: int,
    adapters: int,
    staging: int,
    device: torch.device,
) -> KVBudget:
    """step: what the largest steps take, by the measurement. graphs: what is set aside for recorded ones.

    staging: the same for blocks on their way to main memory. ConfigError with the arithmetic.
    """
    free, total = gpu_memory(device)
    memory = DeviceMemory(
        total=total,
        free=free,
        weights=int(torch.cuda.memory_allocated(device)),
        step=step.prompts,
        graphs=graphs,
        adapters=adapters,
        staging=staging,
    )
    envelope = config.envelope
    wanted = memory.cache_bytes(
        config.kv_cache_memory_bytes,
        usable=usable_cache_bytes(
            bytes_per_token, envelope.max_num_seqs, config.max_model_len, config.block_size
        ),
        least=least_cache_bytes(bytes_per_token, config.max_model_len, config.block_size),
        max_num_batched_tokens=envelope.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )
    return KVBudget(_num_blocks(config, bytes_per_token, wanted), memory.graphs)


def measured_steps(
    model: Model,
    model_config: ModelConfig,
    config: EngineConfig,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    samples: bool,
    num_recorded_rows: int,
    draft: LoadedDraft | None,
) -> StepBytes:
    """On a GPU. model_config: of this rank's share. draft: the model that guesses, if there is one.

    ConfigError where the steps themselves do not fit.
    """
    cache = make_cache(model, model_config, config, 1, dtype, device)
    inputs = make_inputs(model, config, cache, dtype, device)
    profile = StepProfile(model, cache, inputs, config, vocab_size, device, samples=samples)
    guessing = None if draft is None else draft_profile(draft, config, vocab_size, dtype, device)
    try:
        return profile.measure(num_recorded_rows, CudaMeter(device), guessing)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"the largest step, {config.envelope.max_num_batched_tokens} tokens of "
            f"{config.envelope.max_num_seqs} sequences, does not fit beside the weights: "
            f"{torch.cuda.memory_allocated(device) / 2**30:.2f} GiB of weights, {free / 2**30:.2f} GiB free "
            f"of {total / 2**30:.2f} GiB; lower --max-num-batched-tokens or --max-num-seqs ({error})"
        ) from error


def _num_blocks(config: EngineConfig, bytes_per_token: int, kv_cache_memory_bytes: int) -> int:
    return num_kv_blocks(
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        bytes_per_token=bytes_per_token,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
    )


def host_memory_bytes(config: EngineConfig, ranks: Ranks) -> int:
    """This rank's part of what is set aside for blocks that the KV cache has no room for.

    ConfigError for more than there is.
    """
    if config.offload is None:
        return 0
    wanted = config.offload.host_memory_bytes // ranks.size
    try:
        free_bytes = free_memory_bytes() // ranks.num_local
    except ConfigError:
        return wanted  # a machine that does not tell
    if wanted > free_bytes:
        whose = f" for each of {ranks.size} ranks" if ranks.size > 1 else ""
        raise ConfigError(
            f"--kv-offloading-size={config.offload.host_memory_bytes / 2**30:g}: {wanted} bytes{whose} "
            f"are more than the {free_bytes} of main memory that are free{whose}; lower it"
        )
    return wanted
