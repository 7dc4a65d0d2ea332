"""Quantized checkpoints of other architectures than Llama: biases, experts, routers, and norms around layers.

Each is a small random model of transformers', whose linear layers are exchanged for random codes; the same
numbers, dequantized by numpy, are what transformers computes with.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

TOKENS = [int(one) for one in np.random.default_rng(3).integers(0, 64, 40)]
# Relative, of all logits together: float32 sums in another order.
TOLERANCE = 5e-4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
QWEN_EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "desc_act": False,
    "checkpoint_format": "gptq_v2",
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["gate"],
}
# As tools write them that know of no exception: routers are quantized like the rest.
AWQ_ROUTERS = AWQ | {"modules_to_not_convert": None}
INTEGERS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
}


@dataclass(frozen=True)
class Case:
    """plain: ends of names of linear layers that stay as they are."""

    architecture: str
    fields: dict[str, Any]
    quantization: dict[str, Any]
    packer: str
    options: dict[str, Any]
    plain: tuple[str, ...] = ("lm_head",)


GPTQ_OPTIONS = {"group_size": 32, "has_zeros": True, "is_old": False}
ROUTED = ("lm_head", "gate")
# Words of AWQ hold eight outputs each.
EIGHT_EXPERTS = QWEN_EXPERTS | {"num_experts": 8}
CASES = {
    "qwen2 gptq": Case("Qwen2", {}, GPTQ, "gptq", GPTQ_OPTIONS),
    "gemma2 gptq": Case("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, GPTQ, "gptq", GPTQ_OPTIONS),
    "mixtral gptq": Case("Mixtral", EXPERTS, GPTQ, "gptq", GPTQ_OPTIONS, ROUTED),
    "mixtral awq": Case("Mixtral", EXPERTS, AWQ, "awq", {"group_size": 32}, ROUTED),
    "qwen3 moe fp8 blocks": Case(
        "Qwen3Moe",
        QWEN_EXPERTS,
        FP8_BLOCKS,
        "float8",
        {"strategy": "block", "scale_name": "weight_scale_inv"},
        ROUTED,
    ),
    "qwen3 moe awq, routers too": Case("Qwen3Moe", EIGHT_EXPERTS, AWQ_ROUTERS, "awq", {"group_size": 32}),
    "mixtral awq, routers too": Case(
        "Mixtral", EXPERTS | {"num_local_experts": 8}, AWQ_ROUTERS, "awq", {"group_size": 32}
    ),
    "qwen3 moe integers, routers too": Case(
        "Qwen3Moe", QWEN_EXPERTS, INTEGERS, "integers", {"strategy": "channel"}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_model(
    name: str,
    tmp_path: Path,
    packers: dict[str, Callable[..., Any]],
    start_runner: Callable[..., Any],
    logits_of: Callable[[Any, list[int]], torch.Tensor],
) -> None:
    case = CASES[name]
    want = write(tmp_path, case, packers[case.packer](**case.options))
    runner = start_runner(tmp_path)
    got = logits_of(runner, TOKENS)
    assert float(want.std()) > 0.1
    assert float((got - want).norm() / want.norm()) < TOLERANCE


def write(folder: Path, case: Case, pack: Callable[..., Any]) -> torch.Tensor:
    """A quantized checkpoint; the logits that it means, [tokens, vocabulary]."""
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{case.architecture}Config")(**(SIZES | case.fields))
    model: Any = getattr(transformers, f"{case.architecture}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    # Under the names of old, with a tensor for each expert: so quantizers write them.
    model.save_pretrained(folder, save_original_format=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = np.random.default_rng(1)
    meant, stored = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or tensor.ndim != 2 or module.endswith((*case.plain, "embed_tokens")):
            continue
        made = pack(generator, *tensor.shape)
        meant[name] = torch.from_numpy(made.weight)
        del stored[name]
        stored |= {f"{module}.{part}": one for part, one in made.tensors.items()}
    assert len(stored) > len(tensors)
    save_file({name: one.contiguous() for name, one in meant.items()}, path, metadata={"format": "pt"})
    reference = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([TOKENS])).logits[0]
    save_file({name: one.contiguous() for name, one in stored.items()}, path, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {"quantization_config": case.quantization, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(written))
    return logits
