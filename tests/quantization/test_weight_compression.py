"""bfloat16 weights in 12 bits each: every bit comes back, and products are those of the plain weights."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from benchmarks.cpu.tensor_bytes import tensor_bytes

from headway_runtime.engine_options import keyword_options
from headway_runtime.kernels.cpu import compiler, processor
from headway_runtime.kernels.cpu.linear import PairsLinear
from headway_runtime.kernels.cpu.lossless_codes import LosslessStrips, decoded
from headway_runtime.kernels.cpu.lossless_encoder import LEAST_WEIGHTS_PER_PATCH, encoded
from headway_runtime.kernels.cpu.lossless_linear import LosslessLinear
from headway_runtime.layers.linear import make_linear

pytestmark = pytest.mark.skipif(
    not (processor.reads_12_bits() and compiler.are_available()),
    reason="this processor has no products of weights in 12 bits",
)

BFLOAT16_EPSILON, FLOAT32_EPSILON = 2.0**-8, 2.0**-24


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    seed = torch.seed() % 2**32
    print(f"seed {seed}")  # shown if a test fails
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, outputs: int, inputs: int) -> Tensor:
    return torch.randn((outputs, inputs), generator=generator).mul_(0.02).bfloat16()


def uneven(generator: torch.Generator, outputs: int, inputs: int) -> Tensor:
    """Outputs of very different sizes: each 16 of them have tables of their own."""
    powers = torch.arange(outputs).div(16, rounding_mode="floor").mul(11).sub(60)
    return torch.randn((outputs, inputs), generator=generator).mul(2.0 ** powers[:, None]).bfloat16()


def with_rarities(generator: torch.Generator, outputs: int, inputs: int) -> Tensor:
    """Numbers of all kinds among normal ones: none of these has a code."""
    weight = normal(generator, outputs, inputs)
    rare = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, -1e-40, -0.0, 0.0]).bfloat16()
    places = torch.randperm(weight.numel(), generator=generator)[: len(rare)]
    weight.view(-1)[places] = rare
    return weight


def constant(value: float) -> Callable[..., Tensor]:
    return lambda _, outputs, inputs: torch.full((outputs, inputs), value, dtype=torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """Of bfloat16, so that what is no number equals itself, and zeros have a sign."""
    return tensor.view(torch.int16)


@pytest.mark.parametrize(
    ("make", "outputs", "inputs", "num_panels"),
    [
        pytest.param(normal, 256, 1024, 4, id="normal"),
        pytest.param(normal, 32, 1000, 2, id="a last group that is cut short"),
        pytest.param(normal, 16, 8, 1, id="a single step"),
        pytest.param(uneven, 192, 520, 1, id="outputs of different sizes"),
        pytest.param(with_rarities, 128, 264, 4, id="infinite, not a number, huge, tiny, minus zero"),
        pytest.param(constant(0.0), 32, 64, 2, id="zeros"),
        pytest.param(constant(-1.25), 32, 64, 2, id="all the same"),
        pytest.param(constant(3e38), 32, 64, 2, id="huge"),
        pytest.param(constant(1e-40), 32, 64, 2, id="below normal numbers"),
        pytest.param(constant(math.nan), 32, 64, 2, id="no numbers"),
    ],
)
def test_every_bit_of_a_weight_comes_back(
    make: Callable[..., Tensor], outputs: int, inputs: int, num_panels: int, generator: torch.Generator
) -> None:
    parts = [make(generator, outputs, inputs), make(generator, 2 * outputs, inputs)]
    weight = encoded(parts, num_panels)
    assert weight is not None
    assert torch.equal(bits(decoded(weight)), bits(torch.cat(parts)))
    assert weight.codes.nbytes == sum(part.nbytes for part in parts) * 3 // 4


def test_all_numbers_that_there_are_come_back_where_each_step_has_few_kinds() -> None:
    """65,536 of them, of each strip's 8 magnitudes at most."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    by_magnitude = numbers[(numbers.to(torch.int32) & 0x7FFF).argsort(stable=True)]
    weight = by_magnitude.view(16 * 16, 16 * 16).view(torch.bfloat16)
    strips = encoded([weight], 1)
    assert strips is not None
    assert torch.equal(bits(decoded(strips)), bits(weight))
    assert not len(strips.patches)


@pytest.mark.parametrize("num_patches", [0, 1, 37])
@pytest.mark.parametrize("where", ["spread out", "side by side", "at the end"])
def test_patches_are_kept_where_they_belong(num_patches: int, where: str, generator: torch.Generator) -> None:
    weight = torch.empty((64, 520)).uniform_(1.0, 2.0, generator=generator).bfloat16()
    places = {
        "spread out": torch.randperm(weight.numel(), generator=generator)[:num_patches],
        "side by side": torch.arange(5000, 5000 + num_patches),
        "at the end": weight.numel() - 1 - torch.arange(num_patches),
    }[where]
    # Eight magnitudes are known, and most of these are not among them.
    weight.view(-1)[places] = torch.logspace(-30, 30, num_patches).bfloat16()
    strips = encoded([weight], 4)
    assert strips is not None
    assert max(0, num_patches - 10) <= len(strips.patches) <= num_patches
    assert torch.equal(bits(decoded(strips)), bits(weight))
    check_products(strips, [weight], None, generator)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [([128, 64, 64], 1024), ([48], 72), ([80], 2816), ([160, 32], 520)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_plain_weights_to_the_last_bit(
    outputs: list[int], inputs: int, *, has_bias: bool, generator: torch.Generator
) -> None:
    parts = [normal(generator, size, inputs) for size in outputs]
    parts[0][3, 5], parts[-1][-1, -1] = 1e30, -1e-38
    bias = torch.randn(sum(outputs), generator=generator).bfloat16() if has_bias else None
    linear = make_linear(parts, bias, compresses=True)
    assert isinstance(linear, LosslessLinear)
    check_products(linear.weight, parts, bias, generator)


def check_products(
    weight: LosslessStrips, parts: list[Tensor], bias: Tensor | None, generator: torch.Generator
) -> None:
    linear, plain = LosslessLinear(weight, bias), PairsLinear(parts, bias)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 11, 16, 23, 25, 64, 150):
        x = torch.randn((rows, weight.num_inputs), generator=generator).bfloat16()
        assert torch.equal(bits(linear(x)), bits(plain(x))), rows


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_are_right_within_what_rounding_allows(rows: int, generator: torch.Generator) -> None:
    inputs = 1000
    part = normal(generator, 64, inputs)
    linear = make_linear([part], compresses=True)
    assert isinstance(linear, LosslessLinear)
    x = torch.randn((rows, inputs), generator=generator).bfloat16()
    want = x.double() @ part.double().T
    magnitudes = x.double().abs() @ part.double().abs().T
    # Each product and each sum is rounded to float32 once, and the result to bfloat16.
    bound = 2 * inputs * FLOAT32_EPSILON * magnitudes
    bound += BFLOAT16_EPSILON * (want.abs() + bound)
    assert ((linear(x).double() - want).abs() <= bound).all()


def test_what_is_no_number_stays_in_its_row_and_output(generator: torch.Generator) -> None:
    part = normal(generator, 64, 256)
    part[40, 7] = math.nan
    linear = make_linear([part], compresses=True)
    assert isinstance(linear, LosslessLinear)
    x = torch.ones((9, 256), dtype=torch.bfloat16)
    x[4] = math.nan
    is_none = linear(x).isnan()
    assert is_none.all(1).tolist() == [False] * 4 + [True] + [False] * 4
    assert is_none.all(0).nonzero().tolist() == [[40]]
    assert int(is_none.sum()) == 64 + 8


def test_weights_of_too_many_magnitudes_stay_plain(generator: torch.Generator) -> None:
    weight = torch.randint(-(2**15), 2**15, (64, 256), dtype=torch.int16, generator=generator)
    parts = [normal(generator, 64, 256), weight.view(torch.bfloat16)]
    assert encoded(parts, 4) is None
    assert isinstance(make_linear(parts, compresses=True), PairsLinear)


@pytest.mark.parametrize(
    "num_odd",
    [pytest.param(2048, id="all together"), pytest.param(20_000, id="more than a strip has room for")],
)
def test_weights_that_are_odd_where_nobody_counts_stay_plain(num_odd: int) -> None:
    weight = torch.ones((64, 4096), dtype=torch.bfloat16)
    # Every 65th is counted: the others may hold what no code says.
    index = torch.arange(num_odd)
    weight.view(-1)[index // 64 * 65 + index % 64 + 1] = torch.logspace(-30, 30, num_odd).bfloat16()
    assert num_odd > weight.numel() // LEAST_WEIGHTS_PER_PATCH
    assert encoded([weight], 4) is None


@pytest.mark.parametrize("why", ["not asked for", "another dtype", "odd sizes", "no panels", "processor"])
def test_other_weights_are_not_compressed(
    why: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"odd sizes": (64, 36), "no panels": (40, 64)}
    weight = normal(generator, *sizes.get(why, (64, 64)))
    if why == "another dtype":
        weight = weight.float()
    if why == "processor":
        monkeypatch.setattr(processor, "reads_12_bits", lambda: False)
    linear = make_linear([weight], compresses=why != "not asked for")
    assert not isinstance(linear, LosslessLinear)
    x = torch.randn((3, weight.shape[1]), generator=generator).to(weight.dtype)
    assert torch.allclose(linear(x).float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head", ["own head", "tied head"])
def test_a_compressed_model_computes_what_the_plain_one_does(
    head: str, write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any
) -> None:
    written = write_checkpoint(
        None, packers["plain"](), hidden_size=256, vocab_size=512, tie_word_embeddings=head == "tied head"
    )
    compressed, plain = (
        start_runner(written.folder, dtype="bfloat16", weight_compression=how) for how in ("auto", "none")
    )
    assert {type(one) for one in compressed._model.linears} == {LosslessLinear}
    assert {type(one) for one in plain._model.linears} == {PairsLinear}
    assert (compressed.weight_compression, plain.weight_compression) == ("12-bit", "none")
    token_ids = list(range(3, 40))
    assert torch.equal(logits_of(compressed, token_ids), logits_of(plain, token_ids))
    # Embeddings, norms and tables of positions stay as they are.
    saved = sum(one.num_inputs * one.num_outputs for one in plain._model.linears) // 2
    got = tensor_bytes(plain._model) - tensor_bytes(compressed._model)
    assert 0.95 * saved < got <= saved


def test_float32_models_are_not_compressed(write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    written = write_checkpoint(None, packers["plain"]())
    runner = start_runner(written.folder, dtype="float32")
    assert LosslessLinear not in {type(one) for one in runner._model.linears}
    assert runner.weight_compression == "none"


def test_what_is_in_force_counts_parts_of_layers_and_is_logged(
    write_checkpoint: Any, packers: Any, start_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of quantized weights, those that are plain; none where there are none."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "lm_head": True}
    plain = packers["plain"]()
    some = write_checkpoint(awq, packers["awq"](32), {"v_proj": plain, "lm_head": packers["awq"](32)})
    none = write_checkpoint(None, packers["plain"]())
    with caplog.at_level(logging.INFO):
        one, other = (
            start_runner(folder, dtype="bfloat16", quantization=how)
            for folder, how in ((some.folder, "auto"), (none.folder, "int8"))
        )
    assert (one.weight_compression, other.weight_compression) == ("12-bit", "none")
    assert "quantization awq, weight compression 12-bit" in caplog.text
    assert "quantization int8, weight compression none" in caplog.text


def test_the_option_is_auto_unless_told(write_checkpoint: Any, packers: Any) -> None:
    folder = write_checkpoint(None, packers["plain"]()).folder
    assert keyword_options(folder, {}).weight_compression == "auto"
    assert keyword_options(folder, {"weight_compression": "none"}).weight_compression == "none"
