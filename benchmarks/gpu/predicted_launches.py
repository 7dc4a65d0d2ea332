"""What a launch, a layer and a step should take of an H200, from bytes and operations alone.

A launch is predicted to take a gap, in which nothing runs, and then the longest of three times: the least
that any launch takes; its bytes over bandwidth; its operations over the rate; the last two divided by the
share of them that its kernel is expected to reach. Shares are the middle of what the kernels' files say, with
their reasons; for cuBLAS and PyTorch's products what they are known for. A step is its launches, one after
the other, as in a CUDA graph. Nothing here was measured on a GPU but the ceilings; imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu import costs
from benchmarks.gpu.costs import Ceilings, Cost, KVName, ModelShape, Weights

# Of one H200: a copy of 8.6 GB, and a product of 8192 x 8192 x 8192 on random numbers, as measured through
# PyTorch; of 8 bits the datasheet's rates in the same proportion to what is reached in bfloat16.
H200 = Ceilings(4.3e12, 788e12, 788e12 * 2, 788e12 * 2)
# Between dependent launches in a CUDA graph, and what any launch takes then.
GAP_MICROSECONDS = 1.3
LEAST_MICROSECONDS = 0.7


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
        return [*found, *products.of("router"), *expert_launches(model, rows, weights)]
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


def expert_launches(model: ModelShape, rows: int, weights: Weights) -> Iterator[Launch]:
    """Both products' cost is told of them together; two thirds of the weights are gate's and up's."""
    both = costs.experts(model, rows, costs.WEIGHT_BITS[weights])
    slots = rows * model.num_used
    small = Cost(rows * model.num_experts * 4.0)
    yield Launch("choice of experts", "expert_choice", small)
    yield Launch("order of experts", "expert_order", Cost(slots * 8.0))
    for name, share in (("experts' gate and up", 2 / 3), ("experts' down", 1 / 3)):
        yield Launch(name, "expert_product", Cost(both.num_bytes * share, both.operations * share))
    yield Launch("sum of experts", "expert_sum", costs.expert_sum(model, rows))


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
