"""What tools and transformers say of a checkpoint beside the numbers that count: all of it is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.quantization.choice import read_quantization
from headway_runtime.quantization.scheme import Scheme

MODULE = "model.layers.0.mlp.up_proj"
# Of transformers' AwqConfig, 4.x: utils/quantization_config.py.
TRANSFORMERS_4_AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
    "backend": "autoawq",
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
}
# Of transformers' GPTQConfig, there too; 5.x has an AwqConfig that has all of these.
TRANSFORMERS_GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "tokenizer": None,
    "dataset": None,
    "group_size": 64,
    "damp_percent": 0.1,
    "desc_act": False,
    "act_group_aware": True,
    "sym": True,
    "true_sequential": True,
    "format": "gptq",
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["optimum:2.1.0"]},
    "backend": "auto_trainable",
    "model_seqlen": 2048,
    "block_name_to_quantize": "model.layers",
    "module_name_preceding_first_block": ["model.embed_tokens"],
    "batch_size": 1,
    "pad_token_id": None,
    "max_input_length": None,
    "cache_block_outputs": True,
    "modules_in_block_to_quantize": None,
}
TRANSFORMERS_5_AWQ = TRANSFORMERS_GPTQ | {
    "quant_method": "awq",
    "zero_point": True,
    "format": "gemm",
    "checkpoint_format": "gemm",
    "backend": "torch_awq",
    "modules_to_not_convert": ["lm_head"],
}
# Of AutoAWQ's quant_config.json: to_dict of awq/models/_config.py.
OLD_AWQ: dict[str, Any] = {
    "zero_point": True,
    "q_group_size": 64,
    "w_bit": 4,
    "version": "GEMM",
    "modules_to_not_convert": None,
}
ZERO_POINTS = Scheme("awq", 4, "group", group_size=64, is_symmetric=False)


def read_scheme(folder: Path, config: dict[str, Any], file_name: str = "config.json") -> Scheme | None:
    (folder / "config.json").write_text("{}")
    content = {"quantization_config": config} if file_name == "config.json" else config
    (folder / file_name).write_text(json.dumps(content))
    stored = read_quantization(folder)
    return None if stored is None else stored.scheme_of(MODULE)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        pytest.param(TRANSFORMERS_4_AWQ, ZERO_POINTS, id="AwqConfig of transformers 4"),
        pytest.param(TRANSFORMERS_5_AWQ, ZERO_POINTS, id="AwqConfig of transformers 5"),
        pytest.param(
            TRANSFORMERS_GPTQ, Scheme("gptq", 4, "group", group_size=64, zero_offset=1), id="GPTQConfig"
        ),
    ],
)
def test_all_fields_of_a_tool_are_read(config: dict[str, Any], want: Scheme, tmp_path: Path) -> None:
    assert read_scheme(tmp_path, config) == want


def test_all_fields_of_an_old_file_are_read(tmp_path: Path) -> None:
    assert read_scheme(tmp_path, OLD_AWQ, "quant_config.json") == ZERO_POINTS


@pytest.mark.parametrize("desc_act", [False, True])
def test_awq_has_no_order_of_inputs_whatever_is_said(desc_act: bool, tmp_path: Path) -> None:  # noqa: FBT001
    config = TRANSFORMERS_4_AWQ | {"desc_act": desc_act, "checkpoint_format": "gemm"}
    config |= {"dynamic": {MODULE: {"desc_act": desc_act, "group_size": 32}}}
    scheme = read_scheme(tmp_path, config)
    assert scheme == Scheme("awq", 4, "group", group_size=32, is_symmetric=False)


@pytest.mark.parametrize("status", ["frozen", "compressed"])
def test_weights_of_both_finished_states_are_read(status: str, tmp_path: Path) -> None:
    """Published checkpoints of old llm-compressor say frozen of codes; format and tensors decide."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": status,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    assert read_scheme(tmp_path, config) == Scheme("plain", 8, "tensor", is_float=True)


def test_a_checkpoint_that_quantizes_its_kv_cache_alone_has_plain_weights(tmp_path: Path) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    }
    assert read_scheme(tmp_path, config) is None
    assert read_quantization(tmp_path) is None
