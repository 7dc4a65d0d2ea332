"""What a configuration or a flag may be wrong in: each is refused, by name and with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.quantization.sound_checkpoints import AWQ, FP8, GPTQ, INPUTS, compressed

from headway_runtime.errors import ConfigError, ModelLoadError
from headway_runtime.quantization.choice import choose_quantization, read_quantization


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes': supported: 'awq', 'gptq', 'fp8'"),
        ({}, "quant_method=None"),
        (AWQ | {"bits": 8}, "bits=8: supported: 4"),
        (AWQ | {"version": "gemv"}, "version='gemv': supported: 'gemm'"),
        (AWQ | {"backend": "llm-awq"}, "backend='llm-awq'"),
        (AWQ | {"group_size": 0}, "group_size=0: want a positive number of inputs, or -1 for all"),
        (AWQ | {"group_size": "128"}, "group_size='128': want an integer"),
        (AWQ | {"zero_point": "yes"}, "zero_point='yes': want true or false"),
        (
            AWQ | {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert='lm_head': want a list of names",
        ),
        (AWQ | {"desc_act": "yes"}, "desc_act='yes': want true or false"),
        (AWQ | {"checkpoint_format": "gemv"}, "checkpoint_format='gemv': supported: 'gemm'"),
        (AWQ | {"format": "gemv_fast"}, "format='gemv_fast': supported: 'gemm'"),
        (
            GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
            "checkpoint_format='gptq': format='gptq_v2' says otherwise",
        ),
        (GPTQ | {"bits": 3}, "bits=3: supported: 4, 8"),
        (GPTQ | {"bits": None}, "bits=None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': supported: 'gptq', 'gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype='int16'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard'"),
        (
            GPTQ | {"codebook": "nf4"},
            "codebook='nf4': this field is unknown here and may change what weights mean",
        ),
        (GPTQ | {"dynamic": {"+:(": {}}}, "is no regular expression"),
        (GPTQ | {"dynamic": {"x": {"bits": 2}}}, "quantization_config: dynamic: x: bits=2"),
        (GPTQ | {"dynamic": {"x": {"magic": 1}}}, "dynamic: x: magic=1: this field is unknown"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2': supported: 'e4m3'"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme='none'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size=[128]: want two positive numbers"),
        (FP8 | {"scale": 2}, "scale=2: this field is unknown"),
        (
            compressed(format="nvfp4-pack-quantized"),
            "format='nvfp4-pack-quantized': supported: 'pack-quantized'",
        ),
        (
            compressed(quantization_status="calibration"),
            "quantization_status='calibration': want 'compressed'",
        ),
        (compressed(quantization_status="initialized"), "quantization_status='initialized'"),
        (compressed(format="dense"), "format='dense': supported: 'pack-quantized'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights are not supported"),
        (compressed(transform_config={"config_groups": {"R1": 1}}), "transform_config={"),
        (compressed(config_groups={}), "config_groups={}: want at least one group"),
        (compressed(ignore=["Linear"]), "ignore=['Linear']"),
        (compressed(ignore=["re:("]), "'(' is no regular expression"),
        (compressed({"output_activations": INPUTS}), "output_activations={"),
        (compressed({"targets": ["Embedding"]}), "'Embedding': only layers of the class 'Linear'"),
        (compressed({"weights": None}), "weights=None: inputs alone cannot be quantized"),
        (
            compressed({"input_activations": INPUTS | {"num_bits": 4}}),
            "input_activations: num_bits=4: supported: 8",
        ),
        (
            compressed({"input_activations": INPUTS | {"strategy": "tensor"}}),
            "strategy='tensor': dynamic scales",
        ),
        (
            compressed({"input_activations": INPUTS}, {"num_bits": 4, "strategy": "group", "group_size": 32}),
            "4-bit weights are supported with plain inputs alone",
        ),
        (
            compressed({"input_activations": INPUTS}, {"symmetric": False}),
            "8-bit inputs are supported with symmetric",
        ),
        (
            compressed({"input_activations": INPUTS}, format="pack-quantized"),
            "8-bit inputs are supported with symmetric weights per 'channel' or 'tensor' that are not packed",
        ),
        (compressed(weights={"num_bits": 2}), "weights: num_bits=2: supported: 4, 8"),
        (compressed(weights={"type": "float", "num_bits": 4}), "num_bits=4: supported: 8"),
        (compressed(weights={"type": "float", "symmetric": False}), "FP8 weights have no zero points"),
        (compressed(weights={"strategy": "tensor_group"}), "strategy='tensor_group'"),
        (
            compressed(weights={"strategy": "block", "block_structure": [128, 128]}),
            "blocks are supported of FP8",
        ),
        (compressed(weights={"type": "float", "strategy": "block"}), "block_structure=None"),
        (compressed(weights={"dynamic": True}), "weights: dynamic=True"),
        (compressed(weights={"actorder": "columns"}), "actorder='columns'"),
        (compressed(weights={"type": "float"}, format="pack-quantized"), "packed weights are integers"),
        (compressed(weights={"outliers": 3}), "weights: outliers=3: this field is unknown"),
    ],
)
def test_configurations_that_would_change_results_are_refused(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ModelLoadError) as caught:
        read_quantization(tmp_path)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("config.json: quantization_config")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", {"quantization_config": "awq"}, "quantization_config='awq': want an object"),
        ("hf_quant_config.json", {"quantization": {}}, "hf_quant_config.json: quantization of that tool"),
        ("quantize_config.json", {"bits": 2, "group_size": 32}, "quantize_config.json: bits=2"),
        ("quant_config.json", {"w_bit": 3, "q_group_size": 32}, "quant_config.json: w_bit=3"),
    ],
)
def test_other_files_are_refused_by_their_names(
    name: str, content: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError) as caught:
        read_quantization(tmp_path)
    assert complaint in str(caught.value)


def test_fields_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    config = GPTQ | {"new_option": False, "another": None, "list": [], "meta": {"quantizer": "x"}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    stored = read_quantization(tmp_path)
    assert stored is not None
    assert stored.method == "gptq"


@pytest.mark.parametrize("wanted", ["none", "int4", "awq", "fp8"])
def test_flag_that_contradicts_a_quantized_checkpoint_is_refused(wanted: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    with pytest.raises(ConfigError) as caught:
        choose_quantization(wanted, tmp_path)
    assert f"--quantization={wanted!r}" in str(caught.value)
    assert "is quantized as 'gptq'; leave the flag out" in str(caught.value)


@pytest.mark.parametrize("wanted", ["awq", "gptq", "compressed-tensors"])
def test_flag_that_wants_another_checkpoint_is_refused(wanted: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not quantized; leave the flag out"):
        choose_quantization(wanted, tmp_path)


@pytest.mark.parametrize(
    ("wanted", "name"), [("auto", "none"), ("none", "none"), ("int8", "int8"), ("fp8", "fp8")]
)
def test_plain_checkpoints_may_be_quantized_or_not(wanted: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert choose_quantization(wanted, tmp_path).name == name


@pytest.mark.parametrize(
    ("config", "name"), [(AWQ, "awq"), (GPTQ, "gptq"), (FP8, "fp8"), (compressed(), "compressed-tensors")]
)
def test_names_of_methods_are_assertions_that_hold(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert choose_quantization(name, tmp_path) == choose_quantization("auto", tmp_path)
    assert choose_quantization(name, tmp_path).name == name
