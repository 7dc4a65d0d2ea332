"""What a quantized checkpoint or a flag may be wrong in: each is refused, by name and with a remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway_runtime.errors import ConfigError, ModelLoadError
from headway_runtime.layers.quantized_weights import holds_no_numbers
from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.parallel.share import Range
from headway_runtime.quantization.choice import choose_quantization, read_quantization

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


Change = Callable[[dict[str, torch.Tensor]], None]


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{DOWN}.{name}")


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{DOWN}.{name}": make(tensors[f"{DOWN}.{name}"]).contiguous()})


def with_code(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One code, the last, is this byte."""

    def change(codes: torch.Tensor) -> torch.Tensor:
        changed = codes.view(torch.uint8).clone()
        changed[-1, -1] = byte
        return changed.view(codes.dtype)

    return change


def half_a_group_elsewhere(order: torch.Tensor) -> torch.Tensor:
    order = order.clone()
    order[:16] = 5
    return order


# Kind of checkpoint, what is changed in it, and what the error says of it.
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "gptq without scales": ("gptq", without("scales"), f"'{DOWN}.scales' is in no file"),
    "gptq without zero points": ("gptq", without("qzeros"), f"'{DOWN}.qzeros' is in no file"),
    "gptq without weights": ("gptq", without("qweight"), f"'{DOWN}.qweight' is in no file"),
    "gptq of another dtype": ("gptq", put("qweight", torch.Tensor.long), "is torch.int64, want int32"),
    "gptq of another shape": (
        "gptq",
        put("qweight", lambda one: one[:4]),
        r"has shape (4, 128), config.json asks",
    ),
    "gptq with integer scales": ("gptq", put("scales", torch.Tensor.int), "is torch.int32, want float16"),
    "scales that are not numbers": (
        "gptq",
        put("scales", lambda one: one.fill_(float("nan"))),
        "holds numbers that are infinite or none",
    ),
    "gptq with zero points that AutoGPTQ overwrote": (
        "gptq zeros",
        put("qzeros", lambda one: one.fill_(0xFF654321 - (1 << 32))),
        "qzeros' holds zero points that AutoGPTQ overwrote where it stored 0 less 1",
    ),
    "gptq of one version that says it is another": (
        "gptq",
        put("qzeros", lambda one: one.fill_(0x88888888 - (1 << 32))),
        "holds zero points such as [9], though sym=true means 8; checkpoint_format may have to be 'gptq_v2'",
    ),
    "gptq of the other version that says it is one": (
        "gptq v2",
        put("qzeros", lambda one: one.fill_(0x77777777)),
        "holds zero points such as [7], though sym=true means 8; checkpoint_format may have to be 'gptq'",
    ),
    "float8 with a code that is no number": (
        "float8",
        put("weight", with_code(0x7F)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 with a negative code that is no number": (
        "float8",
        put("weight", with_code(0xFF)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 with a scale that is infinite": (
        "float8",
        put("weight_scale", lambda one: one.fill_(float("inf"))),
        "holds numbers that are infinite or none",
    ),
    "float8 blocks with a code that is no number": (
        "float8 blocks",
        put("weight", with_code(0x7F)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "float8 blocks with a negative code that is no number": (
        "float8 blocks",
        put("weight", with_code(0xFF)),
        f"'{DOWN}.weight' holds FP8 codes that are no numbers (0x7F or 0xFF)",
    ),
    "gptq with scales of 0": (
        "gptq",
        put("scales", torch.zeros_like),
        f"'{DOWN}.scales' holds scales that are 0 throughout",
    ),
    "awq with scales of 0": ("awq", put("scales", torch.zeros_like), "holds scales that are 0 throughout"),
    "packed with scales of 0": (
        "packed",
        put("weight_scale", torch.zeros_like),
        f"'{DOWN}.weight_scale' holds scales that are 0 throughout",
    ),
    "integers with scales of 0": (
        "integers",
        put("weight_scale", torch.zeros_like),
        "holds scales that are 0 throughout",
    ),
    "float8 with scales of 0": (
        "float8",
        put("weight_scale", torch.zeros_like),
        "holds scales that are 0 throughout",
    ),
    "float8 blocks with scales of 0": (
        "float8 blocks",
        put("weight_scale_inv", torch.zeros_like),
        f"'{DOWN}.weight_scale_inv' holds scales that are 0 throughout",
    ),
    "packed with scales that are not numbers": (
        "packed",
        put("weight_scale", lambda one: one.fill_(float("nan"))),
        "holds numbers that are infinite or none",
    ),
    "order though there is none": (
        "gptq",
        put("g_idx", lambda one: one.flip(0)),
        "puts inputs in an order of its own, though the configuration says otherwise; correct desc_act",
    ),
    "order with too few groups": (
        "gptq order",
        put("g_idx", lambda one: one % 4),
        "does not put 32 inputs in each of 8",
    ),
    "order with groups of unlike sizes": (
        "gptq order",
        put("g_idx", half_a_group_elsewhere),
        "does not put 32 inputs",
    ),
    "order with groups that there are not": ("gptq order", put("g_idx", lambda one: one + 1), "or above 7"),
    "order that is missing": ("gptq order", without("g_idx"), f"'{DOWN}.g_idx' is in no file"),
    "awq without zero points": ("awq", without("qzeros"), f"'{DOWN}.qzeros' is in no file"),
    "awq of another shape": ("awq", put("scales", lambda one: one[:2]), r"has shape (2, 128)"),
    "packed without scales": ("packed", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "packed of another shape": (
        "packed",
        put("weight_shape", lambda one: one + 1),
        "says [129, 257], config.json asks for [128, 256]",
    ),
    "integers without scales": ("integers", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "integers without sign": ("integers", put("weight", torch.Tensor.byte), "is torch.uint8, want int8"),
    "float8 without scales": ("float8", without("weight_scale"), f"'{DOWN}.weight_scale' is in no file"),
    "float8 of the other kind": (
        "float8",
        put("weight", lambda one: one.to(torch.float8_e5m2)),
        "is torch.float8_e5m2, want float8_e4m3fn",
    ),
    "float8 with scales of another shape": (
        "float8",
        put("weight_scale", lambda one: one[:7]),
        "has shape (7, 1), config.json asks for (128, 1) or",
    ),
    "static inputs without scale": ("static", without("input_scale"), f"'{DOWN}.input_scale' is in no file"),
    "static inputs with scale 0": (
        "static",
        put("input_scale", torch.zeros_like),
        "holds 0.0, which is not positive",
    ),
}
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


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_named(
    damage: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    kind, change, complaint = DAMAGES[damage]
    config, packer, arguments, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    change_tensors(written.folder, change)
    with pytest.raises(ModelLoadError) as caught:
        start_runner(written.folder)
    assert complaint in str(caught.value)
    assert DOWN in str(caught.value)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_found_wherever_they_are(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_runtime.layers.quantized_weights.CHECKED_BYTES", 100)
    codes = torch.tensor([one for one in range(256) if one & 0x7F != 0x7F], dtype=torch.uint8).repeat(7, 1)
    assert not holds_no_numbers(codes.view(torch.float8_e4m3fn))
    for place in (0, len(codes) // 2, -1):
        changed = codes.clone()
        changed[place, place] = byte
        assert holds_no_numbers(changed.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("wanted", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_plain_weights_that_are_not_finite_are_named(
    value: float, wanted: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    """Of weights where they are quantized at load; of norms in any case."""
    written = write_checkpoint(None, packers["plain"]())
    name = "model.layers.1.input_layernorm.weight" if wanted == "none" else f"{DOWN}.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    change_tensors(written.folder, change)
    with pytest.raises(ModelLoadError, match=f"'{name}' holds numbers that are infinite or none"):
        start_runner(written.folder, quantization=wanted)


def test_a_ranks_part_of_a_bias_that_is_not_finite_is_named(tmp_path: Path) -> None:
    bias = torch.zeros(8)
    bias[5] = float("inf")
    save_file({"bias": bias}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(tmp_path, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="'bias' holds numbers that are infinite or none"):
        weights.take("bias", (8,), Range(4, 8))


def test_files_named_as_autogptq_names_them_are_found(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    single = written.folder / "model.safetensors"
    single.rename(written.folder / "gptq_model-4bit-32g.safetensors")
    start_runner(written.folder)
    (written.folder / "gptq_model-8bit--1g.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError) as caught:
        start_runner(written.folder)
    told = "holds 'gptq_model-4bit-32g.safetensors' and 'gptq_model-8bit--1g.safetensors', each of which may"
    assert told in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_ones_load(kind: str, write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    config, packer, arguments, options = KINDS[kind]
    start_runner(write_checkpoint(config, packers[packer](*arguments, **options)).folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "integers", "float8", "float8 blocks"])
def test_some_scales_may_be_zero(
    kind: str, write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    """Of weights that are all 0."""
    config, packer, arguments, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](*arguments, **options))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (one for one in tensors if one.startswith(DOWN) and "scale" in one)
        tensors[name].view(-1)[0] = 0

    change_tensors(written.folder, change)
    start_runner(written.folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_groups_that_do_not_divide_the_inputs_are_refused(
    kind: str, write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    config, packer, _, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](32, **options))
    text = (written.folder / "config.json").read_text().replace('"group_size": 32', '"group_size": 48')
    (written.folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"its 128 inputs are no multiple of group_size=48") as caught:
        start_runner(written.folder)
    assert "q_proj" in str(caught.value)


def test_more_than_four_bits_in_four_are_refused(
    write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    config = compressed(weights={"num_bits": 4})
    written = write_checkpoint(config, packers["integers"]("channel", bits=4))
    change_tensors(written.folder, put("weight", lambda one: one + 8))
    with pytest.raises(ModelLoadError, match=f"'{DOWN}.weight' holds numbers that need more than 4 bits"):
        start_runner(written.folder)


def test_zero_points_that_the_configuration_denies_are_refused(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(AWQ | {"zero_point": False}, packers["awq"](32))
    with pytest.raises(ModelLoadError, match=r"qzeros' holds zero points, though .*zero_point=false"):
        start_runner(written.folder)


def test_truncated_shard_is_named(write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    path = written.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    left = path.stat().st_size
    told = rf"has {left} bytes where its header tells of {left + 4096}: .* copy the checkpoint again"
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {told}"):
        start_runner(written.folder)


def test_quantized_weights_without_a_configuration_are_refused(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(None, packers["integers"]("channel"))
    with pytest.raises(ModelLoadError, match=r"is torch\.int8, want .*has no quantization_config for that"):
        start_runner(written.folder)
    written = write_checkpoint(None, packers["gptq"](32))
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight' is in no file"):
        start_runner(written.folder)


def test_bias_that_is_not_zero_has_no_place(
    write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    change_tensors(written.folder, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(128)}))
    with pytest.raises(ModelLoadError, match=rf"no place in this model, first '{DOWN}\.bias'"):
        start_runner(written.folder)


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
