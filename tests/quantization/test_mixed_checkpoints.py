"""Quantized checkpoints whose modules are unlike, whose inputs are quantized too, or that old tools wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantization.tool_checkpoints import (
    INT8,
    TOKENS,
    TOLERANCE,
    awq_config,
    compressed_config,
    gptq_config,
    int4_groups,
    weights_of,
)

from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.layers.quantized_weights import Int4Weight


def test_parts_of_one_projection_may_be_quantized_unlike(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    """q in groups, k in int8, v plain; gate and up with groups of different sizes."""
    config = compressed_config("mixed-precision", ignore=["lm_head", "re:.*v_proj"])
    config["config_groups"] = {
        "ints": {
            "targets": ["re:.*k_proj"],
            "format": "int-quantized",
            "weights": INT8 | {"strategy": "channel"},
        },
        "small groups": {
            "targets": ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"],
            "format": "pack-quantized",
            "weights": int4_groups(32, has_zeros=True),
        },
        "others": {"targets": ["Linear"], "format": "pack-quantized", "weights": int4_groups(64)},
    }
    others = {
        "k_proj": packers["integers"]("channel"),
        "v_proj": packers["plain"](),
        "up_proj": packers["packed"](32, has_zeros=True),
    }
    written = write_checkpoint(config, packers["packed"](64), others)
    got = logits_of(start_runner(written.folder), TOKENS)
    want = reference_logits(written, TOKENS)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max()))


def test_parts_ordered_unlike_are_right(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    in_order = packers["gptq"](32)
    written = write_checkpoint(
        gptq_config(32, has_order=True), packers["gptq"](32, has_order=True), {"k_proj": in_order}
    )
    got = logits_of(start_runner(written.folder), TOKENS)
    want = reference_logits(written, TOKENS)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max()))


def test_modules_that_the_configuration_leaves_out_are_plain(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    written = write_checkpoint(
        awq_config(32) | {"modules_to_not_convert": ["self_attn", "mlp.gate"]},
        packers["awq"](32),
        {f"{name}_proj": packers["plain"]() for name in "qkvo"},
    )
    got = logits_of(start_runner(written.folder), TOKENS)
    torch.testing.assert_close(got, reference_logits(written, TOKENS), rtol=1e-3, atol=1e-3)


def test_exceptions_of_gptqmodel_have_their_own_bits_and_groups(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    dynamic = {
        "+:.*down_proj": {"bits": 8, "group_size": 64},
        "-:model\\.layers\\.1\\.self_attn\\.o_proj": {},
        ".*gate_proj": {"desc_act": True},
    }
    others = {
        "down_proj": packers["gptq"](64, bits=8),
        "1.self_attn.o_proj": packers["plain"](),
        "gate_proj": packers["gptq"](32, has_order=True),
    }
    written = write_checkpoint(gptq_config(32) | {"dynamic": dynamic}, packers["gptq"](32), others)
    got = logits_of(start_runner(written.folder), TOKENS)
    torch.testing.assert_close(got, reference_logits(written, TOKENS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("static_scale", [pytest.param(0.0, id="dynamic"), pytest.param(0.03, id="static")])
@pytest.mark.parametrize("zero_points", ["symmetric", "with zero points"])
def test_inputs_are_quantized_too_where_the_checkpoint_says_so(
    static_scale: float, zero_points: str, write_checkpoint: Any, packers: Any, change_tensors: Any
) -> None:
    """One layer against the arithmetic of integers, in NumPy."""
    is_symmetric = zero_points == "symmetric"
    inputs = INT8 | {"symmetric": is_symmetric, "dynamic": not static_scale}
    inputs |= {"strategy": "tensor" if static_scale else "token"}
    config = compressed_config("int-quantized", inputs, strategy="channel", **INT8)
    written = write_checkpoint(config, packers["integers"]("channel", inputs_scale=static_scale))
    if static_scale and not is_symmetric:
        name = "model.layers.0.self_attn.o_proj.input_zero_point"
        change_tensors(
            written.folder, lambda tensors: tensors.update({name: torch.tensor([7], dtype=torch.int8)})
        )
    weights = weights_of(written.folder)
    module = "model.layers.0.self_attn.o_proj"
    linear = make_merged_linear([weights.take_linear(module, 128, 128)], None, torch.float32)
    x = np.random.default_rng(5).standard_normal((6, 128)).astype(np.float32) + np.float32(0.3)
    x[2] = 0
    want = integer_inputs(x, static_scale, 7, is_symmetric=is_symmetric) @ written.weights[module].T
    got = linear(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    exact = x @ written.weights[module].T
    assert np.abs(got - exact).max() > 1e-3, "inputs were not rounded"
    assert np.linalg.norm(got - exact) < (0.3 if static_scale else 0.02) * np.linalg.norm(exact)


def integer_inputs(x: Any, scale: float, zero: int, *, is_symmetric: bool) -> Any:
    """x as the nearest 8-bit integers say it."""
    if scale:
        zero = 0 if is_symmetric else zero
        return (np.clip(np.rint(x / np.float32(scale)) + zero, -128, 127) - zero) * np.float32(scale)
    if is_symmetric:
        scales = np.maximum(np.abs(x).max(1, keepdims=True) / 127, 1e-12)
        return np.rint(x / scales) * scales
    least, most = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scales = np.maximum((most - least) / 255, 1e-12)
    zeros = np.rint(-128 - least / scales)
    return (np.clip(np.rint(x / scales) + zeros, -128, 127) - zeros) * scales


def test_shards_may_part_a_modules_tensors(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any
) -> None:
    written = write_checkpoint(gptq_config(32, has_order=True), packers["gptq"](32, has_order=True))
    want = logits_of(start_runner(written.folder), TOKENS)
    shard(written.folder)
    assert torch.equal(logits_of(start_runner(written.folder), TOKENS), want)


def test_old_tools_leave_their_configuration_in_a_file_of_its_own(
    write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    gptq = write_checkpoint(None, packers["gptq"](32))
    old = {
        name: value
        for name, value in gptq_config(32).items()
        if name not in ("quant_method", "checkpoint_format")
    }
    (gptq.folder / "quantize_config.json").write_text(json.dumps(old | {"model_name_or_path": "x"}))
    awq = write_checkpoint(None, packers["awq"](32))
    (awq.folder / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    )
    for written in (gptq, awq):
        got = logits_of(start_runner(written.folder), TOKENS)
        torch.testing.assert_close(got, reference_logits(written, TOKENS), rtol=1e-3, atol=1e-3)


def test_biases_of_zeros_and_scales_of_a_kv_cache_are_passed_over(
    write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    written = write_checkpoint(gptq_config(32), packers["gptq"](32))
    attention = "model.layers.0.self_attn"
    extra = {f"{attention}.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "k_proj.output_scale")}
    extra[f"{attention}.q_proj.bias"] = torch.zeros(128)
    change_tensors(written.folder, lambda tensors: tensors.update(extra))
    start_runner(written.folder)


def test_groups_in_order_need_no_order(write_checkpoint: Any, packers: Any) -> None:
    written = write_checkpoint(gptq_config(32, has_order=True), packers["gptq"](32))
    weight = weights_of(written.folder).take_linear("model.layers.0.mlp.up_proj", 256, 128)
    assert isinstance(weight, Int4Weight)
    assert weight.input_order is None


def shard(folder: Path) -> None:
    """Every second tensor into another file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / file_name)
    weight_map = {name: file_name for file_name, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
