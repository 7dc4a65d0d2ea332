"""Memory that computing the largest step takes beside weights and KV: activations, workspace, buffers.

With T rows, H hidden size, Q and K numbers of all query heads and of all keys and values, I the MLP's middle,
V the vocabulary, C the context, S sampled rows, and b bytes of a number, what is alive at once is

    attention  b (3 T H + 2 T D + T (2 Q + K) + max(workspace, T H))   D: head size, for each rotary table
    MLP        b (3 T H + 2 T D + R (H + max(3 I, I + H)))             R: rows at once; all of them on a GPU
    experts    b (5 T H + 2 T D + 2 n T H + T max(3 I, I + H))         n: experts of a token; all T to one
    sampling   b (T H + 2 S H + S V) + float32 copies of S rows' logits (edits, softmax)

and the largest of these counts; of several ranks the first, which has all of V. Gemma, which norms an MLP's
result, takes another T H there. On a GPU from capability 8.0 on attention has no workspace but what decodes
leave each other, which is kept (`gpu_workspace`). On a CPU it is what a chunk's keys and values take,
gathered, and the scores of 128 rows against them. Where batched products are not the fast way (bfloat16
without products of it), PyTorch's own attention takes its result and, for all of a step, masks; where there
are no kernels for decodes (older GPUs), the gathered KV of all of one layer's sequences as well.

What products of plain weights take beside their results on a CPU is `product_bytes`' to say.

Where inputs of products are quantized too (W8A8), a product of I inputs and O outputs takes for each row,
beside what it returns, a byte for each input and its scale; on a CPU without a kernel for that PyTorch's
operators do it, in float32: the input, its whole numbers and the result, not all at once
(`layers.quantized_linear`).
"""

from dataclasses import dataclass

from headway_runtime.fit.gpu_workspace import decode_workspace_bytes
from headway_runtime.fit.placement import Placement
from headway_runtime.fit.product_bytes import FLOAT32_BYTES, half_product_bytes, plain_product_bytes
from headway_runtime.model_config import ModelConfig

# Of `models.feed_forward`, `layers.chunk_products` and `draws`.
CPU_MLP_ROWS = 256
CHUNK_ROWS = 128
CPU_TOKENS_AT_ONCE = 1 << 19
INTEGER_BYTES = 8
# Of `kernels.cpu.row_numbers`: a row's scale and offset.
ROW_SCALING_BYTES = 8
# Of a tile of coded weights that is turned into plain numbers: as float32 twice, then in the model's dtype.
TILE_BYTES = (1 << 18) * (2 * FLOAT32_BYTES + 2)


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step. num_tokens: of all prompts' chunks. num_sampled: rows of logits.

    chunk_tokens: of the longest of these chunks, the context's last, and attended one at a time; as many as
    num_tokens where there is but one.
    decoded_context: of all sequences that are decoded at once. has_codes: whether weights are coded; is_int4:
    all of them in 4 bits. kv_is_coded: whether keys and values are.
    has_integer_inputs: whether inputs of products are turned into 8-bit integers.
    """

    num_tokens: int
    context: int
    num_sampled: int
    decoded_context: int
    chunk_tokens: int
    has_codes: bool = False
    kv_is_coded: bool = False
    has_integer_inputs: bool = False
    is_int4: bool = False


@dataclass(frozen=True, slots=True)
class StepBytes:
    """By stage; the largest of the first four is the peak. kept: buffers that outlive a step."""

    num_tokens: int
    attention: int
    feed_forward: int
    sampling: int
    kept: int

    @property
    def peak(self) -> int:
        return max(self.attention, self.feed_forward, self.sampling)

    @property
    def total(self) -> int:
        """What memory must have room for."""
        return self.peak + self.kept

    @property
    def stage(self) -> str:
        """Which stage is the largest."""
        stages = {
            "attention": self.attention,
            "feed-forward": self.feed_forward,
            "logits and sampling": self.sampling,
        }
        return max(stages, key=stages.__getitem__)


def step_bytes(model: ModelConfig, placement: Placement, step: Step, vocab_size: int) -> StepBytes:
    """What the formulas at the top come to. model: one rank's share. vocab_size: of the whole model."""
    b, tokens, hidden = placement.number_bytes, step.num_tokens, model.hidden_size
    rotations = 2 * tokens * model.head_dim * len(model.ropes)
    # Hidden states, and what the layer before adds to them.
    base = b * (2 * tokens * hidden + rotations)
    query, kv = model.num_attention_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    attention = base + _attention(model, placement, step, _tile(placement, step, hidden, query + kv))
    masks = tokens * step.context * b * _num_masks(model, placement, step)
    # On a GPU experts' codes are never numbers.
    has_dense = placement.is_cpu or not all(layer.has_experts for layer in model.layers)
    middle = _tile(placement, step, hidden, 2 * model.intermediate_size) if has_dense else 0
    feed_forward = base + _feed_forward(model, placement, step, middle)
    return StepBytes(
        tokens,
        attention + masks,
        feed_forward + masks,
        masks + _sampling(model.hidden_size, vocab_size, placement, step),
        _kept(model, vocab_size, placement, step),
    )


def _tile(placement: Placement, step: Step, inputs: int, outputs: int) -> int:
    """What turning a merged projection's codes into plain numbers takes: a tile of them, on a GPU all."""
    if not step.has_codes:
        return 0
    if not placement.is_cpu:
        return 0 if step.has_integer_inputs else placement.number_bytes * inputs * outputs
    has_products = placement.has_strips or (step.is_int4 and placement.has_torch_int4)
    copied = half_product_bytes(placement, step.num_tokens) if placement.multiplies_halves else 0
    return 0 if has_products else TILE_BYTES + copied


def _attention(model: ModelConfig, placement: Placement, step: Step, tile: int) -> int:
    """tile: what products take while they turn codes into numbers, of all rows together."""
    b, tokens, hidden = placement.number_bytes, step.num_tokens, model.hidden_size
    query, kv = model.num_attention_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    if placement.attends_in_pages:
        workspace = 0
    elif placement.has_kernels and placement.attends_by_products:
        workspace = b * _product_numbers(model, step)
        if step.context == step.chunk_tokens:  # a prompt's first chunk is not gathered
            workspace += b * kv * step.chunk_tokens
    elif placement.has_kernels:  # which gather, into a buffer that is kept
        workspace = b * step.chunk_tokens * query + _capped_bytes(model, step)
    else:
        workspace = _torch_workspace(model, placement, step)
    # The projection back, of what is attended; its layer's norm makes another of it in Gemma.
    workspace = max(workspace, b * tokens * hidden + tile)
    plain = b * tokens * (hidden + 2 * query + kv) + workspace
    if not step.has_codes:
        there = b * tokens * (query + kv) + plain_product_bytes(placement, tokens, hidden, query + kv)
        back = b * tokens * (hidden + 2 * query + kv) + plain_product_bytes(placement, tokens, query, hidden)
        plain = max(plain, there, back)
    if not step.has_integer_inputs:
        return plain
    before = b * (hidden + query + kv) + _integer_input_bytes(placement, hidden, query + kv, tile // tokens)
    after = b * (2 * hidden + 2 * query + kv) + _integer_input_bytes(placement, query, hidden, tile // tokens)
    return max(plain, tokens * before, tokens * after)


def _product_numbers(model: ModelConfig, step: Step) -> int:
    """Of products on a CPU: the scores of some rows while those of the rows before are still there."""
    rows = min(CHUNK_ROWS, step.chunk_tokens)
    window = _widest_window(model)
    seen = step.context
    before = max(0, seen - CHUNK_ROWS) if step.chunk_tokens > CHUNK_ROWS else 0
    if window is not None:
        seen, before = (min(one, window + rows) for one in (seen, before))
    # Queries and what they attended to, of both.
    others = 3 * rows * model.num_attention_heads * model.head_dim
    return rows * model.num_attention_heads * (seen + before) + others


def _torch_workspace(model: ModelConfig, placement: Placement, step: Step) -> int:
    """Of PyTorch's attention: of one chunk, or of decodes, whose KV is gathered."""
    b = placement.number_bytes
    query, kv = model.num_attention_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    # Codes, and float32 before and after their scale, on the way.
    per_number = b + (1 + 2 * FLOAT32_BYTES if step.kv_is_coded else 0)
    chunk = kv * (0 if step.context == step.chunk_tokens else step.context) * per_number
    chunk += 2 * b * step.chunk_tokens * query + _capped_bytes(model, step)
    return max(chunk, step.decoded_context * (kv * per_number + b))


def _capped_bytes(model: ModelConfig, step: Step) -> int:
    """Of PyTorch's attention where scores are capped: keys, values and some rows of scores in float32."""
    if model.attention_soft_cap is None:
        return 0
    keys = 2 * model.num_attention_heads * model.head_dim * step.context
    scores = 3 * CHUNK_ROWS * model.num_attention_heads * step.context
    return FLOAT32_BYTES * (keys + scores)


def _feed_forward(model: ModelConfig, placement: Placement, step: Step, tile: int) -> int:
    b, hidden, tokens = placement.number_bytes, model.hidden_size, step.num_tokens
    largest = 0
    if not all(layer.has_experts for layer in model.layers):
        rows = min(tokens, CPU_MLP_ROWS) if placement.is_cpu else tokens
        middle = _middle_bytes(placement, step, (hidden, model.intermediate_size), rows, tile)
        # What its own norm makes of the result, in Gemma.
        normed = tokens * hidden if model.architecture.startswith("Gemma") else 0
        largest = b * (tokens * hidden + normed + rows * hidden) + middle
    if model.experts is not None:
        size, used = model.experts.size, model.experts.num_used
        middle = _middle_bytes(placement, step, (hidden, size), tokens, tile)
        own = b * tokens * (3 * hidden + 2 * used * hidden) + middle
        largest = max(largest, own + tokens * model.experts.num_experts * FLOAT32_BYTES)
    return largest


def _middle_bytes(placement: Placement, step: Step, sizes: tuple[int, int], rows: int, tile: int) -> int:
    """Of so many rows of an MLP: its first product with its gate, then its second one.

    sizes: of its input and of its middle. tile: as for attention.
    """
    (hidden, size), b = sizes, placement.number_bytes
    plain = b * rows * max(3 * size, size + hidden) + tile
    if not step.has_codes:
        there = b * rows * 2 * size + plain_product_bytes(placement, rows, hidden, 2 * size)
        back = b * rows * (size + hidden) + plain_product_bytes(placement, rows, size, hidden)
        plain = max(plain, there, back)
    if not step.has_integer_inputs:
        return plain
    own = tile // rows
    first = 2 * b * size + _integer_input_bytes(placement, hidden, 2 * size, own)
    second = b * (size + hidden) + _integer_input_bytes(placement, size, hidden, own)
    return max(plain - tile, rows * first, rows * second)


def _integer_input_bytes(placement: Placement, inputs: int, outputs: int, tile: int) -> int:
    """Of one row of a product whose input is quantized, beside its result in the model's dtype.

    tile: a row's part of what the product takes while it turns codes into numbers.
    """
    if placement.has_integer_products or not placement.is_cpu:
        return inputs + ROW_SCALING_BYTES + tile
    b = placement.number_bytes
    # Of float32, numbers are the same ones in the model's dtype, and the input is its own copy.
    copy, rounded = (0, 0) if b == FLOAT32_BYTES else (FLOAT32_BYTES * inputs, b * inputs)
    whole = FLOAT32_BYTES * inputs
    return max(copy + whole - b * outputs, whole + rounded + tile, whole + FLOAT32_BYTES * outputs)


def _sampling(hidden: int, vocabulary: int, placement: Placement, step: Step) -> int:
    """The head's product, then the dearest requests: their logits are edited, and drawn from with all
    filters."""
    b, rows = placement.number_bytes, step.num_sampled
    at_once = rows
    if placement.is_cpu:
        at_once = min(rows, max(1, CPU_TOKENS_AT_ONCE // vocabulary))
    edited = FLOAT32_BYTES * rows * vocabulary + 4 * FLOAT32_BYTES * at_once * vocabulary
    taken = max(edited, plain_product_bytes(placement, rows, hidden, vocabulary))
    return b * (step.num_tokens * hidden + 2 * rows * hidden + rows * vocabulary) + taken


def _kept(model: ModelConfig, vocab_size: int, placement: Placement, step: Step) -> int:
    """Step inputs, hashes of the vocabulary, and what kernels keep: on a GPU the parts of decodes, on a CPU
    room for a chunk's gathered context."""
    integers = INTEGER_BYTES * (3 * step.num_tokens + step.num_sampled + step.context)
    hashes = FLOAT32_BYTES * vocab_size
    gathered = 0
    if placement.has_kernels and step.context > step.chunk_tokens:
        gathered = (
            2
            * model.num_kv_heads
            * model.head_dim
            * _grown(step, _widest_window(model) if placement.attends_by_products else None)
            * placement.number_bytes
        )
    return integers + hashes + gathered + decode_workspace_bytes(model, placement.num_multiprocessors)


def _grown(step: Step, window: int | None) -> int:
    """Tokens that room is made for: at least doubled whenever a chunk needs more."""
    most = step.context if window is None else min(step.context, step.chunk_tokens + window + CHUNK_ROWS)
    room, context = 0, min(2 * step.chunk_tokens, most)
    while True:
        if context > room:
            room = max(context, 2 * room)
        if context == most:
            return room
        context = min(context + step.chunk_tokens, most)


def _num_masks(model: ModelConfig, placement: Placement, step: Step) -> int:
    """Of PyTorch's attention: one for each way in which layers attend. A causal first chunk needs none."""
    if placement.attends_in_pages or (placement.has_kernels and placement.attends_by_products):
        return 0
    windows = {layer.window for layer in model.layers}
    is_first = placement.has_kernels and step.context == step.chunk_tokens
    if is_first and model.attention_soft_cap is None:
        windows -= {None}
    return len(windows)


def _widest_window(model: ModelConfig) -> int | None:
    """None where a layer attends to everything."""
    windows = [layer.window for layer in model.layers]
    return None if None in windows else max(window for window in windows if window is not None)
