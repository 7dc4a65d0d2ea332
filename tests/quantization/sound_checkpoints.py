"""Checkpoints that nothing is wrong in, of which bad ones are made: what config.json says, and the packer."""

from typing import Any

AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INPUTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
DOWN = "model.layers.1.mlp.down_proj"


def compressed(
    group: dict[str, Any] | None = None, weights: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    own = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})} | (group or {})
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": own}} | changes


STATIC = INPUTS | {"strategy": "tensor", "dynamic": False}
KINDS: dict[str, tuple[dict[str, Any], str, tuple[Any, ...], dict[str, Any]]] = {
    "gptq": (GPTQ, "gptq", (32,), {}),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, "gptq", (32,), {"is_old": False}),
    # As AutoGPTQ writes them as long as no zero point is 0.
    "gptq zeros": (GPTQ | {"sym": False}, "gptq", (32,), {"has_zeros": True, "least_zero": 1}),
    "gptq order": (GPTQ | {"desc_act": True}, "gptq", (32,), {"has_order": True}),
    "awq": (AWQ, "awq", (32,), {}),
    "packed": (
        compressed(weights={"num_bits": 4, "strategy": "group", "group_size": 32}, format="pack-quantized"),
        "packed",
        (32,),
        {},
    ),
    "integers": (compressed(), "integers", ("channel",), {}),
    "static": (compressed({"input_activations": STATIC}), "integers", ("channel",), {"inputs_scale": 0.1}),
    "float8": (FP8, "float8", ("channel",), {}),
    "float8 blocks": (
        FP8 | {"weight_block_size": [64, 128]},
        "float8",
        ("block",),
        {"scale_name": "weight_scale_inv", "block": (64, 128)},
    ),
}
