"""Linear layers of a model, made of a checkpoint's tensors. Those that read the same input become one."""

import re
from dataclasses import replace

import torch

from headway_runtime.adapters.adapted_linear import LinearPart
from headway_runtime.adapters.adapter_file import LayerShape
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.layers.weight_cuts import Part
from headway_runtime.models.loader import Weights
from headway_runtime.parallel.share import Range

# Layers that a LoRA adapter may change, below whatever stands before the names of a checkpoint's tensors.
ADAPTABLE = re.compile(r"(?:.*\.)?(layers\.\d+\.(?:self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj)")


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
    bias = None
    if has_bias:
        bias = torch.cat([weights.take(f"{name}.bias", (size,), own[name]) for name, size in outputs.items()])
    places = {
        name: LinearPart(name, LayerShape(num_inputs, size), _slice(own[name], size), slice(0, num_inputs))
        for name, size in outputs.items()
    }
    linear = make_merged_linear(parts, bias, weights.dtype, compresses=weights.compresses)
    return _adapted(weights, linear, places)


def projection_back(
    weights: Weights, name: str, num_outputs: int, num_inputs: int, columns: Range, *, has_bias: bool
) -> AnyLinear:
    """A linear layer of which this rank has the inputs `columns`; its outputs are to be added to others'.

    The first rank's has the bias.
    """
    part = Part() if len(columns) == num_inputs else Part(columns=columns)
    weight = weights.take_linear(name, num_outputs, num_inputs, part)
    bias = weights.take(f"{name}.bias", (num_outputs,)) if has_bias else None
    own_bias = bias if columns.first == 0 else None
    linear = make_merged_linear([weight], own_bias, weights.dtype, compresses=weights.compresses)
    place = LinearPart(
        name, LayerShape(num_inputs, num_outputs), slice(0, num_outputs), _slice(columns, num_inputs)
    )
    return _adapted(weights, linear, {name: place})


def _slice(own: Range | None, size: int) -> slice:
    return slice(0, size) if own is None else slice(own.first, own.last)


def _adapted(weights: Weights, linear: AnyLinear, places: dict[str, LinearPart]) -> AnyLinear:
    """The same product, with what adapters may add to it where they can: not in heads, nor in experts."""
    names = [ADAPTABLE.fullmatch(name) for name in places]
    if weights.adapters is None or None in names:
        return linear
    parts = tuple(
        replace(place, name=name[1])
        for name, place in zip(names, places.values(), strict=True)
        if name is not None
    )
    return weights.adapters.adapted(linear, parts)
