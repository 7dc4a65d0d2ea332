"""Quantized checkpoints mean what their tools meant: tensor by tensor, and as whole models."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.quantization.tool_checkpoints import (
    INT8,
    TOKENS,
    TOLERANCE,
    awq_config,
    compressed_config,
    dequantized,
    gptq_config,
    int4_groups,
)

FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
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
