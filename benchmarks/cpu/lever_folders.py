"""What levers need beside the benchmark's model: an adapter, a draft, quantized copies. Made once."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu.lora import make_adapter
from benchmarks.cpu.model_folder import WEIGHTS_FILE, make_model_folder
from benchmarks.cpu.servers import (
    ADAPTER,
    CHECKPOINTS,
    DRAFT,
    LEVERS,
    adapter_folder,
    checkpoint_folder,
    draft_folder,
)
from safetensors.torch import load_file, save_file

from headway_runtime.layers.quantized_weights import Fp8Weight, Int4Weight
from headway_runtime.layers.quantizer import quantized
from headway_runtime.quantization.choice import Online

ADAPTER_RANK = 16
SUFFIX = "_proj.weight"
FORMATS = {"fp8": "float-quantized", "int4": "pack-quantized"}


def make_for_levers(names: Collection[str], model: Path) -> None:
    """What these peers need of the folder `model`, unless it is there."""
    flags = [flag for name in names for flag in LEVERS.get(name, ())]
    if any(ADAPTER in flag for flag in flags):
        make_adapter(adapter_folder(model), model, rank=ADAPTER_RANK, seed=0)
    if any(DRAFT in flag for flag in flags):
        # The model's own first two layers.
        make_model_folder(draft_folder(model), is_quick=True)
    for kind in (CHECKPOINTS[name] for name in names if name in CHECKPOINTS):
        make_checkpoint(checkpoint_folder(model, kind), model, kind)


def make_checkpoint(folder: Path, model: Path, kind: Online) -> None:
    """A copy of `model` with quantized projections, in the layout of llm-compressor. kind: fp8 or int4."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(model, unfinished, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    tensors = load_file(model / WEIGHTS_FILE)
    group_size: int | None = None
    for name in [one for one in tensors if one.endswith(SUFFIX)]:
        module = name.removesuffix(".weight")
        match quantized(tensors.pop(name), kind):
            case Fp8Weight(codes, scales):
                tensors |= {name: codes, f"{name}_scale": scales[:, None].contiguous()}
            case Int4Weight(codes, scales, _, size):
                group_size = size
                # Codes along inputs, the first in the lowest bits, as they are in memory.
                shape = torch.tensor([len(codes), 2 * codes.shape[1]])
                tensors |= {
                    f"{module}.weight_packed": codes.contiguous().view(torch.int32),
                    f"{module}.weight_scale": scales.half(),
                    f"{module}.weight_shape": shape,
                }
            case other:
                raise AssertionError(f"no checkpoint of {type(other).__name__} is made")
    save_file(tensors, unfinished / WEIGHTS_FILE, {"format": "pt"})
    config = json.loads((unfinished / "config.json").read_bytes())
    config["quantization_config"] = _quantization_config(kind, group_size)
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    unfinished.rename(folder)


def _quantization_config(kind: Online, group_size: int | None) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    if kind == "int4":
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
