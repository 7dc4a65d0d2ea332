"""Whether an engine's decode steps are recorded, of what sizes, and by what."""

import logging
from typing import TYPE_CHECKING

import torch

from headway_runtime.config import EngineConfig
from headway_runtime.graphs.capture import Capturer, CudaCapturer
from headway_runtime.graphs.sizes import ladder, within
from headway_runtime.layers.attention import KVCache
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.models.model import Model

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

# Of each recording, beside the memory that all share: what the driver keeps of its kernels' launches.
BYTES_PER_GRAPH = 8 << 20


def make_capturer(device: torch.device) -> Capturer | None:
    """None for a device that records nothing."""
    return CudaCapturer(device) if device.type == "cuda" else None


def graph_sizes(config: EngineConfig, device: torch.device, num_ranks: int) -> tuple[int, ...]:
    """Ascending; empty where steps run kernel by kernel."""
    if config.enforce_eager or not uses_triton(device):
        return ()
    if num_ranks > 1:
        # Ranks but the first are told of rows, not of how tokens are chosen, so they cannot tell which steps
        # would be recorded ones.
        logger.info("decode steps are not recorded: %d ranks share the model", num_ranks)
        return ()
    most = config.envelope.max_num_seqs
    return ladder(most) if config.cuda_graph_sizes is None else within(config.cuda_graph_sizes, most)


def reserved_bytes(sizes: tuple[int, ...], step_bytes: int) -> int:
    """Memory set aside for all recordings. step_bytes: what a step of the largest size takes at most."""
    return step_bytes + len(sizes) * BYTES_PER_GRAPH if sizes else 0


def open_graphs(
    model: Model,
    cache: KVCache,
    config: EngineConfig,
    sizes: tuple[int, ...],
    vocab_size: int,
    limit_bytes: int | None,
    device: torch.device,
) -> "DecodeGraphs | None":
    """With the first sizes recorded. sizes: of `graph_sizes`."""
    capturer = make_capturer(device) if sizes else None
    if capturer is None:
        return None
    from headway_runtime.graphs.decode_graphs import DecodeGraphs  # imports Triton

    graphs = DecodeGraphs(
        model,
        cache,
        capturer,
        sizes,
        most_sampled=config.envelope.max_num_seqs * (1 + config.envelope.num_speculative_tokens),
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        limit_bytes=limit_bytes,
        device=device,
    )
    graphs.capture_first()
    return graphs
