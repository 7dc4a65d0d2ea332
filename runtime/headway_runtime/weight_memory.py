"""How much memory a model's weights take, by its configuration and its quantization. Imports no torch.

Counts what is allocated: codes, and their scales and zero points as the products want them. Where there are
products of our own (`has_code_products`), scales lie beside the codes of at most 256 inputs, in float16 where
they are many; PyTorch's have them apart. Compressed bfloat16 (`compresses`) takes 12 bits a weight and
little beside.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headway_runtime.memory import DTYPE_BYTES
from headway_runtime.model_config import ModelConfig
from headway_runtime.quantization.choice import Online, Quantization
from headway_runtime.quantization.scheme import Form, Scheme

# As `kernels.cpu` packs codes, and `layers.quantizer` makes them.
MOST_INPUTS_PER_SCALE = 256
FEW_INPUTS_PER_SCALE = 128
CODES_PER_STEP = {"int4": 8, "int8": 4, "int8 group": 4, "fp8": 4}
INT4_GROUP_SIZES = (128, 64, 32)
SHORT_SCALE_BYTES, SCALE_BYTES, ORDER_BYTES = 2, 4, 8
# As `kernels.cpu.lossless_codes` has it: 12 bits, and what its tables and patches take.
PANEL, STEP_INPUTS = 16, 8
COMPRESSED_BYTES = 1.502
# Of an output's codes, where inputs are whole numbers too.
SUM_BYTES = 4
CODE_BITS = {"int4": 4, "int8": 8, "int8 group": 8, "fp8": 8}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer as a checkpoint names it."""

    module: str
    outputs: int
    inputs: int
    has_bias: bool = False


def linear_shapes(model: ModelConfig) -> Iterator[LinearShape]:
    """All linear layers; the head only where it is not the embedding, a router as plain as it stays."""
    hidden = model.hidden_size
    query, keys = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for index, layer in enumerate(model.layers):
        prefix = f"{model.tensor_prefixes[0]}layers.{index}"
        for name, outputs in (("q", query), ("k", keys), ("v", keys)):
            yield LinearShape(f"{prefix}.self_attn.{name}_proj", outputs, hidden, model.has_qkv_bias)
        yield LinearShape(f"{prefix}.self_attn.o_proj", hidden, query, model.has_output_bias)
        mlps = [(f"{prefix}.mlp", model.intermediate_size)]
        if layer.has_experts and model.experts is not None:
            experts = model.experts
            mlps = [(f"{prefix}.mlp.experts.{number}", experts.size) for number in range(experts.num_experts)]
        for mlp, size in mlps:
            yield LinearShape(f"{mlp}.gate_proj", size, hidden, model.has_mlp_bias)
            yield LinearShape(f"{mlp}.up_proj", size, hidden, model.has_mlp_bias)
            yield LinearShape(f"{mlp}.down_proj", hidden, size, model.has_mlp_bias)
    if not model.tie_word_embeddings:
        yield LinearShape("lm_head", model.vocab_size, hidden)


def linear_bytes(
    model: ModelConfig,
    quantization: Quantization,
    dtype: str,
    *,
    has_code_products: bool,
    compresses: bool = False,
) -> int:
    """Bytes of all linear layers' weights. dtype: of what is computed with."""
    total = 0
    for one in linear_shapes(model):
        kind = quantization.of_module(one.module)
        if kind is None:
            total += plain_bytes(one.outputs, one.inputs, dtype, compresses=compresses)
        else:
            total += _quantized_bytes(one, kind, dtype, has_code_products=has_code_products)
        total += one.outputs * DTYPE_BYTES[dtype] if one.has_bias else 0
    return total


def weight_bytes(
    model: ModelConfig,
    quantization: Quantization,
    dtype: str,
    *,
    has_code_products: bool,
    packs_plain: bool,
    compresses: bool = False,
) -> int:
    """Bytes of everything that is loaded.

    packs_plain: whether plain weights are put into another layout, as they are in bfloat16 on most CPUs: then
        a head that is the embedding is there twice.
    """
    embedding = model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]
    small = model.hidden_size * (2 * model.num_layers + 1)
    for layer in model.layers:
        if layer.has_experts and model.experts is not None:
            small += model.experts.num_experts * model.hidden_size
    plain = embedding + small * DTYPE_BYTES[dtype]
    if model.tie_word_embeddings and packs_plain and dtype == "bfloat16":
        plain += plain_bytes(model.vocab_size, model.hidden_size, dtype, compresses=compresses)
    return plain + linear_bytes(
        model, quantization, dtype, has_code_products=has_code_products, compresses=compresses
    )


def plain_bytes(outputs: int, inputs: int, dtype: str, *, compresses: bool) -> int:
    """Of a weight that is not quantized."""
    numbers = outputs * inputs
    if compresses and dtype == "bfloat16" and outputs % PANEL == inputs % STEP_INPUTS == 0:
        return int(numbers * COMPRESSED_BYTES)
    return numbers * DTYPE_BYTES[dtype]


def _quantized_bytes(
    shape: LinearShape, kind: Scheme | Online, dtype: str, *, has_code_products: bool
) -> int:
    form, per_scale, has_zeros, has_order = _parts(shape, kind)
    total = shape.outputs * shape.inputs * CODE_BITS[form] // 8 + (
        ORDER_BYTES * shape.inputs if has_order else 0
    )
    if has_code_products and dtype == "bfloat16":
        if isinstance(kind, Scheme) and kind.input is not None:
            return total + shape.outputs * (SCALE_BYTES + SUM_BYTES)
        is_short = per_scale <= FEW_INPUTS_PER_SCALE and form in ("int4", "int8 group")
        groups = shape.inputs // _group_inputs(per_scale, CODES_PER_STEP[form])
        own = SHORT_SCALE_BYTES if is_short else SCALE_BYTES
        return total + shape.outputs * groups * (own + (1 if has_zeros and form == "int4" else 0))
    block = kind.block if isinstance(kind, Scheme) else None
    rows = shape.outputs if block is None else -(-shape.outputs // block[0])
    # PyTorch's product of 4-bit weights in bfloat16 has a scale and a zero point of 2 bytes each.
    has_own_zeros = has_zeros and (form != "int4" or dtype != "bfloat16")
    return total + rows * -(-shape.inputs // per_scale) * SCALE_BYTES * (2 if has_own_zeros else 1)


def _parts(shape: LinearShape, kind: Scheme | Online) -> tuple[Form, int, bool, bool]:
    """Form, inputs that share a scale, whether there are zero points, and an order of inputs."""
    if not isinstance(kind, Scheme):
        sizes = INT4_GROUP_SIZES if kind == "int4" else ()
        return kind, next((size for size in sizes if shape.inputs % size == 0), shape.inputs), False, False
    per_scale = shape.inputs if kind.block is None else min(kind.block[1], shape.inputs)
    return kind.form, kind.group_size or per_scale, not kind.is_symmetric, kind.has_input_order


def _group_inputs(per_scale: int, step: int) -> int:
    sizes = range(min(per_scale, MOST_INPUTS_PER_SCALE), 0, -1)
    return next((size for size in sizes if per_scale % size == 0 and size % step == 0), per_scale)
