"""What rows of the stage `kernels`, and the goals, should come to; see predicted_launches.py."""

from dataclasses import dataclass

from benchmarks.gpu import costs, goals
from benchmarks.gpu.costs import Cost, ModelShape, Weights, model_shape
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.predicted_launches import (
    EXPECTED,
    H200,
    Launch,
    decode_attention,
    decode_microseconds,
    expert_launches,
    prompt_attention,
    prompt_microseconds,
)
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B

# What the host does before a prompt's first launch and after its last, assumed.
HOST_MICROSECONDS_OF_PROMPT = 1500.0
# Of the rate of products, by FlashAttention-2's kernels, which are PyTorch's.
FLASH_ATTENTION_SHARE = 0.475
_FORMS: tuple[Weights, ...] = ("int4", "fp8", "int8")
_RATIOS: tuple[tuple[Weights, float], ...] = (("int4", goals.INT4_RATIO), ("fp8", goals.FP8_RATIO))


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A row of the stage `kernels`, by its name there (cases/timed.py), and the launches that it is."""

    name: str
    cost: Cost
    launches: tuple[Launch, ...]

    @property
    def microseconds(self) -> float:
        return sum(one.microseconds() for one in self.launches)


def timed_kernels() -> list[TimedKernel]:
    """Some of those that are timed."""
    llama, mixture = model_shape(LLAMA_8B), model_shape(QWEN3_30B_A3B)
    outputs, inputs = llama.projections["gate_up"]
    shape = f"{outputs} x {inputs}"

    def product(rows: int, weights: Weights = "none", *, is_gated: bool = False) -> Cost:
        return costs.product(rows, outputs, inputs, bits=costs.WEIGHT_BITS[weights], is_gated=is_gated)

    by_fp8 = costs.product(2048, outputs, inputs, bits=8.0, unit="float8", input_bytes=1)
    found: list[tuple[str, str, Cost]] = [
        _as("decode attention, 32 at 8192, bfloat16", decode_attention(llama, 32, 8192)),
        _as("decode attention, 32 at 8192, fp8", decode_attention(llama, 32, 8192, "fp8")),
        _as("decode attention, 5 tokens of 8 at 2048", decode_attention(llama, 8, 2048, queries=5)),
        _as("prefill attention, 8192 of 8192, bfloat16", prompt_attention(llama, 8192)),
        _as("prefill attention, 2048 of 2048, bfloat16", prompt_attention(llama, 2048)),
    ]
    for rows in (1, 32):
        found.append((f"gated product, {rows} x {shape}", "gated_product", product(rows, is_gated=True)))
        for form in _FORMS:
            cost = product(rows, form, is_gated=True)
            found.append((f"{form} product, {rows} x {shape}", "coded_product", cost))
    rotated, logits = costs.rotate_and_store(llama, 8192, "bfloat16"), llama.vocab_size
    found += [
        (f"int4 to plain numbers, {shape}", "coded_plain", costs.plain_numbers(outputs, inputs, 4.25)),
        (f"cublas gate_up, 2048 x {shape}", "cublas", product(2048)),
        (f"fp8 blocks by fp8, 2048 x {shape}", "coded_rows_product", by_fp8),
        ("add and norm, 8192 x 4096", "norm", costs.norm(8192, 4096, adds=True)),
        ("rotate and store, 8192 rows", "rotate_and_store", rotated),
        (f"gate, 8192 x {llama.middle}", "gate", costs.gate(8192, llama.middle)),
        (f"blocks of logits, 256 x {logits}", "vocabulary_blocks", costs.vocabulary(256, logits)),
    ]
    alone = [TimedKernel(name, cost, (Launch(name, kernel, cost),)) for name, kernel, cost in found]
    mixtures = [
        TimedKernel(
            f"experts, {rows} rows",
            costs.experts(mixture, rows, 16.0),
            tuple(expert_launches(mixture, rows, "none")),
        )
        for rows in (1, 32, 256, 8192)
    ]
    return alone + mixtures


def _as(name: str, launch: Launch) -> tuple[str, str, Cost]:
    return name, launch.kernel, launch.cost


def load_seconds(model: ModelShape, requests: int, inputs: int, outputs: int) -> float:
    """All prompts first, in steps of 8,192 tokens, then all decodes together."""
    prompts = requests * prompt_microseconds(model, inputs)
    # Contexts grow by one token a step: the mean one stands for all.
    decodes = outputs * decode_microseconds(model, requests, inputs + outputs // 2)
    return (prompts + decodes) / 1e6


def predicted_goals() -> list[Goal]:
    """What of the goals follows from bytes and operations; the host's share does not."""
    llama, qwen = model_shape(LLAMA_8B), model_shape(QWEN3_8B)
    plain = decode_microseconds(llama, 1, 512)
    floor = costs.decode_step(llama, 1, 512).floor_seconds(H200) * 1e6
    attention = decode_attention(llama, 32, 8192)
    attention_floor = attention.cost.floor_seconds(H200) * 1e6
    compute = prompt_microseconds(llama, 2048)
    return [
        Goal("batch-1 bf16 decode, share of copy bandwidth", floor / plain, goals.BATCH_1_SHARE),
        *(
            Goal(f"{form} over bf16 at batch 1", plain / decode_microseconds(llama, 1, 512, form), wanted)
            for form, wanted in _RATIOS
        ),
        Goal(
            "decode attention at 8k, batch 32, share of bandwidth",
            attention_floor / attention.microseconds(),
            goals.DECODE_ATTENTION_SHARE,
        ),
        Goal(
            "prefill attention over PyTorch's FlashAttention",
            EXPECTED["paged_prefill"].of_operations / FLASH_ATTENTION_SHARE,
            goals.PREFILL_ATTENTION_RATIO,
        ),
        Goal(
            "Qwen3-8B 1024/1024 x 256, output tokens/s",
            256 * 1024 / load_seconds(qwen, 256, 1024, 1024),
            goals.QWEN_TOKENS_PER_SECOND,
        ),
        Goal(
            "TTFT of a 2k prompt over its compute",
            (compute + HOST_MICROSECONDS_OF_PROMPT) / compute,
            goals.TTFT_RATIO,
            is_least=False,
        ),
    ]
