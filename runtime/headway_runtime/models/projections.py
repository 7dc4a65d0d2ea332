"""Linear layers of a model, made of a checkpoint's tensors. Those that read the same input become one."""

import torch

from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.models.loader import Weights


def projection(weights: Weights, outputs: dict[str, int], num_inputs: int, *, has_bias: bool) -> AnyLinear:
    """One linear layer of several that read the same input. outputs: name and number of outputs of each."""
    parts = [weights.take_linear(name, size, num_inputs) for name, size in outputs.items()]
    if not has_bias:
        return make_merged_linear(parts, None, weights.dtype)
    bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in outputs.items()])
    return make_merged_linear(parts, bias, weights.dtype)
