"""What each kernel must move and compute at least, and what a GPU's ceilings make of that. Imports no torch.

Bytes are of device memory: each input read once, each output written once; of a mixture, the experts that so
many rows meet when all are chosen alike. Operations count a multiplication and an addition as two. The larger
of bytes over bandwidth and operations over the rate of the unit that does them is the floor: no version of
the kernel runs much faster, and how far one is above it says what is left to win.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["bfloat16", "float8", "int8"]
Weights = Literal["none", "fp8", "int8", "int4"]
KVName = Literal["bfloat16", "fp8", "int8"]

NUMBER_BYTES = 2
# Of a layer's weight with its scales: of int4 a word of 32 bits for each 128 inputs (see coded_weight.py).
WEIGHT_BITS: dict[Weights, float] = {"none": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
# The head loses no more than to 8 bits.
HEAD_BITS: dict[Weights, float] = {"none": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 8.0}
# Of one number, and besides for each token and head.
KV_BYTES: dict[KVName, tuple[int, int]] = {"bfloat16": (2, 0), "fp8": (1, 4), "int8": (1, 4)}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes_per_second: of a large copy, read and written. The others: operations of a large product.

    A GPU that does not multiply 8-bit floats has None for those; such products are then bfloat16's.
    """

    bytes_per_second: float
    bfloat16_per_second: float
    float8_per_second: float | None = None
    int8_per_second: float | None = None

    def operations_per_second(self, unit: Unit) -> float:
        own = {"float8": self.float8_per_second, "int8": self.int8_per_second}.get(unit)
        return self.bfloat16_per_second if own is None else own


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one launch, or of several that do one thing together. unit: what its products are of."""

    num_bytes: float
    operations: float = 0.0
    unit: Unit = "bfloat16"

    def byte_seconds(self, ceilings: Ceilings) -> float:
        return self.num_bytes / ceilings.bytes_per_second

    def operation_seconds(self, ceilings: Ceilings) -> float:
        return self.operations / ceilings.operations_per_second(self.unit)

    def floor_seconds(self, ceilings: Ceilings) -> float:
        return max(self.byte_seconds(ceilings), self.operation_seconds(ceilings))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. middle: of the MLP, or of each expert. num_experts: 0 for a plain MLP."""

    vocab_size: int
    hidden: int
    middle: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    normalizes_heads: bool
    num_experts: int
    num_used: int

    @property
    def num_groups(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the products that each token goes through, but for experts'."""
        queries, kv = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        found = {"qkv": (queries + kv, self.hidden), "output": (self.hidden, queries)}
        if self.num_experts:
            found["router"] = (self.num_experts, self.hidden)
        else:
            found |= {"gate_up": (2 * self.middle, self.hidden), "down": (self.hidden, self.middle)}
        return found

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.middle if self.num_experts else 0

    @property
    def weights_of_token(self) -> int:
        """Of a layer, that one token goes through."""
        plain = sum(outputs * inputs for outputs, inputs in self.projections.values())
        return plain + self.num_used * self.expert_weights


def model_shape(config: dict[str, Any]) -> ModelShape:
    """config: as config.json has it."""
    num_experts = config.get("num_experts", 0)
    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        middle=config["moe_intermediate_size"] if num_experts else config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        normalizes_heads=config["model_type"].startswith("qwen3"),
        num_experts=num_experts,
        num_used=config.get("num_experts_per_tok", 0),
    )


def experts_met(rows: int, num_experts: int, num_used: int) -> float:
    """How many of them so many rows go through, if all are chosen alike."""
    if not num_experts:
        return 0.0
    missed: float = (1.0 - num_used / num_experts) ** rows
    return num_experts * (1.0 - missed)


def product(
    rows: int,
    outputs: int,
    inputs: int,
    *,
    bits: float = 16.0,
    unit: Unit = "bfloat16",
    input_bytes: int = NUMBER_BYTES,
    is_gated: bool = False,
) -> Cost:
    """x @ weight.T. is_gated: half of the outputs are gates of the others, and gone."""
    written = rows * outputs * NUMBER_BYTES / (2 if is_gated else 1)
    num_bytes = outputs * inputs * bits / 8 + rows * inputs * input_bytes + written
    return Cost(num_bytes, 2.0 * rows * outputs * inputs, unit)


def attention(model: ModelShape, lengths: Sequence[tuple[int, int]], kv: KVName) -> Cost:
    """Of one layer. lengths: rows and whole context of each sequence; each row sees all up to itself."""
    number, scale = KV_BYTES[kv]
    per_token = 2 * model.num_kv_heads * (model.head_dim * number + scale)
    rows = sum(count for count, _ in lengths)
    pairs = sum(count * context - count * (count - 1) / 2 for count, context in lengths)
    size = model.num_heads * model.head_dim
    num_bytes = per_token * sum(context for _, context in lengths) + 2 * rows * size * NUMBER_BYTES
    return Cost(num_bytes, 4.0 * size * pairs)


def norm(rows: int, size: int, *, adds: bool, code_bytes: int | None = None) -> Cost:
    """adds: a delta, to the rows. code_bytes: of a number as a code; None: the result is plain."""
    written = NUMBER_BYTES if code_bytes is None else code_bytes
    per_number = NUMBER_BYTES + (2 * NUMBER_BYTES if adds else 0) + written
    return Cost(rows * size * per_number + size * NUMBER_BYTES)


def rotate_and_store(model: ModelShape, rows: int, kv: KVName) -> Cost:
    """Queries are read and written, keys and values read and stored; cosines and sines are read."""
    number, scale = KV_BYTES[kv]
    planes = 2 * model.num_kv_heads
    queries = 2 * model.num_heads * model.head_dim * NUMBER_BYTES
    stored = planes * (model.head_dim * (NUMBER_BYTES + number) + scale)
    return Cost(rows * (queries + stored + 2 * model.head_dim * NUMBER_BYTES))


def gate(rows: int, size: int, *, code_bytes: int | None = None) -> Cost:
    """activation(gate) * up of rows of 2 * size."""
    written = NUMBER_BYTES if code_bytes is None else code_bytes
    return Cost(rows * size * (2 * NUMBER_BYTES + written))


def coded_rows(rows: int, size: int) -> Cost:
    """Codes of one byte."""
    return Cost(rows * size * (NUMBER_BYTES + 1))


def plain_numbers(outputs: int, inputs: int, bits: float) -> Cost:
    """A weight of codes turned into bfloat16."""
    return Cost(outputs * inputs * (bits / 8 + NUMBER_BYTES))


def experts(model: ModelShape, rows: int, bits: float) -> Cost:
    """Both products of all experts: weights that are met, rows in, gated middles out and in, results out."""
    slots = rows * model.num_used
    weights = experts_met(rows, model.num_experts, model.num_used) * model.expert_weights * bits / 8
    numbers = rows * model.hidden + slots * (2 * model.middle + model.hidden)
    return Cost(weights + numbers * NUMBER_BYTES, 2.0 * slots * model.expert_weights)


def expert_sum(model: ModelShape, rows: int) -> Cost:
    return Cost(rows * model.hidden * (model.num_used + 1) * NUMBER_BYTES)


def vocabulary(rows: int, vocab_size: int) -> Cost:
    """Logits of bfloat16 that are read once."""
    return Cost(rows * vocab_size * NUMBER_BYTES)


def edits(rows: int, vocab_size: int) -> Cost:
    """Logits copied to float32, and a bit for each token."""
    return Cost(rows * vocab_size * (NUMBER_BYTES + 4 + 1 / 8))


def layer_weight_bytes(model: ModelShape, rows: int, weights: Weights) -> float:
    """Of one layer's weights, that a step of so many rows reads. A router is never quantized."""
    total = 0.0
    for name, (outputs, inputs) in model.projections.items():
        total += outputs * inputs * (16.0 if name == "router" else WEIGHT_BITS[weights]) / 8
    met = experts_met(rows, model.num_experts, model.num_used)
    return total + met * model.expert_weights * WEIGHT_BITS[weights] / 8


def decode_step(
    model: ModelShape, batch: int, context: int, weights: Weights = "none", kv: KVName = "bfloat16"
) -> Cost:
    """Weights and all sequences' KV, each read once; the operations of both."""
    attended = attention(model, [(1, context)] * batch, kv)
    head = model.vocab_size * model.hidden
    num_bytes = model.num_layers * (layer_weight_bytes(model, batch, weights) + attended.num_bytes)
    operations = batch * 2.0 * (model.num_layers * model.weights_of_token + head)
    return Cost(
        num_bytes + head * HEAD_BITS[weights] / 8, operations + model.num_layers * attended.operations
    )


def prompt(model: ModelShape, length: int, weights: Weights = "none") -> Cost:
    """One prompt, alone. The head is computed for the last token only.

    fp8 multiplies inputs as fp8 too, and attends in bfloat16; other codes become plain numbers.
    """
    attended = attention(model, [(length, length)], "bfloat16")
    head = model.vocab_size * model.hidden
    products = 2.0 * (model.num_layers * model.weights_of_token * length + head)
    num_bytes = model.num_layers * (layer_weight_bytes(model, length, weights) + attended.num_bytes)
    num_bytes += head * HEAD_BITS[weights] / 8
    # Attention in bfloat16 costs as much as twice the operations in fp8.
    unit: Unit = "float8" if weights == "fp8" else "bfloat16"
    factor = 2.0 if weights == "fp8" else 1.0
    return Cost(num_bytes, products + factor * model.num_layers * attended.operations, unit)
