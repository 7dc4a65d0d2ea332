"""Tensors that tools leave in a checkpoint and that no model needs: passed over where they say nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway_runtime.errors import ModelLoadError
from headway_runtime.models.loader import CheckpointWeights


def compressed_config(format_name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("config", "packer", "zeros"),
    [
        pytest.param(
            compressed_config("int-quantized", type="int", strategy="channel"),
            ("integers", "channel"),
            torch.zeros((256, 1), dtype=torch.int8),
            id="int8",
        ),
        pytest.param(
            compressed_config("float-quantized", type="float", strategy="tensor"),
            ("float8", "tensor"),
            torch.zeros(1).to(torch.float8_e4m3fn),
            id="fp8",
        ),
    ],
)
def test_zero_points_of_zeros_are_passed_over_and_others_are_not(
    config: dict[str, Any],
    packer: tuple[str, str],
    zeros: torch.Tensor,
    write_checkpoint: Any,
    packers: Any,
    change_tensors: Any,
    start_runner: Any,
) -> None:
    """Old llm-compressor wrote some for symmetric weights."""
    written = write_checkpoint(config, packers[packer[0]](packer[1]))
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    left_over = {name: zeros, "model.layers.1.mlp.up_proj.input_zero_point": torch.zeros(1).to(zeros.dtype)}
    change_tensors(written.folder, lambda tensors: tensors.update(left_over))
    start_runner(written.folder)
    change_tensors(
        written.folder, lambda tensors: tensors.update({name: (zeros.float() + 1).to(zeros.dtype)})
    )
    with pytest.raises(ModelLoadError, match=rf"1 tensors .* no place in this model, first '{name}'"):
        start_runner(written.folder)


@pytest.mark.parametrize("prefix", ["model", "language_model.model", "model.language_model"])
def test_what_kv_caches_find_by_themselves_is_passed_over_wherever_the_text_model_lies(
    prefix: str, tmp_path: Path
) -> None:
    names = ("k_scale", "v_scale", "attn.q_scale", "k_zero_point", "v_zero_point", "rotary_emb.inv_freq")
    tensors = {f"{prefix}.layers.11.self_attn.{name}": torch.ones(1) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    CheckpointWeights(tmp_path, torch.float32, torch.device("cpu")).finish()
