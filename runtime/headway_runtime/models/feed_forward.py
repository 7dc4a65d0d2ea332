"""The second half of one decoder layer, made of a checkpoint's tensors: a gated MLP, or a mixture of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from headway_runtime.layers.experts import Experts, GatedMLP
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.linear import make_linear
from headway_runtime.model_config import ModelConfig
from headway_runtime.model_config_layers import ExpertsConfig
from headway_runtime.models.loader import Weights
from headway_runtime.models.projections import projection, projection_back
from headway_runtime.models.stored_weights import WEIGHT_NAMES
from headway_runtime.parallel.share import Share

# So many rows go through an MLP at once on a CPU: its wide middle then stays in the processor's cache, and
# they are enough for products at full speed.
CPU_MLP_ROWS = 256

# Names of an expert's projections: gate, up and down.
QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")


def feed_forward(
    name: str,
    index: int,
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    share: Share,
) -> GatedMLP | Experts:
    """name: of a layer's MLP. A mixture's router is kept plain: it is small, and it decides.

    share: of the middle of each MLP, what this rank has; what the result computes is to be added up with
    others'.
    """
    if config.layers[index].has_experts:
        return _experts(name, config, weights, dtype, device, share)
    middle = share.of(config.intermediate_size)
    gate = Gate(config.activation, len(middle), dtype, device)
    return _mlp(name, QWEN_NAMES, config.intermediate_size, config, weights, gate, share)


def in_pieces(hidden: Tensor, delta: Tensor, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """work(hidden, delta), of as many rows at once as are fast here; its result may lie in `delta`."""
    if hidden.device.type != "cpu" or len(hidden) <= CPU_MLP_ROWS:
        return work(hidden, delta)
    pieces = zip(torch.split(hidden, CPU_MLP_ROWS), torch.split(delta, CPU_MLP_ROWS), strict=True)
    for rows, deltas in pieces:
        deltas.copy_(work(rows, deltas))
    return delta


def _mlp(
    name: str,
    names: tuple[str, str, str],
    size: int,
    config: ModelConfig,
    weights: Weights,
    gate: Gate,
    share: Share,
) -> GatedMLP:
    gate_name, up_name, down_name = (f"{name}.{one}" for one in names)
    hidden, has_bias, middle = config.hidden_size, config.has_mlp_bias, share.of(size)
    gate_up = projection(
        weights,
        {gate_name: size, up_name: size},
        hidden,
        has_bias=has_bias,
        rows={gate_name: middle, up_name: middle} if share.size > 1 else None,
    )
    down = projection_back(weights, down_name, hidden, size, middle, has_bias=has_bias)
    return GatedMLP(gate_up, gate, down)


def _experts(
    name: str,
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    share: Share,
) -> Experts:
    """Mixtral's own names are `block_sparse_moe` and w1, w3, w2; transformers 5 may write Qwen's for all."""
    experts = config.experts
    assert experts is not None
    gate = Gate(config.activation, len(share.of(experts.size)), dtype, device)
    mixtral = f"{name.removesuffix('mlp')}block_sparse_moe"
    is_mixtral = config.architecture == "MixtralForCausalLM"
    if is_mixtral and not any(f"{name}.gate.{own}" in weights.names() for own in WEIGHT_NAMES.values()):
        name = mixtral
    names = MIXTRAL_NAMES if is_mixtral else QWEN_NAMES
    weight = weights.take_plain(f"{name}.gate", experts.num_experts, config.hidden_size)
    router = make_linear([weight], compresses=weights.compresses)
    if f"{name}.experts.gate_up_proj" in weights.names():
        _unfuse(f"{name}.experts", names, config, experts, weights)
    mlps = [
        _mlp(f"{name}.experts.{number}", names, experts.size, config, weights, gate, share)
        for number in range(experts.num_experts)
    ]
    return Experts(router, mlps, experts.num_used, dtype, device, normalizes=experts.normalizes)


def _unfuse(
    name: str, names: tuple[str, str, str], config: ModelConfig, experts: ExpertsConfig, weights: Weights
) -> None:
    """All experts' tensors in one, as transformers 5 holds them, under the names of each."""
    number, size, hidden = experts.num_experts, experts.size, config.hidden_size
    gate_up = weights.take(f"{name}.gate_up_proj", (number, 2 * size, hidden))
    down = weights.take(f"{name}.down_proj", (number, hidden, size))
    for index, (own_gate_up, own_down) in enumerate(zip(gate_up, down, strict=True)):
        for one, tensor in zip(names, (*own_gate_up.split(size), own_down), strict=True):
            weights.put(f"{name}.{index}.{one}.weight", tensor)
