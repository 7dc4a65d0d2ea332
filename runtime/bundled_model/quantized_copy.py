"""Writes a copy of a bundled model with FP8 weights, whole or with a scale that is wrong.

    python -m bundled_model.quantized_copy FOLDER
    python -m bundled_model.quantized_copy FOLDER --break model.layers.1.mlp.down_proj=3

The layout is llm-compressor's: one scale for each output, in float32. `--break MODULE=FACTOR` multiplies all
scales of one module, as a tool does that mixes up a scale and its inverse, or two layers: the checkpoint
loads, answers, and answers worse. It is what a gate on quality must catch.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headway_runtime.sources import BUNDLED_FOLDER

DEFAULT_NAME = "headway-tiny"
SUFFIX = "_proj.weight"


def write_fp8_copy(
    folder: Path, scale_factors: Mapping[str, float] | None = None, name: str = DEFAULT_NAME
) -> None:
    """scale_factors: by module, what its scales are multiplied by. ValueError for a module there is not."""
    tensors = load_file(BUNDLED_FOLDER / name / "model.safetensors")
    modules = [one.removesuffix(".weight") for one in tensors if one.endswith(SUFFIX)]
    factors = dict.fromkeys(modules, 1.0) | dict(scale_factors or {})
    if unknown := sorted(factors.keys() - set(modules)):
        raise ValueError(f"{unknown[0]!r} is no module of {name}; write one of {', '.join(modules)}")
    for module, factor in factors.items():
        weight = tensors[f"{module}.weight"].float()
        scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        # In float64: a factor may be larger than what a scale can become.
        tensors[f"{module}.weight_scale"] = (scale.double() * factor).float()
    shutil.copytree(BUNDLED_FOLDER / name, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _factor(text: str) -> tuple[str, float]:
    module, _, factor = text.partition("=")
    try:
        return module, float(factor)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE=FACTOR") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument(
        "--break", dest="broken", type=_factor, action="append", default=[], metavar="MODULE=FACTOR"
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="of the bundled model (default %(default)s)")
    options = parser.parse_args()
    write_fp8_copy(options.folder, dict(options.broken), options.name)


if __name__ == "__main__":
    main()
