"""What the tools write into config.json, and a checkpoint's weights as the loader reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.quantization.choice import choose_quantization

CPU = torch.device("cpu")
TOKENS = [int(one) for one in np.random.default_rng(3).integers(0, 64, 40)]
# float32 sums in another order, of inputs of up to hundreds.
TOLERANCE = 5e-4


def awq_config(group_size: int, *, has_zeros: bool = True) -> dict[str, Any]:
    fields = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return fields | {"zero_point": has_zeros}


def gptq_config(
    group_size: int, *, bits: int = 4, has_zeros: bool = False, has_order: bool = False, is_old: bool = True
) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": not has_zeros,
        "desc_act": has_order,
        "checkpoint_format": "gptq" if is_old else "gptq_v2",
        # Who takes 1 off whole words.
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }


def compressed_config(
    format_name: str, inputs: dict[str, Any] | None = None, ignore: list[str] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if ignore is None else ignore,
    }


def int4_groups(group_size: int, *, has_zeros: bool = False, order: str | None = None) -> dict[str, Any]:
    size = {"strategy": "group", "group_size": group_size}
    own = {"strategy": "channel"} if group_size == -1 else size
    return {"num_bits": 4, "type": "int", "symmetric": not has_zeros, "actorder": order} | own


INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def weights_of(folder: Path) -> CheckpointWeights:
    return CheckpointWeights(folder, torch.float32, CPU, choose_quantization("auto", folder))


def dequantized(folder: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    weights = weights_of(folder)
    found = {}
    for module, shape in shapes.items():
        weight = weights.take_linear(module, *shape)
        found[module] = (
            weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
        ).numpy()
    return found
