"""Linear layers of a model, made of a checkpoint's tensors. Those that read the same input become one."""

import re

import torch

from headway_runtime.adapters.adapted_linear import LinearPart
from headway_runtime.adapters.adapter_file import LayerShape
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.models.loader import Weights

# Layers that a LoRA adapter may change, below whatever stands before the names of a checkpoint's tensors.
ADAPTABLE = re.compile(r"(?:.*\.)?(layers\.\d+\.(?:self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj)")


def projection(weights: Weights, outputs: dict[str, int], num_inputs: int, *, has_bias: bool) -> AnyLinear:
    """One linear layer of several that read the same input. outputs: name and number of outputs of each."""
    parts = [weights.take_linear(name, size, num_inputs) for name, size in outputs.items()]
    bias = None
    if has_bias:
        bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in outputs.items()])
    return _adapted(weights, make_merged_linear(parts, bias, weights.dtype), outputs, num_inputs)


def _adapted(weights: Weights, linear: AnyLinear, outputs: dict[str, int], num_inputs: int) -> AnyLinear:
    """The same product, with what adapters may add to it where they can: not in heads, nor in experts."""
    names = [ADAPTABLE.fullmatch(name) for name in outputs]
    if weights.adapters is None or None in names:
        return linear
    parts = tuple(
        LinearPart(name[1], LayerShape(num_inputs, size), slice(0, size), slice(0, num_inputs))
        for name, size in zip(names, outputs.values(), strict=True)
        if name is not None
    )
    return weights.adapters.adapted(linear, parts)
