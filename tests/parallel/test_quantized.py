"""Quantized weights in two ranks: parts of what one rank has, whatever the groups and orders are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantizedWeight,
)
from headway_runtime.layers.quantizer import quantized
from headway_runtime.layers.weight_cuts import Part, cut
from headway_runtime.parallel.share import Range, Share

TOKENS = [int(one) for one in np.random.default_rng(3).integers(0, 64, 40)]
OUTPUTS, INPUTS = 48, 192


def order_of(inputs: int, seed: int = 5) -> torch.Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))


def random_weight(kind: str, group_size: int, *, has_zeros: bool, has_order: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(group_size)
    groups = INPUTS // group_size
    scales = torch.rand(OUTPUTS, groups, generator=generator) + 0.5
    order = order_of(INPUTS) if has_order else None
    if kind == "int4":
        codes = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=generator).to(torch.uint8)
        zeros = torch.randint(0, 16, (OUTPUTS, groups), generator=generator).float()
        return Int4Weight(codes, scales, zeros if has_zeros else None, group_size, order)
    codes = torch.randint(-128, 128, (OUTPUTS, INPUTS), generator=generator).to(torch.int8)
    zeros = torch.randint(-128, 128, (OUTPUTS, groups), generator=generator).float()
    return Int8GroupWeight(codes, scales, zeros if has_zeros else None, group_size, order)


def product(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, as a layer computes it."""
    if isinstance(weight, Int4Weight | Int8GroupWeight):
        if weight.input_order is not None:
            x = x.index_select(1, weight.input_order)
        return x @ weight.ordered(torch.float64).t()
    return x @ weight.dequantized(torch.float64).t()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 96, 192])
@pytest.mark.parametrize("kind", ["int4", "int8 group"])
def test_parts_of_groups_add_up_to_the_whole(
    kind: str, group_size: int, has_zeros: Any, has_order: Any, ranks: int
) -> None:
    weight = random_weight(kind, group_size, has_zeros=has_zeros, has_order=has_order)
    x = torch.randn(3, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = product(weight, x)
    by_columns = torch.zeros_like(want)
    by_rows = []
    for rank in range(ranks):
        columns, rows = Share(rank, ranks).of(INPUTS), Share(rank, ranks).of(OUTPUTS)
        by_columns += product(cut(weight, Part(columns=columns)), x[:, columns.first : columns.last])
        by_rows.append(product(cut(weight, Part(rows=rows)), x))
    torch.testing.assert_close(by_columns, want)
    torch.testing.assert_close(torch.cat(by_rows, 1), want)


@pytest.mark.parametrize("block", [None, (16, 64), (32, 128), (1, 32)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_float8_are_those_of_the_whole(block: tuple[int, int] | None, ranks: int) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(OUTPUTS, INPUTS, generator=generator).to(torch.float8_e4m3fn)
    shape = (OUTPUTS,) if block is None else (-(-OUTPUTS // block[0]), -(-INPUTS // block[1]))
    weight = Fp8Weight(codes, torch.rand(*shape, generator=generator) + 0.5, block)
    whole = weight.dequantized(torch.float32)
    for rank in range(ranks):
        columns, rows = Share(rank, ranks).of(INPUTS), Share(rank, ranks).of(OUTPUTS)
        own = cut(weight, Part(columns=columns)).dequantized(torch.float32)
        assert torch.equal(own, whole[:, columns.first : columns.last])
        own = cut(weight, Part(rows=rows)).dequantized(torch.float32)
        assert torch.equal(own, whole[rows.first : rows.last])


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_online_codes_are_parts_of_one_ranks_codes(kind: Any) -> None:
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(4))
    whole = quantized(weight, kind).dequantized(torch.float32)
    for rank in range(2):
        columns, rows = Share(rank, 2).of(INPUTS), Share(rank, 2).of(OUTPUTS)
        by_rows = quantized(weight[rows.first : rows.last].contiguous(), kind)
        assert torch.equal(by_rows.dequantized(torch.float32), whole[rows.first : rows.last])
        by_columns = cut(quantized(weight, kind), Part(columns=columns))
        assert torch.equal(by_columns.dequantized(torch.float32), whole[:, columns.first : columns.last])


def test_a_byte_of_two_codes_is_not_cut() -> None:
    weight = random_weight("int4", 32, has_zeros=False, has_order=False)
    with pytest.raises(ValueError, match="input 33, amid a byte of two 4-bit codes"):
        cut(weight, Part(columns=Range(0, 33)))


def test_a_quantized_head_is_not_filled_up() -> None:
    weight = Int8Weight(torch.zeros(9, 4, dtype=torch.int8), torch.ones(9))
    with pytest.raises(ValueError, match="has 9 outputs"):
        cut(weight, Part(rows=Range(0, 16)))


# Layouts of the tools, by the names of the tests of quantization; each has something that others have not.
STORED = [
    "awq, groups of 32",
    "awq, groups of 128",
    "awq, groups of -1",
    "gptq, groups of 128, zeros True, order True, old True, 4 bits",
    "gptq, groups of 32, zeros True, order True, old False, 8 bits",
    "gptq, groups of -1, zeros True, order False, old True, 8 bits",
    "packed, groups of 64, zeros True, order True",
    "packed, 8 bits",
    "integers per channel, zeros False, 8 bits, naive-quantized",
    "integers per group, zeros True, 8 bits, int-quantized",
    "float8 per channel",
    "float8 per group",
    "float8 per block",
    "float8, blocks of DeepSeek",
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", STORED)
def test_logits_of_a_quantized_checkpoint_are_those_of_one_rank(
    case: str,
    dtype: str,
    quantized_cases: Any,
    write_checkpoint: Any,
    packers: Any,
    engine_config: Any,
    logits_on_both: Any,
) -> None:
    config, packer, arguments, options = quantized_cases[case]
    written = write_checkpoint(config, packers[packer](*arguments, **options))
    config = engine_config(written.folder, max_model_len=128, dtype=dtype)
    want, got = logits_on_both(config, TOKENS)
    error = float((got - want).norm() / want.norm())
    assert error < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_logits_of_weights_quantized_at_load_are_those_of_one_rank(
    kind: str, checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    reference = checkpoint("qwen3 moe")
    want, got = logits_on_both(engine_config(reference.folder, quantization=kind), TOKENS)
    torch.testing.assert_close(got, want, atol=3e-4, rtol=0.0)


def test_inputs_that_are_quantized_by_row_have_scales_of_their_rank(
    quantized_cases: Any, write_checkpoint: Any, packers: Any, engine_config: Any, logits_on_both: Any
) -> None:
    """Where a rank has a part of a row, it sees less of it, and its scale is finer, not the same."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                "input_activations": inputs,
            }
        },
        "ignore": ["lm_head"],
    }
    written = write_checkpoint(config, packers["integers"]("channel"))
    want, got = logits_on_both(engine_config(written.folder, max_model_len=128), TOKENS)
    assert 0 < float((got - want).norm() / want.norm()) < 0.03


def test_each_rank_has_all_of_a_quantized_router(
    quantized_architectures: Any, packers: Any, tmp_path: Path, engine_config: Any, logits_on_both: Any
) -> None:
    case = quantized_architectures.CASES["qwen3 moe awq, routers too"]
    quantized_architectures.write(tmp_path, case, packers[case.packer](**case.options))
    want, got = logits_on_both(engine_config(tmp_path, max_model_len=128), TOKENS)
    assert float((got - want).norm() / want.norm()) < 1e-5
