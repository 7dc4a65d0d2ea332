"""What an H200 should take, from bytes and operations alone: predictions, written before anything is run.

    PYTHONPATH=runtime python -m benchmarks.gpu.predict [--page docs/gpu.md]

A launch is predicted to take a gap, in which nothing runs, and then the longest of three times: the least
that any launch takes; its bytes over bandwidth; its operations over the rate; the last two divided by the
share of them that its kernel is expected to reach. Shares are the middle of what the kernels' files say, with
their reasons; for cuBLAS and PyTorch's products what they are known for. A step is its launches, one after
the other, as in a CUDA graph. Nothing here was measured on a GPU but the ceilings; imports no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import costs, goals
from benchmarks.gpu.costs import Ceilings, Cost, KVName, ModelShape, Weights, model_shape
from benchmarks.gpu.goals import Goal
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B

# Of one H200: a copy of 8.6 GB, and a product of 8192 x 8192 x 8192 on random numbers, as measured through
# PyTorch; of 8 bits the datasheet's rates in the same proportion to what is reached in bfloat16.
H200 = Ceilings(4.3e12, 788e12, 788e12 * 2, 788e12 * 2)
# Between dependent launches in a CUDA graph, and what any launch takes then.
GAP_MICROSECONDS = 1.3
LEAST_MICROSECONDS = 0.7
# What the host does before a prompt's first launch and after its last, assumed.
HOST_MICROSECONDS_OF_PROMPT = 1500.0
# Of the rate of products, by FlashAttention-2's kernels, which are PyTorch's.
FLASH_ATTENTION_SHARE = 0.475
BEGIN, END = "<!-- predictions: written by benchmarks/gpu/predict.py -->", "<!-- end of predictions -->"


@dataclass(frozen=True, slots=True)
class Expected:
    """Shares of bandwidth and of the rate that a kernel reaches. least: microseconds of any launch of it."""

    of_bytes: float
    of_operations: float = 1.0
    least: float = LEAST_MICROSECONDS


EXPECTED: dict[str, Expected] = {
    "cublas": Expected(0.88, 0.85),
    "scaled_mm": Expected(0.85, 0.75),
    "paged_decode": Expected(0.875, 0.30, least=5.0),
    "paged_decode codes": Expected(0.80, 0.30, least=5.0),
    "paged_prefill": Expected(0.80, 0.55, least=3.0),
    "gated_product": Expected(0.85, 0.40),
    # Of operations as much as makes plain numbers the faster way from 384 rows on, where the tables say so.
    "coded_product": Expected(0.80, 0.50, least=2.0),
    "coded_plain": Expected(0.80),
    "coded_rows": Expected(0.80),
    "coded_rows_product": Expected(0.75, 0.60),
    "expert_product": Expected(0.75, 0.50, least=3.0),
    "expert_choice": Expected(0.5, least=2.0),
    "expert_order": Expected(0.5, least=3.0),
    "expert_sum": Expected(0.80),
    "norm": Expected(0.90),
    "rotate_and_store": Expected(0.85),
    "gate": Expected(0.90),
    "vocabulary_blocks": Expected(0.85, least=1.7),
    "draw": Expected(0.85, least=4.0),
    "lookup": Expected(0.5),
}
_FORMS: tuple[Weights, ...] = ("int4", "fp8", "int8")
_RATIOS: tuple[tuple[Weights, float], ...] = (("int4", goals.INT4_RATIO), ("fp8", goals.FP8_RATIO))
# Products of codes are for up to so many rows, `gated_product.py` too.
MOST_CODED_ROWS: dict[Weights, int] = {"fp8": 64, "int4": 384, "int8": 384}
MOST_GATED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: of EXPECTED."""

    name: str
    kernel: str
    cost: Cost

    def microseconds(self, ceilings: Ceilings = H200) -> float:
        expected = EXPECTED[self.kernel]
        return GAP_MICROSECONDS + max(
            expected.least,
            self.cost.byte_seconds(ceilings) / expected.of_bytes * 1e6,
            self.cost.operation_seconds(ceilings) / expected.of_operations * 1e6,
        )


def decode_attention(
    model: ModelShape, batch: int, context: int, kv: KVName = "bfloat16", queries: int = 1
) -> Launch:
    kernel = "paged_decode" if kv == "bfloat16" else "paged_decode codes"
    return Launch("attention", kernel, costs.attention(model, [(queries, context)] * batch, kv))


def prompt_attention(model: ModelShape, length: int) -> Launch:
    return Launch("attention", "paged_prefill", costs.attention(model, [(length, length)], "bfloat16"))


def layer_launches(
    model: ModelShape, rows: int, attention: Launch, weights: Weights = "none", kv: KVName = "bfloat16"
) -> list[Launch]:
    """Of one layer, in their order, as layers choose their kernels by the number of rows."""
    products = _Products(model, rows, weights)
    norm = Launch(
        "add and norm", "norm", costs.norm(rows, model.hidden, adds=True, code_bytes=products.code_bytes)
    )
    found = [
        norm,
        *products.of("qkv"),
        Launch("rotate and store", "rotate_and_store", costs.rotate_and_store(model, rows, kv)),
        attention,
    ]
    if products.code_bytes:
        queries = model.num_heads * model.head_dim
        found.append(Launch("codes of rows", "coded_rows", costs.coded_rows(rows, queries)))
    found += [*products.of("output"), norm]
    if model.num_experts:
        return [*found, *products.of("router"), *_experts(model, rows, weights)]
    return [*found, *products.gated(), *products.of("down")]


@dataclass(frozen=True, slots=True)
class _Products:
    """How layers multiply so many rows with such weights."""

    model: ModelShape
    rows: int
    weights: Weights

    @property
    def is_coded(self) -> bool:
        """Codes are read as they are."""
        return self.weights != "none" and self.rows <= MOST_CODED_ROWS[self.weights]

    @property
    def code_bytes(self) -> int | None:
        """Of a number of the rows, where these are codes too."""
        return 1 if self.weights == "fp8" and not self.is_coded else None

    def of(self, name: str) -> list[Launch]:
        """One launch; two where codes become plain numbers first."""
        outputs, inputs = self.model.projections[name]
        rows, bits = self.rows, costs.WEIGHT_BITS[self.weights]
        if name == "router" or self.weights == "none":
            return [Launch(name, "cublas", costs.product(rows, outputs, inputs))]
        if self.is_coded:
            return [Launch(name, "coded_product", costs.product(rows, outputs, inputs, bits=bits))]
        if self.code_bytes:
            cost = costs.product(rows, outputs, inputs, bits=bits, unit="float8", input_bytes=1)
            return [Launch(name, "scaled_mm", cost)]
        return [
            Launch(f"{name}, plain numbers", "coded_plain", costs.plain_numbers(outputs, inputs, bits)),
            Launch(name, "cublas", costs.product(rows, outputs, inputs)),
        ]

    def gated(self) -> list[Launch]:
        outputs, inputs = self.model.projections["gate_up"]
        if self.is_coded or (self.weights == "none" and self.rows <= MOST_GATED_ROWS):
            bits = costs.WEIGHT_BITS[self.weights]
            cost = costs.product(self.rows, outputs, inputs, bits=bits, is_gated=True)
            return [Launch("gate and up, gated", "coded_product" if self.is_coded else "gated_product", cost)]
        gate = costs.gate(self.rows, self.model.middle, code_bytes=self.code_bytes)
        return [*self.of("gate_up"), Launch("gate", "gate", gate)]


def _experts(model: ModelShape, rows: int, weights: Weights) -> Iterator[Launch]:
    """Both products' cost is told of them together; two thirds of the weights are gate's and up's."""
    both = costs.experts(model, rows, costs.WEIGHT_BITS[weights])
    slots = rows * model.num_used
    small = Cost(rows * model.num_experts * 4.0)
    yield Launch("choice of experts", "expert_choice", small)
    yield Launch("order of experts", "expert_order", Cost(slots * 8.0))
    for name, share in (("experts' gate and up", 2 / 3), ("experts' down", 1 / 3)):
        yield Launch(name, "expert_product", Cost(both.num_bytes * share, both.operations * share))
    yield Launch("sum of experts", "expert_sum", costs.expert_sum(model, rows))


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
            tuple(_experts(mixture, rows, "none")),
        )
        for rows in (1, 32, 256, 8192)
    ]
    return alone + mixtures


def _as(name: str, launch: Launch) -> tuple[str, str, Cost]:
    return name, launch.kernel, launch.cost


def step_launches(model: ModelShape, batch: int, weights: Weights = "none") -> list[Launch]:
    """What a recorded decode step has besides its layers: places of tokens, embedding, head and sampler."""
    rows = Cost(2.0 * batch * model.hidden * costs.NUMBER_BYTES)
    table = Cost(2.0 * batch * model.head_dim * costs.NUMBER_BYTES)
    bits = costs.HEAD_BITS[weights]
    is_coded = weights != "none"
    kernel = "coded_product" if is_coded else "cublas"
    head = costs.product(batch, model.vocab_size, model.hidden, bits=bits)
    return [
        Launch("places of tokens", "lookup", table),
        Launch("embedding", "lookup", rows),
        Launch("cosines", "lookup", table),
        Launch("sines", "lookup", table),
        Launch("last sum", "norm", Cost(1.5 * rows.num_bytes)),
        Launch("last norm", "norm", costs.norm(batch, model.hidden, adds=False)),
        Launch("head", kernel, head),
        Launch("blocks of logits", "vocabulary_blocks", costs.vocabulary(batch, model.vocab_size)),
        Launch("draw", "draw", Cost(batch * 1e4)),
    ]


def decode_microseconds(
    model: ModelShape,
    batch: int,
    context: int,
    weights: Weights = "none",
    kv: KVName = "bfloat16",
    ceilings: Ceilings = H200,
) -> float:
    """Of a step."""
    attention = decode_attention(model, batch, context, kv)
    launches = layer_launches(model, batch, attention, weights, kv)
    layer = sum(one.microseconds(ceilings) for one in launches)
    rest = sum(one.microseconds(ceilings) for one in step_launches(model, batch, weights))
    return model.num_layers * layer + rest


def prompt_microseconds(
    model: ModelShape, length: int, weights: Weights = "none", ceilings: Ceilings = H200
) -> float:
    """What the GPU computes for one prompt: launches are long enough to hide the host's work."""
    launches = layer_launches(model, length, prompt_attention(model, length), weights)
    rest = sum(one.microseconds(ceilings) for one in step_launches(model, 1, weights))
    return model.num_layers * sum(one.microseconds(ceilings) for one in launches) + rest


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


def page_section() -> str:
    """Markdown: launches of a layer, steps, prompts and goals."""
    llama, qwen, mixture = (model_shape(one) for one in (LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B))
    parts = [
        "### Goals\n",
        _table(
            ("goal, on an H200", "wanted", "predicted, not measured"),
            [
                (one.name, f"{'at least' if one.is_least else 'at most'} {one.wanted:g}", _number(one.found))
                for one in predicted_goals()
            ],
        ),
        "### Kernels\n",
        "Alone, as `kernels` times them, by the names of its rows. Predicted, not measured.\n",
        _kernels_table(),
        "### A layer of a decode step, launch by launch\n",
        "Microseconds, predicted, not measured; Llama-3.1-8B, contexts of 512 tokens.\n",
        _layer_table(
            llama, ((1, "none"), (32, "none"), (256, "none"), (1, "int4"), (1, "fp8"), (128, "fp8"))
        ),
        "Qwen3-30B-A3B, bfloat16.\n",
        _layer_table(mixture, ((1, "none"), (32, "none"), (256, "none"))),
        "### Decode steps\n",
        "Milliseconds and output tokens/s, predicted, not measured; contexts of 512 tokens.\n",
        _steps_table(llama, qwen, mixture),
        "### Prompts\n",
        "Milliseconds of compute, predicted, not measured.\n",
        _prompts_table(llama, mixture),
    ]
    return "\n".join(parts)


def _kernels_table() -> str:
    rows = []
    for one in timed_kernels():
        floor = one.cost.floor_seconds(H200) * 1e6
        found = one.microseconds
        megabytes, operations = one.cost.num_bytes / 1e6, one.cost.operations / 1e9
        waits = "bytes" if one.cost.byte_seconds(H200) * 1e6 >= floor else "operations"
        rows.append(
            (
                one.name,
                f"{megabytes:,.1f}",
                f"{operations:,.1f}",
                f"{floor:,.1f}, {waits}",
                f"{found:,.1f}",
                f"{floor / found:.0%}",
            )
        )
    head = ("kernel", "MB", "billion operations", "floor, us", "predicted, us", "share of the floor")
    return _table(head, rows)


def _layer_table(model: ModelShape, columns: Sequence[tuple[int, Weights]]) -> str:
    found = [
        layer_launches(model, batch, decode_attention(model, batch, 512), weights)
        for batch, weights in columns
    ]
    names = list(dict.fromkeys(one.name for launches in found for one in launches))
    rows = []
    for name in names:
        cells = []
        for launches in found:
            own = [one.microseconds() for one in launches if one.name == name]
            cells.append(" + ".join(f"{one:.1f}" for one in own) or "-")
        rows.append((name, *cells))
    totals = [sum(one.microseconds() for one in launches) for launches in found]
    rows.append(("**launches**", *(str(len(launches)) for launches in found)))
    rows.append(("**together**", *(f"{total:.0f}" for total in totals)))
    heads = [f"{'bf16' if weights == 'none' else weights}, batch {batch}" for batch, weights in columns]
    return _table(("launch", *heads), rows)


def _steps_table(llama: ModelShape, qwen: ModelShape, mixture: ModelShape) -> str:
    rows: list[tuple[str, ...]] = []
    choices: list[tuple[str, ModelShape, Weights]] = [
        ("Llama-3.1-8B bf16", llama, "none"),
        ("Llama-3.1-8B fp8", llama, "fp8"),
        ("Llama-3.1-8B int4", llama, "int4"),
        ("Qwen3-8B bf16", qwen, "none"),
        ("Qwen3-30B-A3B bf16", mixture, "none"),
    ]
    batches = (1, 8, 32, 128, 256)
    for name, model, weights in choices:
        cells = []
        for batch in batches:
            step = decode_microseconds(model, batch, 512, weights)
            floor = costs.decode_step(model, batch, 512, weights).floor_seconds(H200) * 1e6
            cells.append(
                f"{step / 1e3:.2f} ms, {batch / step * 1e6:,.0f}/s ({floor / step:.0%} of the floor)"
            )
        rows.append((name, *cells))
    return _table(("", *(f"batch {batch}" for batch in batches)), rows)


def _prompts_table(llama: ModelShape, mixture: ModelShape) -> str:
    rows: list[tuple[str, ...]] = []
    choices: list[tuple[str, ModelShape, Weights]] = [
        ("Llama-3.1-8B bf16", llama, "none"),
        ("Llama-3.1-8B fp8", llama, "fp8"),
        ("Llama-3.1-8B int4", llama, "int4"),
        ("Qwen3-30B-A3B bf16", mixture, "none"),
    ]
    lengths = (2048, 8192, 32768)
    for name, model, weights in choices:
        cells = []
        for length in lengths:
            found = prompt_microseconds(model, length, weights)
            floor = costs.prompt(model, length, weights).floor_seconds(H200) * 1e6
            cells.append(f"{found / 1e3:.0f} ms ({floor / found:.0%} of the floor)")
        rows.append((name, *cells))
    return _table(("", *(f"{length:,} tokens" for length in lengths)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def with_section(page: str, section: str) -> str:
    """The page with what stands between the two marks replaced. ValueError without them."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the page has no {BEGIN!r} followed by {END!r}; add both where predictions belong")
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def main() -> None:
    """Print the section, or write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--page", type=Path, help="replace the predictions in this page")
    page = parser.parse_args().page
    if page is None:
        print(page_section())
    else:
        page.write_text(with_section(page.read_text(encoding="utf-8"), page_section()), encoding="utf-8")


if __name__ == "__main__":
    main()
