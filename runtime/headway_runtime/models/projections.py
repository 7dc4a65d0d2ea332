"""Linear layers of a model, made of a checkpoint's tensors. Those that read the same input become one."""

import torch

from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.layers.weight_cuts import Part
from headway_runtime.models.loader import Weights
from headway_runtime.parallel.share import Range


def projection(
    weights: Weights,
    outputs: dict[str, int],
    num_inputs: int,
    *,
    has_bias: bool,
    rows: dict[str, Range] | None = None,
) -> AnyLinear:
    """One linear layer of several that read the same input. outputs: name and number of outputs of each.

    rows: the outputs that this rank computes, of each; None: all of them.
    """
    own = {name: None if rows is None else rows[name] for name in outputs}
    parts = [
        weights.take_linear(name, size, num_inputs, Part(rows=own[name])) for name, size in outputs.items()
    ]
    if not has_bias:
        return make_merged_linear(parts, None, weights.dtype)
    bias = torch.cat([weights.take(f"{name}.bias", (size,), own[name]) for name, size in outputs.items()])
    return make_merged_linear(parts, bias, weights.dtype)


def projection_back(
    weights: Weights, name: str, num_outputs: int, num_inputs: int, columns: Range, *, has_bias: bool
) -> AnyLinear:
    """A linear layer of which this rank has the inputs `columns`; its outputs are to be added to others'.

    The first rank's has the bias.
    """
    part = Part() if len(columns) == num_inputs else Part(columns=columns)
    weight = weights.take_linear(name, num_outputs, num_inputs, part)
    bias = weights.take(f"{name}.bias", (num_outputs,)) if has_bias else None
    return make_merged_linear([weight], bias if columns.first == 0 else None, weights.dtype)
