"""What llm-compressor writes: groups of modules, each with a scheme (`quant_method: compressed-tensors`)."""

import re
from typing import Literal

from headway_runtime.quantization.fields import UNQUANTIZED, Fields
from headway_runtime.quantization.scheme import (
    CheckpointQuantization,
    InputScheme,
    Layout,
    Rule,
    Scheme,
    Strategy,
)

# Formats and the layout that each means.
LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
}
FORMATS = (*LAYOUTS, "mixed-precision")
# What `quantization_status` says of weights that are what they are to be. In older checkpoints, which say
# "frozen", numbers may be codes all the same; the format and each tensor's dtype tell.
FINISHED = ("compressed", "frozen")
# kv_cache_scheme: see `kv_scheme`.
HARMLESS = frozenset(
    {"global_compression_ratio", "kv_cache_scheme", "quant_method", "run_compressed", "version"}
)
HARMLESS_OF_ARGUMENTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
LINEAR = "Linear"
REGULAR_EXPRESSION = "re:"
# Of a target that names a class of modules, not a module.
CLASS_NAME = re.compile(r"[A-Z]\w*")


def read_compressed_tensors(fields: Fields) -> CheckpointQuantization | None:
    """None where only a KV cache is to be quantized."""
    if fields.get("quantization_status", "compressed") not in FINISHED:
        raise fields.error(
            "quantization_status",
            "want 'compressed' or 'frozen'; save the model with save_compressed=True",
        )
    sparsity = fields.object("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        raise sparsity.error("format", f"sparse weights are not supported; {UNQUANTIZED}")
    groups = fields.object("config_groups")
    if fields.get("kv_cache_scheme") is not None and (groups is None or not groups.field_names):
        fields.choice("format", (*FORMATS, "dense"), "dense")
        fields.names("ignore")
        fields.finish(HARMLESS)
        return None
    format_name = fields.choice("format", FORMATS)
    if groups is None or not groups.field_names:
        raise fields.error("config_groups", "want at least one group; correct the model's file")
    rules = [_ignored(fields, name) for name in fields.names("ignore")]
    targeted: list[tuple[int, Rule]] = []
    for name in groups.field_names:
        group = groups.object(name)
        if group is not None:
            targeted += _rules_of_group(group, format_name)
    # A module's own name counts more than a pattern, and that more than a class.
    targeted.sort(key=lambda one: one[0])
    fields.finish(HARMLESS)
    return CheckpointQuantization("compressed-tensors", (*rules, *(rule for _, rule in targeted)))


def _ignored(fields: Fields, name: str) -> Rule:
    if name == LINEAR:
        raise fields.error("ignore", f"{LINEAR!r} leaves nothing quantized; {UNQUANTIZED}")
    return _rule(fields, "ignore", name, None)[1]


def _rules_of_group(group: Fields, format_name: str) -> list[tuple[int, Rule]]:
    own_format = _format_of(group, format_name)
    weights = group.object("weights")
    inputs = group.object("input_activations")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", f"quantized outputs are not supported; {UNQUANTIZED}")
    targets = group.names("targets")
    group.finish(frozenset())
    if weights is None:
        raise group.error("weights", f"inputs alone cannot be quantized; {UNQUANTIZED}")
    scheme = _scheme(weights, inputs, LAYOUTS[own_format])
    return [_rule(group, "targets", target, scheme) for target in targets]


def _format_of(group: Fields, format_name: str) -> str:
    """The format of one group, which may be its own where the model's is mixed."""
    if format_name != "mixed-precision" and group.get("format") is None:
        return format_name
    return group.choice("format", tuple(LAYOUTS))


def _rule(fields: Fields, field: str, target: str, scheme: Scheme | None) -> tuple[int, Rule]:
    """Its rank and itself."""
    if target == LINEAR:
        return 2, Rule(re.compile(""), scheme)
    if target.startswith(REGULAR_EXPRESSION):
        return 1, Rule(fields.pattern(field, target.removeprefix(REGULAR_EXPRESSION)), scheme)
    if CLASS_NAME.fullmatch(target):
        if scheme is None:  # other classes than Linear are not quantized anyway
            return 2, Rule(re.compile(r"(?!)"), None)
        raise fields.error(field, f"{target!r}: only layers of the class {LINEAR!r} may be quantized")
    return 0, Rule(re.compile(re.escape(target)), scheme, is_whole=True)


def _scheme(weights: Fields, inputs: Fields | None, layout: Layout) -> Scheme:
    if weights.boolean("dynamic", default=False):
        raise weights.error("dynamic", "weights have fixed scales; correct the model's file")
    is_float = weights.choice("type", ("int", "float"), "int") == "float"
    bits: Literal[4, 8] = weights.choice("num_bits", (8,) if is_float else (4, 8))
    if is_float and layout == "packed":
        raise weights.error("type", "packed weights are integers; correct the model's file")
    is_symmetric = weights.boolean("symmetric", default=True)
    if is_float and not is_symmetric:
        raise weights.error("symmetric", f"FP8 weights have no zero points; {UNQUANTIZED}")
    group_size = None if weights.get("group_size") is None else weights.group_size("group_size")
    strategy: Strategy = weights.choice(
        "strategy", ("tensor", "channel", "group", "block"), "tensor" if group_size is None else "group"
    )
    block = weights.block("block_structure")
    if strategy == "group" and group_size is None:
        strategy = "channel"
    if strategy == "block" and (block is None or not is_float):
        raise weights.error(
            "block_structure", f"blocks are supported of FP8 alone, with rows and columns; {UNQUANTIZED}"
        )
    order = weights.get("actorder", False)
    if order not in (False, "weight", "static", "group", "dynamic"):
        raise weights.error("actorder", f"supported are 'weight' and 'group'; {UNQUANTIZED}")
    weights.finish(HARMLESS_OF_ARGUMENTS)
    scheme_of_input = None if inputs is None else _input_scheme(inputs, is_float=is_float, bits=bits)
    scheme = Scheme(
        layout,
        bits,
        strategy,
        is_float=is_float,
        group_size=group_size if strategy == "group" else None,
        block=block if strategy == "block" else None,
        is_symmetric=is_symmetric,
        has_input_order=order in ("group", "dynamic"),
        input=None if is_float else scheme_of_input,
        has_input_scale=is_float and scheme_of_input is not None and not scheme_of_input.is_dynamic,
    )
    if scheme.input is not None and (scheme.layout == "packed" or scheme.form != "int8"):
        raise weights.error(
            "strategy",
            "8-bit inputs are supported with symmetric weights per 'channel' or 'tensor' that are not "
            "packed; quantize the model anew so",
        )
    return scheme


def _input_scheme(inputs: Fields, *, is_float: bool, bits: int) -> InputScheme:
    inputs.choice("type", ("float",) if is_float else ("int",), "int")
    inputs.choice("num_bits", (8,))
    if bits == 4:
        raise inputs.error("num_bits", f"4-bit weights are supported with plain inputs alone; {UNQUANTIZED}")
    is_dynamic = inputs.boolean("dynamic", default=False)
    strategies = ("token", "tensor", "group") if is_float else ("token", "tensor")
    strategy = inputs.choice("strategy", strategies, "token" if is_dynamic else "tensor")
    if not is_float and is_dynamic != (strategy == "token"):
        raise inputs.error(
            "strategy",
            "dynamic scales are supported per 'token', static ones per 'tensor'; quantize it anew so",
        )
    is_symmetric = inputs.boolean("symmetric", default=True)
    inputs.get("group_size")  # of FP8 inputs, which are not quantized here
    inputs.get("block_structure")
    inputs.get("actorder")
    inputs.finish(HARMLESS_OF_ARGUMENTS)
    return InputScheme(is_dynamic, is_symmetric)
