"""How fast a GPU could be at best: bytes over bandwidth, and FLOPs over arithmetic. Bounds, not predictions.

    time per output token  >= max(bytes / bandwidth, FLOPs / compute) of a decode step of n sequences
        bytes: weights (embedding left out; of the experts, those that n tokens meet) + n contexts of KV, of
        which a layer with a window reads no more than that
        FLOPs: n (2 weights that a token goes through + 4 context Q), Q: numbers of query heads, all layers
    time to first token    >= max(weight bytes / bandwidth, FLOPs / compute) of a prompt of the context
        FLOPs: 2 weights a token, without the head but for the last, + 4 Q for each pair of tokens that attend

n tokens meet E (1 - (1 - k / E) ** n) of E experts, k each, if all are chosen alike. Over several GPUs both
are shared out evenly, and their talking costs nothing: bounds all the more. Where the engine multiplies some
8-bit codes by codes on that GPU, all FLOPs count as such: bounds once more.
"""

from dataclasses import dataclass

from headway_runtime.fit.gpu_kinds import GpuKind
from headway_runtime.fit.memory_fit import Fit
from headway_runtime.fit.weight_bytes import Part
from headway_runtime.model_config import ModelConfig, StoredDtype
from headway_runtime.quantization.choice import Quantization

DEFAULT_EFFICIENCY = 0.7
SECONDS_PER_HOUR = 3600
# Multiplying and adding up one weight, or one number of a query with one of a key and of a value.
FLOPS_PER_WEIGHT = 2
FLOPS_PER_PAIR = 4
# Of `kernels.triton.coded_rows_product` and `coded_rows`: from which capability on inputs become fp8, for
# weights with scales of which blocks.
FP8_CAPABILITY = 90
FP8_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Bounds:
    """At `concurrency` sequences of the context's length. All times are at least what they say."""

    concurrency: int
    decode_bytes: int
    decode_flops: float
    prefill_flops: float
    tpot_seconds: float
    ttft_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, at most."""
        return self.concurrency / self.tpot_seconds


def bounds(fit: Fit, kind: GpuKind, concurrency: int) -> Bounds:
    """Of all ranks together, a GPU of that kind each."""
    question, model = fit.question, fit.model
    experts = _experts_met(model, concurrency)
    weights = _read_bytes(fit, experts)
    seen = sum(_seen(model, question.context - 1))
    decode_bytes = weights + concurrency * seen * fit.kv_bytes_per_token // model.num_layers
    per_token = FLOPS_PER_WEIGHT * _weights_of_token(fit)
    attended = FLOPS_PER_PAIR * model.num_attention_heads * model.head_dim
    context = question.context
    decode_flops = concurrency * (per_token + attended * seen)
    head = FLOPS_PER_WEIGHT * model.vocab_size * model.hidden_size
    prefill_flops = context * (per_token - head) + head + attended * _pairs(model, context)
    compute = _flops_per_second(fit, kind)
    return Bounds(
        concurrency,
        decode_bytes,
        decode_flops,
        prefill_flops,
        max(decode_bytes / kind.bytes_per_second, decode_flops / compute),
        max(_read_bytes(fit, _experts_met(model, context)) / kind.bytes_per_second, prefill_flops / compute),
    )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What parts of a step take at least, in seconds, each on its own: added up they are no bound.

    weights: read once a step. prefill_token, prefill_pair: of a prompt's token, of each that lies before it.
    decode_sequence: its arithmetic. decode_token: of a token of context. With windows a pair and a token of
    context cost what those of a whole context do on average, and those of a shorter one more.
    """

    weights: float
    prefill_token: float
    prefill_pair: float
    decode_sequence: float
    decode_token: float


def step_costs(fit: Fit, kind: GpuKind, concurrency: int) -> StepCosts:
    """Of one rank, whose share is `fit`. concurrency: tokens whose experts a step meets."""
    model, context = fit.model, fit.question.context
    per_token = FLOPS_PER_WEIGHT * _weights_of_token(fit)
    head = FLOPS_PER_WEIGHT * model.vocab_size * model.hidden_size
    compute = _flops_per_second(fit, kind)
    attended = FLOPS_PER_PAIR * model.num_attention_heads * model.head_dim
    # Of all layers, that are computed and read.
    pairs = _pairs(model, context) / (context * (context + 1) // 2)
    tokens = sum(_seen(model, context - 1)) / (context * model.num_layers)
    return StepCosts(
        _read_bytes(fit, _experts_met(model, concurrency)) / kind.bytes_per_second,
        (per_token - head) / compute,
        attended * pairs / kind.flops,
        per_token / compute,
        fit.kv_bytes_per_token * tokens / kind.bytes_per_second,
    )


def _flops_per_second(fit: Fit, kind: GpuKind) -> float:
    """Of the fastest products that the engine makes of these weights there (docs/quantization.md)."""
    placement, quantization = fit.question.placement, fit.question.model.quantization
    found: list[float | None] = [kind.flops]
    if placement.num_multiprocessors and placement.dtype != "float32":
        if quantization.has_integer_inputs:
            found.append(kind.int8_flops)
        if kind.capability >= FP8_CAPABILITY and _multiplies_fp8(quantization, placement.dtype):
            found.append(kind.fp8_flops)
    return max(one for one in found if one is not None)


def _multiplies_fp8(quantization: Quantization, dtype: StoredDtype) -> bool:
    """Whether some inputs become fp8: for scales of outputs in bfloat16, for those of blocks in any type."""
    if quantization.stored is None:
        return quantization.online == "fp8" and dtype == "bfloat16"
    blocks = {scheme.block for scheme in quantization.stored.schemes if scheme.form == "fp8"}
    return FP8_BLOCK in blocks or (None in blocks and dtype == "bfloat16")


def usd_per_million_tokens(found: Bounds, num_gpus: int, usd_per_gpu_hour: float, efficiency: float) -> float:
    """Of output tokens, where the engine reaches that part of the bound and decodes all the time."""
    tokens_per_hour = found.tokens_per_second * efficiency * SECONDS_PER_HOUR
    return usd_per_gpu_hour * num_gpus / tokens_per_hour * 1e6


def _experts_met(model: ModelConfig, tokens: int) -> float:
    """Which part of all experts."""
    if model.experts is None:
        return 1.0
    return float(1.0 - (1.0 - model.experts.num_used / model.experts.num_experts) ** tokens)


def _read_bytes(fit: Fit, experts: float) -> int:
    """Of weights, by one step."""
    total = 0.0
    is_tied = fit.model.tie_word_embeddings and not fit.question.placement.packs_plain
    skipped: set[Part] = {"rotary tables"} if is_tied else {"rotary tables", "embedding"}
    for one in fit.weights:
        if one.part not in skipped:
            total += one.num_bytes * (experts if one.part == "experts" else 1.0)
    return int(total)


def _weights_of_token(fit: Fit) -> float:
    """That one token goes through, the head's too."""
    experts = _experts_met(fit.model, 1)
    shares: dict[Part, float] = {"attention": 1.0, "MLP": 1.0, "router": 1.0, "experts": experts}
    layers = sum(one.num_weights * shares.get(one.part, 0.0) for one in fit.weights)
    return layers + fit.model.vocab_size * fit.model.hidden_size


def _seen(model: ModelConfig, position: int) -> list[int]:
    """Tokens that one at that position attends to, by layer."""
    return [position + 1 if one.window is None else min(position + 1, one.window) for one in model.layers]


def _pairs(model: ModelConfig, context: int) -> int:
    """Of tokens that attend to each other in all layers."""
    total = 0
    for one in model.layers:
        short = context if one.window is None else min(context, one.window)
        total += short * (short + 1) // 2 + (context - short) * short
    return total
