"""Makes the fixtures: a tiny Llama, quantized by the tools whose checkpoints the engine reads.

    python tests/quantization/make_fixtures.py

Needs llmcompressor, compressed-tensors, gptqmodel and autoawq beside what Headway needs; made with the
versions that `fixtures/versions.json` names. Each folder holds a checkpoint as a tool writes it, and
`products.json`: what the tool itself makes of its weights, each multiplied by a vector that tests know. What
AWQ's and GPTQ's tools say of their weights is written here by hand, as their source has it. Tokens mean
nothing.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "fixtures"
TOOLS = ("llmcompressor", "compressed-tensors", "gptqmodel", "autoawq", "torch", "transformers")
HIDDEN, INNER, VOCABULARY, MAX_POSITIONS = 64, 32, 32, 128
PROJECTIONS = tuple(
    f"model.layers.0.{name}_proj"
    for name in (*(f"self_attn.{one}" for one in "qkvo"), *(f"mlp.{one}" for one in ("gate", "up", "down")))
)
# What GPTQModel puts into `meta` beside what it was told: gptqmodel/quantization/config.py, to_dict of
# BaseQuantizeConfig, and of GPTQ alone _update_meta_payload of GPTQQuantizeConfig.
GPTQMODEL_META: dict[str, Any] = {
    "quantizer": ["gptqmodel:7.7.0"],
    "uri": "https://github.com/modelcloud/gptqmodel",
    "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None},
    "offload_to_disk": True,
    "offload_to_disk_path": "./gptqmodel_offload/example/",
    "pack_impl": "cpu",
    "gc_mode": "interval",
    "wait_for_submodule_finalizers": False,
    "auto_forward_data_parallel": True,
    "vram_strategy": "exclusive",
}
GPTQMODEL_GPTQ_META: dict[str, Any] = {
    "gptaq": None,
    "mse": 0.0,
    "mock_quantization": False,
    "act_group_aware": False,
    "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32"},
}


def autoawq_fields(group_size: int) -> dict[str, Any]:
    """As to_transformers_dict of AwqConfig has them: AutoAWQ's awq/models/_config.py."""
    return {
        "quant_method": "awq",
        "zero_point": True,
        "group_size": group_size,
        "bits": 4,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def autogptq_fields(*, bits: int, group_size: int, is_symmetric: bool, has_order: bool) -> dict[str, Any]:
    """As to_dict of BaseQuantizeConfig has them: AutoGPTQ's auto_gptq/quantization/config.py."""
    return {
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.01,
        "desc_act": has_order,
        "static_groups": False,
        "sym": is_symmetric,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": None,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }


def gptqmodel_fields(
    method: str, layout: str, *, bits: int, group_size: int, is_symmetric: bool, has_order: bool
) -> dict[str, Any]:
    """As to_dict of GPTQQuantizeConfig and of AWQQuantizeConfig has them; see GPTQMODEL_META."""
    fields = {
        "bits": bits,
        "group_size": group_size,
        "desc_act": has_order,
        "lm_head": False,
        "quant_method": method,
        "format": layout,
        "checkpoint_format": layout,
        "pack_dtype": "int32",
        "meta": GPTQMODEL_META | (GPTQMODEL_GPTQ_META if method == "gptq" else {}),
    }
    if method == "gptq":
        return fields | {"sym": is_symmetric}
    return fields | {"zero_point": not is_symmetric, "version": layout}


def model() -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    made: Any = LlamaForCausalLM(config)
    return made.to(torch.bfloat16).eval()


def vector(num_inputs: int) -> torch.Tensor:
    """What weights are multiplied by, the same in tests."""
    return torch.linspace(-1, 1, num_inputs, dtype=torch.float64)


def write(name: str, products: dict[str, torch.Tensor]) -> None:
    rows = {module: [round(one, 5) for one in rows.tolist()] for module, rows in products.items()}
    (FOLDER / name / "products.json").write_text(json.dumps(rows) + "\n")
    size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
    print(f"{name}: {size} bytes")


def products_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {module: weight.double() @ vector(weight.shape[1]) for module, weight in weights.items()}


def save_changed(
    name: str, quantization: dict[str, Any], change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    """The model with each projection's weight replaced by what `change` makes of it."""
    folder = FOLDER / name
    model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for module in PROJECTIONS:
        weight = tensors.pop(f"{module}.weight")
        tensors |= {f"{module}.{kind}": one.contiguous() for kind, one in change(module, weight).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization}, indent=1) + "\n"
    )
    (folder / "generation_config.json").unlink()


def make_awq(name: str, group_size: int, quantization: dict[str, Any]) -> None:
    """Packed by AutoAWQ; GPTQModel packs as it does."""
    from awq.modules.linear.gemm import WQLinear_GEMM  # type: ignore[import-not-found]
    from awq.quantize.quantizer import AwqQuantizer  # type: ignore[import-not-found]
    from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]

    weights: dict[str, torch.Tensor] = {}

    def change(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        quantizer = AwqQuantizer.__new__(AwqQuantizer)
        quantizer.group_size, quantizer.zero_point, quantizer.w_bit = group_size, True, 4
        rounded, scales, zeros = quantizer.pseudo_quantize_tensor(weight.float())
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = rounded
        packed = WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        weights[module] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group_size).t()
        return {kind: getattr(packed, kind) for kind in ("qweight", "qzeros", "scales")}

    save_changed(name, quantization, change)
    write(name, products_of(weights))


def make_gptq(
    name: str,
    tool: str,
    *,
    bits: int,
    group_size: int,
    is_symmetric: bool,
    has_order: bool,
    is_old: bool,
) -> None:
    from gptqmodel import QuantizeConfig  # type: ignore[import-not-found]
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module  # type: ignore[import-not-found]

    weights: dict[str, torch.Tensor] = {}
    largest = 2**bits - 1

    def change(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight.shape
        size = group_size if group_size > 0 else inputs
        groups_of = torch.arange(inputs) // size
        if has_order:
            torch.manual_seed(7)
            groups_of = groups_of[torch.randperm(inputs)]
        order = groups_of.argsort(stable=True)
        grouped = weight.float()[:, order].view(outputs, -1, size)
        if is_symmetric:
            scales = grouped.abs().amax(-1) * 2 / largest
            zeros = torch.full_like(scales, (largest + 1) / 2)
        else:
            least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
            scales = (most - least) / largest
            zeros = (-least / scales).round()
        scales = scales.half().float()
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        each_scale, each_zero = scales[:, groups_of], zeros[:, groups_of]
        codes = (weight.float() / each_scale + each_zero).round().clamp(0, largest)
        linear.weight.data = (codes - each_zero) * each_scale
        packed = TorchLinear(
            bits=bits,
            group_size=group_size,
            sym=is_symmetric,
            desc_act=has_order,
            in_features=inputs,
            out_features=outputs,
        )
        packed.pack_original(linear, scales, zeros, groups_of.int())
        packed.post_init()
        weights[module] = packed.dequantize_weight().t().clone()
        if is_old:
            config = QuantizeConfig(bits=bits, group_size=group_size, sym=is_symmetric, desc_act=has_order)
            convert_gptq_v2_to_v1_format_module(packed, config)
        return {kind: getattr(packed, kind) for kind in ("qweight", "qzeros", "scales", "g_idx")}

    own: dict[str, Any] = {"bits": bits, "group_size": group_size}
    own |= {"is_symmetric": is_symmetric, "has_order": has_order}
    layout = "gptq" if is_old else "gptq_v2"
    fields = autogptq_fields(**own) if tool == "autogptq" else gptqmodel_fields("gptq", layout, **own)
    save_changed(name, fields, change)
    write(name, products_of(weights))


def make_compressed(name: str, modifiers: Any, *, has_data: bool = False) -> None:
    """What llm-compressor makes of the model, and what it makes of that when it reads it again."""
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import QuantizationScheme  # type: ignore[import-not-found]
    from llmcompressor import oneshot  # type: ignore[import-not-found]

    folder = FOLDER / name
    data: dict[str, Any] = {}
    if has_data:
        torch.manual_seed(3)
        samples: Any = [
            {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
            for row in torch.randint(0, VOCABULARY, (16, 32))
        ]
        data = {"dataset": DataLoader(samples, batch_size=None)}
        # What would tokenize text.
        tokenizer: Any = PreTrainedTokenizerFast
        data["processor"] = tokenizer(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")))
    with tempfile.TemporaryDirectory() as plain:  # the tool wants to see where a model comes from
        model().save_pretrained(plain)
        quantized = LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        oneshot(model=quantized, recipe=modifiers, **data)
        quantized.save_pretrained(folder, save_compressed=True)
    config = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(**{field: value for field, value in group.items() if field != "format"})
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for module in PROJECTIONS:
        prefix = f"{module}."
        state = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        # In float32 its result is not rounded once more.
        state["weight_scale"] = state["weight_scale"].float()
        weights[module] = compressor.decompress(state, scheme)["weight"]
    (folder / "generation_config.json").unlink()
    (folder / "recipe.yaml").unlink(missing_ok=True)
    write(name, products_of(weights))


def main() -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_awq("awq-group32", 32, autoawq_fields(32))
    # has_order: as that tool has it by default; of AWQ it means nothing.
    own: dict[str, Any] = {"bits": 4, "group_size": 32, "is_symmetric": False, "has_order": True}
    make_awq("awq-gptqmodel", 32, gptqmodel_fields("awq", "gemm", **own))
    make_gptq("gptq-v1-zeros-order", "gptqmodel", is_old=True, **own)
    own |= {"is_symmetric": True, "has_order": False}
    make_gptq("gptq-v1-symmetric", "autogptq", is_old=True, **own)
    own |= {"is_symmetric": False, "group_size": -1}
    make_gptq("gptq-v2-zeros", "gptqmodel", is_old=False, **own)

    def modifier(**weights: Any) -> Any:
        group = {"targets": ["Linear"], "weights": weights}
        return QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])

    make_compressed(
        "pack-group32-symmetric",
        modifier(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
    )
    group = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    make_compressed(
        "pack-group32-zeros",
        GPTQModifier(
            config_groups={"group_0": {"targets": ["Linear"], "weights": group | {"actorder": "weight"}}},
            ignore=["lm_head"],
        ),
        has_data=True,
    )
    make_compressed("w8a8-dynamic", QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]))
    integer = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
    make_compressed(
        "w8a8-static",
        QuantizationModifier(
            config_groups={
                "group_0": {"targets": ["Linear"], "weights": integer, "input_activations": integer}
            },
            ignore=["lm_head"],
        ),
        has_data=True,
    )
    make_compressed(
        "fp8-dynamic", QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    )
    make_compressed(
        "fp8-block", QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"])
    )
    versions = {tool: version(tool).partition("+")[0] for tool in TOOLS}
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
