"""Refuses, before anything is loaded, what an engine would only find not to fit once it is.

Counts weights, the least KV cache an engine starts with, one sequence of max_model_len, and the largest step.
What the arithmetic may be wrong by is left to the load, so that nothing that fits is refused.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.config import EngineConfig
from headway_runtime.errors import DoesNotFitError
from headway_runtime.fit.changes import nearest_changes
from headway_runtime.fit.headers import read_headers
from headway_runtime.fit.memory_fit import Fit, LoadedModel, Question, assess
from headway_runtime.fit.placement import Placement, this_processor
from headway_runtime.fit.told import told_bytes
from headway_runtime.memory import CPU_FRACTION, CUDA_FRACTION, num_kv_blocks
from headway_runtime.model_config import ModelConfig, StoredDtype, read_model_config
from headway_runtime.quantization.choice import Quantization, choose_quantization

logger = logging.getLogger(__name__)

# Of the weights: predictions are held to this by tests.
TOLERANCE = 0.05
MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class _Room:
    """kv_cache_memory_bytes: as the user gave it, or None."""

    free_bytes: int
    kv_cache_memory_bytes: int | None
    fraction: float

    def kv_bytes(self, fit: Fit, tolerance: float = 0.0) -> float:
        """For the KV cache, once all else is loaded, with the largest step's memory left to it.

        tolerance: the part of weights and step that may not be needed after all. Negative for a size, given
        by the user, that there is no room for.
        """
        free = self.free_bytes - fit.weight_bytes * (1 - tolerance) - fit.adapter_bytes - fit.offload_bytes
        beside_step = free - fit.step.total * (1 - tolerance)
        if self.kv_cache_memory_bytes is None:
            return min(free * self.fraction, beside_step)
        return self.kv_cache_memory_bytes if self.kv_cache_memory_bytes <= beside_step else -1

    def holds(self, fit: Fit, tolerance: float = 0.0) -> bool:
        return self.kv_bytes(fit, tolerance) >= fit.least_kv_bytes


def refuse_what_cannot_fit(
    config: EngineConfig,
    model: ModelConfig,
    quantization: Quantization,
    dtype: StoredDtype,
    free_bytes: int,
    *,
    num_multiprocessors: int = 0,
) -> Fit:
    """The arithmetic; DoesNotFitError with it and the nearest changes for what cannot fit, or a warning.

    ConfigError for a size of the KV cache, given by the user, that one sequence does not fit into.

    free_bytes: of the device, before any load. num_multiprocessors: see `Placement`.
    """
    is_cpu = config.device == "cpu"
    placement = (
        this_processor(dtype, config.num_threads, config.weight_compression)
        if is_cpu
        else Placement(is_cpu, dtype, num_multiprocessors=num_multiprocessors)
    )
    fit = assess(_question(config, model, quantization, placement, free_bytes))
    given = config.kv_cache_memory_bytes
    if given is not None:
        # Too little for one sequence however much there is.
        num_kv_blocks(
            kv_cache_memory_bytes=given,
            bytes_per_token=fit.token_bytes,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )
    room = _Room(free_bytes, given, CPU_FRACTION if is_cpu else CUDA_FRACTION)
    if not room.holds(fit, TOLERANCE):
        if config.memory_check == "enforce":
            raise DoesNotFitError(_message(config, fit, room))
        logger.warning("%s; --memory-check warn: it is tried", _message(config, fit, room))
    return fit


def _question(
    config: EngineConfig,
    model: ModelConfig,
    quantization: Quantization,
    placement: Placement,
    free_bytes: int,
) -> Question:
    speculative = config.speculative
    draft: LoadedModel | None = None
    if speculative is not None and speculative.model_path is not None:
        folder = Path(speculative.model_path)
        draft = _loaded(config, folder, read_model_config(folder), choose_quantization("auto", folder))
    return Question(
        model=_loaded(config, Path(config.model_path), model, quantization),
        placement=placement,
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.envelope.max_num_seqs,
        max_num_batched_tokens=config.envelope.max_num_batched_tokens,
        context=config.max_model_len,
        num_sequences=1,
        memory_bytes=free_bytes,
        overhead_bytes=0,  # is taken already
        block_size=config.block_size,
        num_ranks=config.parallel.size,
        num_speculative_tokens=config.envelope.num_speculative_tokens,
        draft=draft,
        num_adapters=0 if config.lora is None else config.lora.max_cpu_loras,
        adapter_rank=0 if config.lora is None else config.lora.max_lora_rank,
        # A CPU's is no more free already.
        offload_bytes=config.offload.host_memory_bytes if config.offload and config.device == "cuda" else 0,
    )


def _loaded(
    config: EngineConfig, folder: Path, model: ModelConfig, quantization: Quantization
) -> LoadedModel:
    """Files are only looked into where they decide what is quantized."""
    headers = None
    if quantization.stored is not None and config.load_format != "dummy":
        headers = read_headers(folder)
    return LoadedModel(model, quantization, frozenset() if headers is None else headers.plain_modules)


def _message(config: EngineConfig, fit: Fit, room: _Room) -> str:
    """One line: it may be the last one that is seen of a pod."""
    needed = fit.loaded_bytes + fit.offload_bytes + fit.least_kv_bytes + fit.step.total
    question = fit.question
    name = question.model.quantization.name
    weights = f"weights {told_bytes(fit.weight_bytes)} ({question.placement.dtype}, quantization {name})"
    if fit.adapter_bytes:
        weights += (
            f" + {question.num_adapters} LoRA adapters of rank {question.adapter_rank} "
            f"{told_bytes(fit.adapter_bytes)} (--max-cpu-loras, --max-lora-rank)"
        )
    if fit.offload_bytes:
        weights += f" + KV offload on its way {told_bytes(fit.offload_bytes)} (--kv-offloading-size)"
    least = (
        f"the least KV cache, one sequence of {config.max_model_len} tokens x {fit.token_bytes} B "
        f"({fit.kv_dtype}), {told_bytes(fit.least_kv_bytes)}"
    )
    step = f"the largest step, {fit.step.num_tokens} tokens, {told_bytes(fit.step.total)}"
    ranks = config.parallel.size
    whose = f" for each of {ranks} ranks" if ranks > 1 else ""
    free = f"{told_bytes(room.free_bytes)} of memory are free on device {config.device!r}{whose}"
    if config.offload is not None and config.device == "cpu":
        free += f" beside the {told_bytes(config.offload.host_memory_bytes)} of --kv-offloading-size"
    if needed <= room.free_bytes and room.kv_cache_memory_bytes is not None:
        beside = max(0, room.free_bytes - fit.loaded_bytes - fit.offload_bytes - fit.step.total)
        return (
            f"kv_cache_memory_bytes={room.kv_cache_memory_bytes!r} is more than the {beside} bytes that "
            f"will be free beside {weights} and {step}: {free}; lower --kv-cache-memory-bytes, to no "
            f"less than {fit.least_kv_bytes}, or leave it out to have it chosen"
        )
    changes = _changes(fit)
    if needed > room.free_bytes:
        told = f"the model does not fit: {weights} + {least} + {step} = {told_bytes(needed)}, and {free}"
    else:
        share = told_bytes(max(0.0, room.kv_bytes(fit)))
        told = (
            f"the KV cache does not fit: {weights}, {free}, of what is left the KV cache gets "
            f"{room.fraction:.0%}, {share}, less than {least}"
        )
        changes.insert(0, f"--kv-cache-memory-bytes {fit.least_kv_bytes}")
    near = (
        "; ".join(changes[:MOST_CHANGES]) or "nothing of fewer bits or a shorter context; give it more memory"
    )
    return f"{told}; nearest that fits: {near} (`headway plan` shows all of it)"


def _changes(fit: Fit) -> list[str]:
    """With the largest step counted, too: what is proposed shall run."""
    found = nearest_changes(fit.question, lambda one: one.fits, with_hardware=False)
    return [
        f"{one.flags} (weights {told_bytes(one.fit.weight_bytes)} + KV cache "
        f"{told_bytes(one.fit.least_kv_bytes)})"
        for one in found
    ]
