"""Bytes of all of a model's weights, part by part, as the engine holds them once they are loaded.

Walks the model as `models/` builds it: the same names, projections merged alike, the same exceptions.
"""

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from headway_runtime.fit.linear_bytes import (
    SCALE_BYTES,
    Kept,
    gpu_group,
    is_compressed,
    kept_of,
    linear_bytes,
)
from headway_runtime.fit.placement import Placement
from headway_runtime.model_config import ModelConfig
from headway_runtime.quantization.choice import Quantization
from headway_runtime.quantization.scheme import Scheme

Part = Literal["embedding", "attention", "MLP", "experts", "router", "norms", "head", "rotary tables"]
PARTS: tuple[Part, ...] = (
    "embedding",
    "attention",
    "MLP",
    "experts",
    "router",
    "norms",
    "head",
    "rotary tables",
)
# As `models.feed_forward` names them.
QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")
# How bfloat16 is said to be kept where it is compressed.
COMPRESSED = "bfloat16, 12 bits"
# Kept in float32 whatever is computed with.
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class PartBytes:
    """What some weights of a part take. kept_as: int4 and the like, or the dtype of plain numbers.

    extra_bytes: of the bytes, those of scales, zero points, orders of inputs and alignment.
    """

    part: Part
    kept_as: str
    num_weights: int
    num_bytes: int
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class _Projection:
    part: Part
    outputs: dict[str, int]
    inputs: int
    has_bias: bool


class _Totals:
    """Adds up; one list of numbers for each part and how it is kept."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[Part, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, part: Part, kept_as: str, num_weights: int, num_bytes: int, extra: int = 0) -> None:
        sums = self._sums[part, kept_as]
        for index, value in enumerate((num_weights, num_bytes, extra)):
            sums[index] += value

    def parts(self) -> tuple[PartBytes, ...]:
        ordered = sorted(self._sums.items(), key=lambda item: (PARTS.index(item[0][0]), -item[1][1]))
        return tuple(PartBytes(*key, *sums) for key, sums in ordered)


def weight_bytes(
    model: ModelConfig,
    quantization: Quantization,
    placement: Placement,
    num_positions: int,
    plain_modules: Set[str] = frozenset(),
) -> tuple[PartBytes, ...]:
    """num_positions: how long a sequence may become. plain_modules: plain whatever is configured."""
    totals = _Totals()
    hidden, dtype = model.hidden_size, placement.dtype
    size = placement.number_bytes
    vocabulary = model.vocab_size * hidden
    totals.add("embedding", dtype, vocabulary, vocabulary * size)
    widened = _widened_experts(model, quantization, placement, plain_modules)
    for one in _projections(model):
        _add_projection(totals, one, quantization, placement, plain_modules | widened)
    if model.tie_word_embeddings and placement.packs_plain:
        # A second copy, as products read it.
        found = linear_bytes([model.vocab_size], hidden, Kept("plain"), placement)
        name = COMPRESSED if is_compressed([model.vocab_size], hidden, placement) else dtype
        totals.add("head", name, 0, found.total, found.extra)
    _add_norms(totals, model, placement)
    tables = len(model.ropes) * num_positions * model.head_dim * 2
    totals.add("rotary tables", dtype, 0, tables * size)
    return totals.parts()


def _add_projection(
    totals: _Totals, one: _Projection, quantization: Quantization, placement: Placement, plain: Set[str]
) -> None:
    kept = [(own, _kept(name, one, quantization, placement, plain)) for name, own in one.outputs.items()]
    for how, group in groupby(kept, key=lambda pair: pair[1]):
        outputs = [own for own, _ in group]
        found = linear_bytes(outputs, one.inputs, how, placement)
        if how.kind != "plain":
            name = how.kind.removesuffix(" group")
        else:
            name = COMPRESSED if is_compressed(outputs, one.inputs, placement) else placement.dtype
        totals.add(one.part, name, sum(outputs) * one.inputs, found.total, found.extra)
    if one.has_bias:
        count = sum(one.outputs.values())
        totals.add(one.part, placement.dtype, count, count * placement.number_bytes)


def _widened_experts(
    model: ModelConfig, quantization: Quantization, placement: Placement, plain: Set[str]
) -> set[str]:
    """Modules of experts that a GPU's kernels multiply only as plain numbers (`layers.expert_products`)."""
    if not placement.attends_in_pages:
        return set()
    # Gate and up, or down, of all experts of a layer.
    together: defaultdict[tuple[str, bool], list[_Projection]] = defaultdict(list)
    for one in _projections(model):
        if one.part == "experts":
            together[next(iter(one.outputs)).split(".experts.")[0], len(one.outputs) == 1].append(one)
    found: set[str] = set()
    for alike in together.values():
        kept = {_kept(name, one, quantization, placement, plain) for one in alike for name in one.outputs}
        if len(kept) > 1 or not all(_is_multiplied(how, alike[0].inputs, placement) for how in kept):
            found.update(name for one in alike for name in one.outputs)
    return found


def _is_multiplied(kept: Kept, inputs: int, placement: Placement) -> bool:
    if kept.kind == "plain":
        return True
    group = kept.group if kept.block is None else kept.block[1]
    return placement.dtype != "float32" and gpu_group(group, inputs) is not None


def _kept(
    module: str, one: _Projection, quantization: Quantization, placement: Placement, plain: Set[str]
) -> Kept:
    how = None if one.part == "router" else quantization.of_module(module)
    return kept_of(None if isinstance(how, Scheme) and module in plain else how, one.inputs)


def _add_norms(totals: _Totals, model: ModelConfig, placement: Placement) -> None:
    is_gemma = model.architecture.startswith("Gemma")
    count = ((4 if is_gemma else 2) * model.num_layers + 1) * model.hidden_size
    # Gemma's are finer than what they multiply.
    size = FLOAT32_BYTES if is_gemma else placement.number_bytes
    totals.add("norms", "float32" if is_gemma else placement.dtype, count, count * size)
    if model.normalizes_heads:
        heads = model.num_attention_heads + model.num_kv_heads
        # Written out for each head.
        expanded = model.num_layers * heads * model.head_dim
        totals.add("norms", "float32", 2 * model.num_layers * model.head_dim, expanded * SCALE_BYTES)


def _projections(model: ModelConfig) -> Iterator[_Projection]:
    hidden, prefix = model.hidden_size, model.tensor_prefixes[0]
    query, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for index, layer in enumerate(model.layers):
        own = f"{prefix}layers.{index}."
        name = f"{own}self_attn"
        qkv = {f"{name}.q_proj": query, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        yield _Projection("attention", qkv, hidden, model.has_qkv_bias)
        yield _Projection("attention", {f"{name}.o_proj": hidden}, query, model.has_output_bias)
        if layer.has_experts and model.experts is not None:
            is_mixtral = model.architecture == "MixtralForCausalLM"
            mlp = f"{own}{'block_sparse_moe' if is_mixtral else 'mlp'}"
            yield _Projection("router", {f"{mlp}.gate": model.experts.num_experts}, hidden, has_bias=False)
            names = MIXTRAL_NAMES if is_mixtral else QWEN_NAMES
            for expert in range(model.experts.num_experts):
                yield from _mlp(
                    "experts", f"{mlp}.experts.{expert}", names, hidden, model.experts.size, model
                )
        else:
            yield from _mlp("MLP", f"{own}mlp", QWEN_NAMES, hidden, model.intermediate_size, model)
    if not model.tie_word_embeddings:
        yield _Projection("head", {_head_name(model): model.vocab_size}, hidden, has_bias=False)


def _mlp(
    part: Part, name: str, names: tuple[str, str, str], hidden: int, size: int, model: ModelConfig
) -> Iterator[_Projection]:
    gate, up, down = (f"{name}.{one}" for one in names)
    yield _Projection(part, {gate: size, up: size}, hidden, model.has_mlp_bias)
    yield _Projection(part, {down: hidden}, size, model.has_mlp_bias)


def _head_name(model: ModelConfig) -> str:
    is_within = model.tensor_prefixes[0].startswith("language_model.")
    return "language_model.lm_head" if is_within else "lm_head"


def total_bytes(parts: tuple[PartBytes, ...]) -> int:
    return sum(one.num_bytes for one in parts)
