"""Products with weights of 4- and 8-bit codes are those of what codes, scales and zero points stand for."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, silu

from headway_runtime.kernels.triton import coded_product, row_products
from headway_runtime.kernels.triton.coded_plain import coded_plain, plain_reference
from headway_runtime.kernels.triton.coded_product import CodedProduct
from headway_runtime.kernels.triton.coded_weight import CodedWeight, coded_weight, in_one_meaning
from headway_runtime.kernels.triton.launch import gpu_of
from headway_runtime.model_config import Activation

# Of the sum of products' norm: what an input is rounded to is exact here, so only sums and results round.
TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def random_codes(form: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As a checkpoint's are held, and the float32 numbers [outputs, inputs] they are."""
    device = generator.device
    if form == "int4":
        numbers = torch.randint(0, 16, (outputs, inputs), generator=generator, device=device)
        return (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8), numbers.float()
    if form == "int8":
        numbers = torch.randint(-128, 128, (outputs, inputs), generator=generator, device=device)
        return numbers.to(torch.int8), numbers.float()
    # All of float8_e4m3's numbers but its two NaNs, zeros of both signs and the smallest ones with them.
    bits = torch.randint(0, 254, (outputs, inputs), generator=generator, device=device)
    codes = (bits + (bits >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)
    return codes, codes.float()


def random_weight(
    form: str, outputs: int, inputs: int, group_size: int, zeros: str, generator: torch.Generator
) -> tuple[CodedWeight, Tensor]:
    """And what it stands for, float32 [outputs, inputs]. zeros: none, or which scales lie beside them."""
    codes, numbers = random_codes(form, outputs, inputs, generator)
    device = generator.device
    scales = torch.rand(outputs, inputs // group_size, generator=generator, device=device) / 8 + 0.01
    points = None
    if zeros != "none":
        scales = scales.half().float() if zeros == "float16" else scales.bfloat16().float()
        points = torch.randint(0, 17, scales.shape, generator=generator, device=device).float()
        points[0] = 3
    usual = 8.0 if form == "int4" else 0.0
    less = torch.full_like(scales, usual) if points is None else points
    want = (numbers - less.repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)
    weight = coded_weight(form, [codes], [scales], [points])  # type: ignore[arg-type]
    assert weight is not None
    return weight, want


def check(
    weight: CodedWeight, want: Tensor, rows: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    device = generator.device
    x = torch.randn(rows, want.shape[1], generator=generator, device=device).to(dtype)
    bias = torch.randn(len(want), generator=generator, device=device).to(dtype)
    product = CodedProduct(weight, bias)
    got = product(x)
    assert got.dtype == dtype
    exact = x.double() @ want.double().t() + bias.double()
    assert float((got.double() - exact).norm() / exact.norm()) < TOLERANCES[dtype]


GELUS = {"gelu": "none", "gelu_tanh": "tanh"}
FORMS = [
    ("int4", 128, "none"),
    ("int4", 128, "float16"),
    ("int4", 64, "bfloat16"),
    ("int4", 32, "float16"),
    ("int4", 384, "float16"),
    ("int8", 384, "none"),
    ("int8", 32, "float16"),
    ("int8", 128, "bfloat16"),
    ("fp8", 384, "none"),
    ("fp8", 128, "none"),
    ("fp8", 64, "none"),
    ("fp8", 32, "none"),
    ("int4", 96, "float16"),
    ("int8", 192, "none"),
    ("fp8", 96, "none"),
]
# What groups of other sizes become.
GROUP_SIZES = {384: 0, 192: 64, 96: 32}


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize(("form", "group_size", "zeros"), FORMS)
def test_products_are_those_of_what_codes_stand_for(
    form: str, group_size: int, zeros: str, rows: int, generator: torch.Generator
) -> None:
    weight, want = random_weight(form, 72, 384, group_size, zeros, generator)
    assert weight.group_size == GROUP_SIZES.get(group_size, group_size)

    check(weight, want, rows, torch.bfloat16, generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_inputs_of_other_types(form: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    if dtype == torch.float32 and generator.device.type == "cuda":
        pytest.skip("float32 on a GPU is left to torch")
    weight, want = random_weight(form, 40, 256, 256, "none", generator)

    check(weight, want, 5, dtype, generator)


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("inputs", [32, 96, 160, 416])
def test_inputs_that_fill_no_block(form: str, inputs: int, generator: torch.Generator) -> None:
    """With a scale of 32 inputs and with one of all of them."""
    for group_size in (32, inputs):
        weight, want = random_weight(form, 33, inputs, group_size, "none", generator)

        check(weight, want, 2, torch.bfloat16, generator)


@pytest.mark.parametrize("num_splits", [2, 5, 12])
@pytest.mark.parametrize("group_size", [128, 1536])
def test_splits_are_added_up_the_same_every_time(
    num_splits: int, group_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_product, "splits_of", lambda *_: num_splits)
    weight, want = random_weight("int4", 70, 1536, group_size, "float16", generator)
    x = torch.randn(4, 1536, generator=generator, device=generator.device).bfloat16()
    product = CodedProduct(weight, None)
    first, second = product(x), product(x)

    assert torch.equal(first, second)
    exact = x.double() @ want.double().t()
    assert float((first.double() - exact).norm() / exact.norm()) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_gate_and_up_are_multiplied_at_once(
    form: str,
    activation: Activation,
    num_splits: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """38 of each: a tile ends within them."""
    monkeypatch.setattr(coded_product, "splits_of", lambda *_: num_splits)
    weight, want = random_weight(form, 76, 384, 384, "none", generator)
    x = torch.randn(3, 384, generator=generator, device=generator.device).bfloat16() / 64
    bias = torch.randn(76, generator=generator, device=generator.device).bfloat16()

    got = CodedProduct(weight, bias)(x, activation)
    gate, up = (x.float() @ want.t() + bias.float()).bfloat16().float().chunk(2, -1)
    exact = silu(gate) if activation == "silu" else gelu(gate, approximate=GELUS[activation])
    exact = (exact * up).double()
    assert float((got.double() - exact).norm() / exact.norm()) < 6e-3


def test_no_rows_give_no_rows(generator: torch.Generator) -> None:
    weight, _ = random_weight("int4", 64, 128, 128, "none", generator)

    assert CodedProduct(weight, None)(torch.empty(0, 128, device=generator.device)).shape == (0, 64)


def test_rows_may_lie_apart(generator: torch.Generator) -> None:
    weight, want = random_weight("int4", 64, 256, 128, "none", generator)
    wide = torch.randn(3, 512, generator=generator, device=generator.device).bfloat16()

    got = CodedProduct(weight, None)(wide[:, 256:])

    torch.testing.assert_close(got.double(), wide[:, 256:].double() @ want.double().t(), rtol=1e-2, atol=1e-1)


def test_parts_with_unlike_groups_are_one_weight(generator: torch.Generator) -> None:
    """One scale of all inputs beside one of each 128, as where tools quantize projections apart."""
    parts = [random_codes("int4", 24, 256, generator) for _ in range(2)]
    scales = [torch.rand(24, count, generator=generator, device=generator.device) for count in (1, 2)]
    weight = coded_weight("int4", [codes for codes, _ in parts], scales)
    assert weight is not None
    want = torch.cat(
        [
            (numbers - 8) * scale.repeat_interleave(256 // scale.shape[1], 1)
            for (_, numbers), scale in zip(parts, scales, strict=True)
        ]
    )

    check(weight, want, 3, torch.bfloat16, generator)


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("outputs", [(128, 256), (128, 100), (72, 128)], ids=str)
def test_scales_of_blocks_of_outputs(
    outputs: tuple[int, int], width: int, generator: torch.Generator
) -> None:
    """Parts that end within a block have it to themselves."""
    device = generator.device
    parts = [random_codes("fp8", count, 256, generator) for count in outputs]
    scales = [
        torch.rand(-(-count // 128), 256 // width, generator=generator, device=device) for count in outputs
    ]
    weight = coded_weight("fp8", [codes for codes, _ in parts], scales, scale_rows=128)
    assert weight is not None
    assert weight.scale_rows == (1 if outputs[0] % 128 else 128)
    want = torch.cat(
        [
            numbers * scale.repeat_interleave(128, 0)[: len(numbers)].repeat_interleave(width, 1)
            for (_, numbers), scale in zip(parts, scales, strict=True)
        ]
    )

    check(weight, want, 3, torch.bfloat16, generator)
    torch.testing.assert_close(coded_plain(weight, torch.float32), want)


@pytest.mark.parametrize(("form", "group_size", "zeros"), FORMS)
def test_plain_numbers_are_rounded_once(
    form: str, group_size: int, zeros: str, generator: torch.Generator
) -> None:
    weight, want = random_weight(form, 50, 384, group_size, zeros, generator)

    torch.testing.assert_close(plain_reference(weight), want, rtol=0, atol=0)
    torch.testing.assert_close(coded_plain(weight, torch.float16).float(), want, rtol=2**-11, atol=2**-24)
    # The interpreter cuts numbers off where a GPU rounds them.
    torch.testing.assert_close(coded_plain(weight, torch.bfloat16).float(), want, rtol=2**-7, atol=0)


def test_weights_that_chose_their_meanings_alone_can_share_one(generator: torch.Generator) -> None:
    """160 inputs: the last block is filled up."""
    codes, _ = random_codes("int4", 8, 160, generator)
    rough = (torch.rand(8, 5, generator=generator, device=generator.device) + 0.5).half().float()
    scales = {"float16": rough.half().float(), "bfloat16": (rough * 2**-30).bfloat16().float()}
    scales["float32"] = rough * (1 + 2**-20)
    weights = [coded_weight("int4", [codes], [one]) for one in scales.values()]
    found = [weight for weight in weights if weight is not None]
    assert [weight.meaning for weight in found] == list(scales)

    alike = in_one_meaning(found)
    assert alike is not None
    assert {weight.meaning for weight in alike} == {"float32"}
    for got, want in zip(alike, found, strict=True):
        assert torch.equal(plain_reference(got), plain_reference(want))
    zeros = torch.full_like(rough, 3)
    with_zeros = [coded_weight("int4", [codes], [scales[name]], [zeros]) for name in ("float16", "bfloat16")]
    assert in_one_meaning([weight for weight in with_zeros if weight is not None]) is None
    usual = coded_weight("int8", [codes], [rough[:, :1]])
    shifted = coded_weight("int8", [codes], [rough[:, :1]], [zeros[:, :1]])
    assert usual is not None
    assert shifted is not None
    pair = in_one_meaning([usual, shifted])
    assert pair is not None
    assert pair[1] is shifted
    assert torch.equal(plain_reference(pair[0]), plain_reference(usual))


def test_what_codes_cannot_hold_has_no_product(generator: torch.Generator) -> None:
    codes, _ = random_codes("int4", 8, 96, generator)
    scales = torch.ones(8, 2, device=generator.device)
    halves = torch.full_like(scales, 7.5)
    fine = torch.full_like(scales, 1 + 2**-20)

    assert coded_weight("int4", [codes], [scales]) is None
    codes, _ = random_codes("int4", 8, 256, generator)
    assert coded_weight("int4", [codes], [scales], [halves]) is None
    assert coded_weight("int4", [codes], [fine], [halves.round()]) is not None
    assert coded_weight("int4", [codes], [fine], [halves.floor()]) is None


@pytest.mark.parametrize(
    ("rows", "want"), [(1, "rows_1"), (2, "rows_8"), (8, "rows_8"), (64, "rows_64"), (65, "rows_many")]
)
def test_classes_of_rows(rows: int, want: str) -> None:
    assert row_products.class_of_rows(rows) == want


def test_splits_fill_the_multiprocessors_but_not_with_crumbs(device: torch.device) -> None:
    gpu = gpu_of(device)
    count = gpu.num_multiprocessors

    assert row_products.splits_of(count, 1000, 4, gpu) == 4
    assert row_products.splits_of(8 * count, 1000, 4, gpu) == 1
    assert row_products.splits_of(1, 9, 4, gpu) == 2
    assert row_products.splits_of(1, 1, 4, gpu) == 1


@triton.jit  # type: ignore[untyped-decorator]
def own_blocks_kernel(  # type: ignore[no-untyped-def]
    splits, out, most_blocks: tl.constexpr, most_splits: tl.constexpr
):
    """Of 1 to `most_blocks` blocks, each among so many splits, the first and end of each split."""
    blocks, split = tl.arange(0, most_blocks)[:, None], tl.arange(0, most_splits)[None, :]
    num_splits = tl.load(splits + blocks)
    first, end = row_products.own_blocks(blocks + 1, split, num_splits)
    place = 2 * (blocks * most_splits + split)
    tl.store(out + place, first, mask=split < num_splits)
    tl.store(out + place + 1, end, mask=split < num_splits)


@pytest.mark.parametrize("wanted", range(1, row_products.MOST_SPLITS + 1))
def test_splits_have_all_blocks_between_them_and_each_has_some(wanted: int, device: torch.device) -> None:
    most_blocks, most_splits = 256, row_products.MOST_SPLITS
    splits = [row_products.filled(wanted, blocks) for blocks in range(1, most_blocks + 1)]
    out = torch.full((most_blocks, most_splits, 2), -1, dtype=torch.int32, device=device)

    own_blocks_kernel[(1,)](
        torch.tensor(splits, dtype=torch.int32, device=device), out, most_blocks, most_splits
    )

    for num_blocks, (num_splits, bounds) in enumerate(zip(splits, out.tolist(), strict=True), 1):
        firsts, ends = zip(*bounds[:num_splits], strict=True)
        assert (*firsts, num_blocks) == (0, *ends)
        sizes = [end - first for first, end in bounds[:num_splits]]
        assert min(sizes) >= 1
        assert max(sizes) == -(-num_blocks // wanted)
        assert num_splits <= wanted
