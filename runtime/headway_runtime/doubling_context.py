"""How many tokens one attends to that costs a step as much as two (`prompt_cost`): estimated from the shape.

Operations of a token's products are 2 for each weight, those of its attention 4 for each number of a query
and each token that it attends to, in each layer that attends to all of them. Attention takes about twice as
long for an operation: 1.6 times by our kernels on an H200 (docs/gpu.md), 2.7 by published prompts of Llama
3.1 8B on two A100 (docs/simulate.md), 2.0 by our engine on a CPU (benchmarks/slo/fitted.json). With keys and
values of one byte attention takes 1.85 times as long again (our kernels, H200). Codes in place of weights
make products faster on some devices and leave attention as it is; that is not in it.
"""

from headway_runtime.config import KVCacheDtype
from headway_runtime.memory import num_active_weights
from headway_runtime.model_config import ModelConfig

ATTENTION_SLOWDOWN = 2.0
CODED_KV_SLOWDOWN = 1.85
CODED_KV: tuple[KVCacheDtype, ...] = ("fp8", "fp8_e4m3", "int8")
OPERATIONS_PER_WEIGHT, OPERATIONS_PER_PAIR = 2, 4


def estimated_doubling_context(model: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    """Tokens; 0 where no layer attends to everything, so that what a token costs is bounded."""
    weights = num_active_weights(model) - model.vocab_size * model.hidden_size
    num_layers = sum(layer.window is None for layer in model.layers)
    numbers = num_layers * model.num_attention_heads * model.head_dim
    if not numbers:
        return 0
    slowdown = ATTENTION_SLOWDOWN * (CODED_KV_SLOWDOWN if kv_cache_dtype in CODED_KV else 1.0)
    attention = slowdown * OPERATIONS_PER_PAIR * numbers
    return max(1, round(OPERATIONS_PER_WEIGHT * weights / attention))
