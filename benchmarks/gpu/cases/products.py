"""Products of rows with a weight: plain by cuBLAS, gated, of codes, and of codes with codes."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from benchmarks.gpu import costs
from benchmarks.gpu.cases.case import Case, Peer, Result, Work, normal
from benchmarks.gpu.costs import WEIGHT_BITS, Weights
from torch import Generator, Tensor

from headway_runtime.kernels.triton import coded_plain, coded_product, coded_rows, coded_rows_product
from headway_runtime.kernels.triton.coded_plain import plain_reference
from headway_runtime.kernels.triton.coded_product import CodedProduct
from headway_runtime.kernels.triton.coded_rows import CodedRows, coded_rows_reference
from headway_runtime.kernels.triton.coded_rows_product import CodedRowsProduct, RowWeight
from headway_runtime.kernels.triton.coded_weight import CodedWeight, Form, coded_weight
from headway_runtime.kernels.triton.gate import gate_by_torch
from headway_runtime.kernels.triton.gated_product import GatedProduct, gated_product_by_torch
from headway_runtime.kernels.triton.launch import DEFAULT, gpu_of
from headway_runtime.kernels.triton.row_products import class_of_rows
from headway_runtime.kernels.triton.thin_product import ThinProduct, thin_product_by_torch
from headway_runtime.layers.coded_linear import PlainProduct, ScaledProduct
from headway_runtime.layers.quantizer import int4_group_size
from headway_runtime.model_config import Activation

# As `configurations/` names them. fp8 is e4m3.
FORM_WEIGHTS: dict[Form, Weights] = {"int4": "int4", "int8": "int8", "fp8": "fp8"}
SCALE_BLOCK = 128
LARGEST_FLOAT8 = 448.0
# Standard deviation of codes that are all equally likely, for int4 and int8.
CODE_DEVIATIONS = {"int4": 4.6, "int8": 73.9}
# Rows from which PyTorch's product of int8 works.
LEAST_INT_MM_ROWS = 17
INNER_TILES = 8

Shape = tuple[int, int]


def plain_case(name: str, rows: int, shape: Shape) -> Case:
    """shape: outputs and inputs. cuBLAS, by itself: what codes and mixtures are held against."""
    outputs, inputs = shape

    def make(generator: Generator) -> Work:
        x, weight = normal(generator, rows, inputs), _weight(generator, shape)
        return Work(
            lambda: functional.linear(x, weight), lambda: functional.linear(x.float(), weight.float())
        )

    return Case(name, "cublas", None, make, costs.product(rows, outputs, inputs))


def gated_case(
    name: str, rows: int, shape: Shape, activation: Activation = "silu", *, has_bias: bool = False
) -> Case:
    """shape: of the merged gate and up projection."""
    outputs, inputs = shape
    gated = GatedProduct(activation)

    def make(generator: Generator) -> Work:
        x, weight = normal(generator, rows, inputs), _weight(generator, shape)
        bias = normal(generator, outputs) if has_bias else None
        return Work(
            lambda: gated(x, weight, bias),
            lambda: gated_product_by_torch(x.float(), weight.float(), bias, activation),
            peers={"cublas": lambda: lambda: _gated_by_torch(functional.linear(x, weight, bias))},
        )

    shape_class = str(max(16, 1 << (rows - 1).bit_length()))
    cost = costs.product(rows, outputs, inputs, is_gated=True)
    return Case(name, "gated_product", shape_class, make, cost)


def thin_case(name: str, rows: int, shape: Shape, *, has_bias: bool = False) -> Case:
    """shape: outputs and inputs."""
    outputs, inputs = shape

    def make(generator: Generator) -> Work:
        x, weight = normal(generator, rows, inputs), _weight(generator, shape)
        bias = normal(generator, outputs) if has_bias else None
        product = ThinProduct(weight, bias)
        return Work(
            lambda: product(x),
            lambda: thin_product_by_torch(x.float(), weight.float(), bias),
            peers={"cublas": lambda: lambda: functional.linear(x, weight, bias)},
        )

    return Case(name, "thin_product", DEFAULT, make, costs.product(rows, outputs, inputs))


def coded_case(
    name: str,
    form: Form,
    rows: int,
    shape: Shape,
    *,
    activation: Activation | None = None,
    group_size: int | None = None,
    zeros: Literal["none", "float16", "bfloat16"] = "none",
    scale_rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> Case:
    """Weights of codes, rows as they are. group_size: inputs that share a scale; None: the usual ones.

    zeros: which 16-bit scales zero points lie beside, if any. scale_rows: outputs that share a scale.
    """
    outputs, inputs = shape

    def make(generator: Generator) -> Work:
        weight = random_codes(
            form, shape, generator, group_size=group_size, zeros=zeros, scale_rows=scale_rows
        )
        x = normal(generator, rows, inputs, dtype=dtype)
        bias = normal(generator, outputs, dtype=dtype) if has_bias else None
        product = CodedProduct(weight, bias)

        def exact() -> Result:
            both = functional.linear(
                x.float(), plain_reference(weight), None if bias is None else bias.float()
            )
            if activation is None:
                return both
            found = gate_by_torch(both, activation)
            assert isinstance(found, Tensor)
            return found

        peers = _coded_peers(form, x, weight, activation, generator)
        return Work(lambda: product(x, activation), exact, peers=peers)

    bits = WEIGHT_BITS[FORM_WEIGHTS[form]]
    cost = costs.product(rows, outputs, inputs, bits=bits, is_gated=activation is not None)
    return Case(name, coded_product.KERNELS[form], class_of_rows(rows), make, cost)


def plain_numbers_case(name: str, form: Form, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A weight of codes turned into plain numbers."""

    def make(generator: Generator) -> Work:
        weight = random_codes(form, shape, generator)
        return Work(lambda: coded_plain.coded_plain(weight, dtype), lambda: plain_reference(weight))

    cost = costs.plain_numbers(*shape, WEIGHT_BITS[FORM_WEIGHTS[form]])
    return Case(name, coded_plain.KERNEL, form, make, cost, tolerance=4e-3)


def many_rows_case(name: str, form: Form, rows: int, shape: Shape) -> Case:
    """What layers do with more rows than products of codes are for: plain numbers, or for fp8 rows as fp8."""
    outputs, inputs = shape
    is_fp8 = form == "fp8"

    def make(generator: Generator) -> Work:
        weight = random_codes(form, shape, generator)
        x = normal(generator, rows, inputs)
        if not is_fp8:
            many: Callable[[Tensor], Tensor] = PlainProduct(weight, None)
        else:
            many = ScaledProduct(weight.codes, weight.meanings.flatten(), None)

        def exact() -> Result:
            own = _decoded(coded_rows_reference(x, torch.float8_e4m3fn)) if is_fp8 else x.float()
            return functional.linear(own, plain_reference(weight))

        return Work(lambda: many(x), exact, peers=_coded_peers(form, x, weight, None, generator))

    cost = costs.product(
        rows,
        outputs,
        inputs,
        bits=WEIGHT_BITS[FORM_WEIGHTS[form]],
        unit="float8" if is_fp8 else "bfloat16",
    )
    return Case(name, "scaled_mm" if is_fp8 else "plain_product", None, make, cost)


def coded_rows_case(name: str, rows: int, size: int, dtype: torch.dtype, **kinds: Any) -> Case:
    """Rows that become codes. kinds: of `coded_rows`."""

    def make(generator: Generator) -> Work:
        x = normal(generator, rows, size)
        if rows:
            x[rows // 2] = 0

        # A scale's last bit moves numbers across a half now and then, so what codes stand for is compared.
        return Work(
            lambda: coded_rows.coded_rows(x, dtype, **kinds),
            lambda: _decoded(coded_rows_reference(x, dtype, **kinds)),
            _decoded,
        )

    shape_class = str(max(coded_rows.GROUP, 1 << (size - 1).bit_length()))
    return Case(name, coded_rows.KERNEL, shape_class, make, costs.coded_rows(rows, size), tolerance=2e-3)


def codes_product_case(
    name: str,
    rows: int,
    shape: Shape,
    kind: Literal["int8", "int8 ranges", "fp8 blocks"],
    *,
    has_bias: bool = False,
) -> Case:
    """Products of codes with codes, rows being codes already."""
    outputs, inputs = shape
    is_fp8 = kind == "fp8 blocks"

    def make(generator: Generator) -> Work:
        weight = _row_weight(shape, generator, is_fp8=is_fp8)
        if kind == "int8":
            weight = RowWeight(weight.codes, weight.scales)
        x, bias = normal(generator, rows, inputs), normal(generator, outputs) if has_bias else None
        codes = coded_rows.coded_rows(
            x,
            torch.float8_e4m3fn if is_fp8 else torch.int8,
            in_groups=is_fp8,
            is_symmetric=kind != "int8 ranges",
        )
        product = CodedRowsProduct(weight, bias)
        return Work(
            lambda: product(codes, torch.bfloat16),
            lambda: coded_rows_product.product_reference(codes, weight, bias),
            peers=_codes_peers(rows, codes, weight, shape, generator),
        )

    cost = costs.product(rows, outputs, inputs, bits=8.0, unit="float8" if is_fp8 else "int8", input_bytes=1)
    return Case(name, coded_rows_product.KERNEL, class_of_rows(rows), make, cost)


def random_codes(
    form: Form,
    shape: Shape,
    generator: Generator,
    *,
    group_size: int | None = None,
    zeros: Literal["none", "float16", "bfloat16"] = "none",
    scale_rows: int = 1,
) -> CodedWeight:
    """Of about unit gain. See `coded_case`."""
    outputs, inputs = shape
    device = generator.device
    if group_size is None:
        group_size = int4_group_size(inputs) if form == "int4" else inputs
    num_scales = (-(-outputs // scale_rows), inputs // group_size)
    deviation = CODE_DEVIATIONS.get(form, 100.0) * math.sqrt(inputs)
    scales = (torch.rand(num_scales, generator=generator, device=device) + 0.5) / deviation
    scales = scales.bfloat16().float() if zeros == "bfloat16" else scales.half().float()
    points = None
    if zeros != "none":
        points = torch.randint(0, 16, num_scales, generator=generator, device=device).float()
    if form == "fp8":
        codes = _float8(generator, shape)
    else:
        size = inputs // 2 if form == "int4" else inputs
        codes = torch.randint(0, 256, (outputs, size), generator=generator, device=device).to(torch.uint8)
        codes = codes if form == "int4" else codes.view(torch.int8)
    weight = coded_weight(form, [codes], [scales], [points], scale_rows=scale_rows)
    assert weight is not None, f"no product multiplies {form} {shape} in groups of {group_size}"
    return weight


def _float8(generator: Generator, shape: Shape) -> Tensor:
    """Of all sizes; before PyTorch 2.15 what is larger than the largest became no number."""
    wide = normal(generator, *shape, dtype=torch.float32).mul_(100)
    return wide.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)


def _weight(generator: Generator, shape: Shape) -> Tensor:
    return normal(generator, *shape, dtype=torch.float32).div_(math.sqrt(shape[1])).bfloat16()


def _row_weight(shape: Shape, generator: Generator, *, is_fp8: bool) -> RowWeight:
    outputs, inputs = shape
    device = generator.device
    if is_fp8:
        codes = _float8(generator, shape)
        blocks = (-(-outputs // SCALE_BLOCK), -(-inputs // SCALE_BLOCK))
        return RowWeight(codes, torch.rand(blocks, generator=generator, device=device) / 100 + 1e-3)
    codes = torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scales = torch.rand(outputs, generator=generator, device=device) / 100 + 1e-3
    return RowWeight(codes, scales, codes.sum(1, dtype=torch.int32))


def _decoded(rows: CodedRows) -> Tensor:
    """What codes stand for, float32."""
    numbers = rows.codes.float()
    if rows.zeros is not None:
        numbers = numbers - rows.zeros[:, None]
    if rows.scales.dim() == 1:
        return numbers * rows.scales[:, None]
    return numbers * rows.scales.repeat_interleave(coded_rows.GROUP, 1)[:, : numbers.shape[1]]


def _gated_by_torch(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def _coded_peers(
    form: Form, x: Tensor, weight: CodedWeight, activation: Activation | None, generator: Generator
) -> dict[str, Peer]:
    """cuBLAS in bfloat16; PyTorch's own product of 4 bits (gpt-fast's), and of 8-bit floats."""
    shape = (weight.num_outputs, weight.num_inputs)
    if x.dtype != torch.bfloat16:
        return {}

    def ended(result: Tensor) -> Tensor:
        return result if activation is None else _gated_by_torch(result)

    def cublas() -> Callable[[], object]:
        plain = _weight(generator, shape)
        return lambda: ended(functional.linear(x, plain))

    peers: dict[str, Peer] = {"cublas": cublas}
    if x.device.type == "cpu":
        return peers
    if form == "int4" and weight.group_size == SCALE_BLOCK:
        peers["tinygemm"] = lambda: _tinygemm(x, shape, generator, ended)
    if form == "fp8" and len(x) >= 16 and gpu_of(x.device).capability >= 89:
        peers["scaled_mm"] = lambda: _scaled_mm(x, shape, generator, ended)
    return peers


def _tinygemm(
    x: Tensor, shape: Shape, generator: Generator, ended: Callable[[Tensor], Tensor]
) -> Callable[[], object]:
    outputs, inputs = shape
    device = generator.device
    packed = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, device=device)
    codes = torch._convert_weight_to_int4pack(packed.to(torch.uint8), INNER_TILES)
    meanings = normal(generator, inputs // SCALE_BLOCK, outputs, 2)
    return lambda: ended(torch._weight_int4pack_mm(x, codes, SCALE_BLOCK, meanings))


def _scaled_mm(
    x: Tensor, shape: Shape, generator: Generator, ended: Callable[[Tensor], Tensor]
) -> Callable[[], object]:
    """Of rows that are codes already."""
    rows = x.to(torch.float8_e4m3fn)
    codes = normal(generator, *shape).to(torch.float8_e4m3fn).t()
    of_rows = torch.ones(len(x), 1, device=x.device)
    of_outputs = torch.ones(1, shape[0], device=x.device)
    return lambda: ended(
        torch._scaled_mm(rows, codes, scale_a=of_rows, scale_b=of_outputs, out_dtype=torch.bfloat16)
    )


def _codes_peers(
    rows: int, codes: CodedRows, weight: RowWeight, shape: Shape, generator: Generator
) -> dict[str, Peer]:
    plain = normal(generator, rows, shape[1])

    def cublas() -> Callable[[], object]:
        numbers = _weight(generator, shape)
        return lambda: functional.linear(plain, numbers)

    peers: dict[str, Peer] = {"cublas": cublas}
    if generator.device.type == "cpu":
        return peers
    if weight.codes.dtype == torch.int8 and rows >= LEAST_INT_MM_ROWS:
        peers["int_mm"] = lambda: lambda: torch._int_mm(codes.codes, weight.codes.t())
    elif weight.codes.dtype != torch.int8 and rows >= 16:
        peers["scaled_mm"] = lambda: _scaled_mm(plain, shape, generator, lambda result: result)
    return peers
