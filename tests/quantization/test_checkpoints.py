"""Quantized checkpoints mean what their tools meant: tensor by tensor, and as whole models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantization.make_layout_fixtures import make

from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.layers.quantized_weights import Int4Weight
from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.quantization.choice import choose_quantization

FIXTURES = Path(__file__).parent / "fixtures"
LAYOUTS = Path(__file__).parent / "layout_fixtures"
MADE_BY_LAYOUT = sorted(path.name for path in LAYOUTS.iterdir() if path.is_dir())
MADE_BY_TOOLS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
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


FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
# Name: what config.json says, and the packer of the tensors with its arguments.
CASES: dict[str, tuple[dict[str, Any], str, tuple[Any, ...], dict[str, Any]]] = {
    **{f"awq, groups of {size}": (awq_config(size), "awq", (size,), {}) for size in (32, 64, 128, -1)},
    "awq without zero points": (
        awq_config(32, has_zeros=False),
        "awq",
        (32,),
        {"has_zeros": False, "keeps_zeros": False},
    ),
    **{
        f"gptq, groups of {size}, zeros {has_zeros}, order {has_order}, old {is_old}, {bits} bits": (
            gptq_config(size, bits=bits, has_zeros=has_zeros, has_order=has_order, is_old=is_old),
            "gptq",
            (size,),
            {"bits": bits, "has_zeros": has_zeros, "has_order": has_order, "is_old": is_old},
        )
        for size, bits, has_zeros, has_order, is_old in (
            *((32, 4, False, False, True), (64, 4, True, False, False), (128, 4, True, True, True)),
            *((-1, 4, False, False, False), (32, 4, True, True, False), (64, 8, False, False, True)),
            *((32, 8, True, True, False), (-1, 8, True, False, True)),
        )
    },
    **{
        f"packed, groups of {size}, zeros {has_zeros}, order {has_order}": (
            compressed_config(
                "pack-quantized",
                **int4_groups(size, has_zeros=has_zeros, order="group" if has_order else None),
            ),
            "packed",
            (size,),
            {"has_zeros": has_zeros, "has_order": has_order},
        )
        for size, has_zeros, has_order in (
            *(
                (32, False, False),
                (64, True, True),
                (128, True, False),
                (-1, False, False),
                (-1, True, False),
            ),
        )
    },
    "packed, 8 bits": (
        compressed_config("pack-quantized", strategy="channel", **INT8),
        "packed",
        (-1,),
        {"bits": 8},
    ),
    **{
        f"integers per {strategy}, zeros {has_zeros}, {bits} bits, {format_name}": (
            compressed_config(
                format_name,
                num_bits=bits,
                type="int",
                symmetric=not has_zeros,
                strategy=strategy,
                group_size=32 if strategy == "group" else None,
            ),
            "integers",
            (strategy,),
            {"bits": bits, "has_zeros": has_zeros},
        )
        for strategy, has_zeros, bits, format_name in (
            *(("tensor", False, 8, "int-quantized"), ("channel", False, 8, "naive-quantized")),
            *(("channel", True, 8, "int-quantized"), ("group", True, 8, "int-quantized")),
            *(("group", False, 4, "naive-quantized"), ("channel", True, 4, "int-quantized")),
            ("tensor", True, 4, "int-quantized"),
        )
    },
    **{
        f"float8 per {strategy}": (
            compressed_config(
                "float-quantized",
                strategy=strategy,
                group_size=32 if strategy == "group" else None,
                block_structure=[128, 128] if strategy == "block" else None,
                **FP8,
            ),
            "float8",
            (strategy,),
            {},
        )
        for strategy in ("tensor", "channel", "group", "block")
    },
    "float8, blocks of DeepSeek": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [64, 128],
            "activation_scheme": "dynamic",
        },
        "float8",
        ("block",),
        {"scale_name": "weight_scale_inv", "block": (64, 128)},
    ),
    "float8, static inputs": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "float8",
        ("tensor",),
        {"has_input": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_weight_is_what_numpy_makes_of_its_tensors(
    case: str, write_checkpoint: Any, packers: Any
) -> None:
    config, packer, arguments, options = CASES[case]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    got = dequantized(written.folder, {name: one.shape for name, one in written.weights.items()})
    for module, want in written.weights.items():
        np.testing.assert_allclose(got[module], want, rtol=1e-6, atol=1e-9, err_msg=module)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantized_model(
    case: str, write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    config, packer, arguments, options = CASES[case]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    want = reference_logits(written, TOKENS)
    assert want.std() > 0.2, "logits that hardly differ prove nothing"
    got = logits_of(start_runner(written.folder), TOKENS)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max()))


@pytest.mark.parametrize("case", [name for name in CASES if "32" in name or "8" in name])
def test_bfloat16_logits_are_near_those_of_the_dequantized_model(
    case: str, write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any, reference_logits: Any
) -> None:
    """With the products that this processor has for few and for many rows."""
    config, packer, arguments, options = CASES[case]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    runner = start_runner(written.folder, dtype="bfloat16")
    for tokens in (TOKENS[:3], TOKENS):
        want = reference_logits(written, tokens)
        got = logits_of(runner, tokens)
        assert float((got - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize("name", MADE_BY_TOOLS)
def test_checkpoints_of_the_tools_are_what_the_tools_make_of_them(name: str) -> None:
    # AutoAWQ and GPTQModel compute in float16.
    assert_products(FIXTURES / name, tolerance=2e-3)


@pytest.mark.parametrize("name", MADE_BY_LAYOUT)
def test_checkpoints_of_published_layouts_are_what_their_bits_say(name: str) -> None:
    assert_products(LAYOUTS / name, tolerance=2e-5)


def test_the_script_makes_the_fixtures_of_layouts_that_are_here(tmp_path: Path) -> None:
    make(tmp_path / "made")
    files = {path.relative_to(LAYOUTS) for path in LAYOUTS.rglob("*") if path.is_file()}
    made = {path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert made == files
    for name in files:
        assert (tmp_path / "made" / name).read_bytes() == (LAYOUTS / name).read_bytes(), name


@pytest.mark.parametrize("name", MADE_BY_LAYOUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_published_layouts_are_served(
    dtype: str, name: str, start_runner: Any, logits_of: Any
) -> None:
    runner = start_runner(LAYOUTS / name, dtype=dtype)
    assert logits_of(runner, [1, 2, 3]).isfinite().all()


def assert_products(folder: Path, *, tolerance: float) -> None:
    """Each weight times the vector is what products.json says."""
    products = json.loads((folder / "products.json").read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    inner = config["intermediate_size"]
    shapes = {
        module: (len(rows), inner if module.endswith("down_proj") else config["hidden_size"])
        for module, rows in products.items()
    }
    for module, weight in dequantized(folder, shapes).items():
        got = weight.astype(np.float64) @ np.linspace(-1, 1, weight.shape[1])
        where = f"{folder.name} {module}"
        np.testing.assert_allclose(got, products[module], rtol=tolerance, atol=tolerance, err_msg=where)


@pytest.mark.parametrize("name", MADE_BY_TOOLS)
def test_checkpoints_of_the_tools_are_served(name: str, start_runner: Any, logits_of: Any) -> None:
    runner = start_runner(FIXTURES / name)
    assert logits_of(runner, [1, 2, 3]).isfinite().all()


def test_every_kind_of_tool_is_among_the_fixtures() -> None:
    methods = {
        json.loads((FIXTURES / name / "config.json").read_bytes())["quantization_config"]["quant_method"]
        for name in MADE_BY_TOOLS
    }
    assert methods == {"awq", "gptq", "compressed-tensors"}


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
