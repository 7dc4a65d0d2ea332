"""Bytes of LoRA adapters: what an engine keeps free for as many as it may hold, each as large as may be.

As `adapters.adapted_linear` holds them, in the model's dtype: two matrices for each attention and MLP layer,
none for experts. Tests hold this against the engine's own count.
"""

from headway_runtime.fit.placement import Placement
from headway_runtime.model_config import ModelConfig

# CPU kernels fill ranks up to a multiple of this.
CPU_RANKS_AT_ONCE = 4


def adapter_bytes(model: ModelConfig, rank: int, placement: Placement) -> int:
    """Of one adapter that changes all layers. model: a rank's share of it, if several share it."""
    hidden, head_dim = model.hidden_size, model.head_dim
    query, kv = model.num_attention_heads * head_dim, model.num_kv_heads * head_dim
    attention = 3 * hidden + query + 2 * kv + query + hidden
    mlp = 2 * hidden + 2 * model.intermediate_size + model.intermediate_size + hidden
    numbers = sum(attention + (0 if layer.has_experts else mlp) for layer in model.layers)
    if placement.is_cpu:
        rank = -(-rank // CPU_RANKS_AT_ONCE) * CPU_RANKS_AT_ONCE
    return rank * numbers * placement.number_bytes
