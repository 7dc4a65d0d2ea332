"""Puts a model and its KV cache on the device: the served one, and the one that guesses for it."""

from collections.abc import Hashable
from pathlib import Path

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank, base_of
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.placement import one_rank
from headway_runtime.layers.attention import KVCache, KVShape
from headway_runtime.layers.cpu_kernels import is_compressed
from headway_runtime.layers.kv_numbers import kept_dtype
from headway_runtime.layers.linear import PackedLinear
from headway_runtime.layers.quantized_linear import SideBySideLinear
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.decoder import Decoder
from headway_runtime.models.loader import CheckpointWeights, DummyWeights, Weights
from headway_runtime.models.model import Model
from headway_runtime.models.taped_layers import Situation
from headway_runtime.parallel.ranks import Ranks
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup
from headway_runtime.quantization.choice import Quantization
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.step_inputs import StepInputBuilder

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup = ALONE,
    adapters: AdapterBank | None = None,
    timeline: StartTimeline | None = None,
) -> Model:
    """This rank's share of it. ModelLoadError if the checkpoint does not fit its config.

    adapters: takes the products that they can change. timeline: is told of the stages of the load.
    """
    weights: Weights
    compresses = config.weight_compression == "auto"
    if config.load_format == "dummy":
        weights = DummyWeights(config.seed, dtype, device, quantization, adapters, compresses=compresses)
    else:
        weights = CheckpointWeights(folder, dtype, device, quantization, adapters, compresses=compresses)
    num_positions = min(config.max_model_len, model_config.longest_context)
    situation: Situation | None = None
    if device.type == "cpu" and not config.enforce_eager:
        situation = _always if adapters is None else adapters.situation
    model = Decoder(model_config, weights, num_positions, dtype, device, group, situation=situation)
    if timeline is not None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        weights.tell(timeline)
    return model


def _always() -> tuple[Hashable, object]:
    """The situation of a model without adapters."""
    return None, None


def compression_of(model: Model) -> str:
    """How plain weights of its products are kept: "12-bit" where products read some of them so, or "none"."""
    layers = [base_of(linear) for linear in model.linears]
    parts = [part for one in layers for part in (one.layers if isinstance(one, SideBySideLinear) else [one])]
    return "12-bit" if any(is_compressed(base_of(part)) for part in parts) else "none"


def own_share(model_config: ModelConfig, num_ranks: int) -> ModelConfig:
    """What each of so many ranks has of a model. ConfigError for a number that cannot share it."""
    return one_rank(model_config, num_ranks)


def make_cache(
    model: Model,
    model_config: ModelConfig,
    config: EngineConfig,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """model_config: of this rank's share. num_blocks: without the null block."""
    shape = KVShape(
        model_config.num_layers,
        num_blocks + 1,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
    )
    num_groups = model_config.num_attention_heads // shape.num_kv_heads
    kept = kept_dtype(config.kv_cache_dtype, dtype)
    return KVCache(shape, num_groups, dtype, device, model.attention_layers, kept)


def make_inputs(
    model: Model, config: EngineConfig, cache: KVCache, dtype: torch.dtype, device: torch.device
) -> StepInputBuilder:
    """What turns batches into that model's tensors."""
    rounds = any(isinstance(base_of(linear), PackedLinear) for linear in model.linears)
    return StepInputBuilder(config, cache, dtype, device, rounds=rounds)


def open_device(config: EngineConfig, ranks: Ranks) -> torch.device:
    """Where this rank computes, with how many threads. ConfigError for a device that is not there."""
    torch.set_num_threads(config.num_threads)
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': PyTorch finds no CUDA device; use --device cpu")
    if ranks.size > 1:
        if ranks.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size={ranks.size!r}: rank {ranks.rank} needs GPU {ranks.local_rank} of "
                f"this node, where PyTorch finds {torch.cuda.device_count()}; give each rank of it a GPU"
            )
        torch.cuda.set_device(ranks.local_rank)
    # With an index, as tensors report it.
    return torch.device("cuda", torch.cuda.current_device())


def use_in_this_thread(device: torch.device) -> None:
    """Have what the calling thread launches go there: CUDA keeps a device for each thread, GPU 0 at first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def check_lengths(config: EngineConfig, model: ModelConfig) -> None:
    """ConfigError for sequences longer than the model's."""
    if config.max_model_len > model.longest_context:
        raise ConfigError(
            f"max_model_len={config.max_model_len!r} is more than the model's "
            f"{model.told_longest_context}; ask for at most that"
        )
