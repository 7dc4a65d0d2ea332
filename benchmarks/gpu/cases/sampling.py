"""What becomes of logits: blocks' numbers, draws, edits, log-probabilities. Rows are like a model's: few
tokens have nearly all the probability, and all others something."""

from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from benchmarks.gpu import costs
from benchmarks.gpu.cases.case import Case, Peer, Result, Work
from torch import Generator, Tensor

from headway_runtime.draws import LOWEST_TEMPERATURE, MASK_64, Drawer, block_size_of, split_mix
from headway_runtime.kernels.triton.draw import DrawParameters, draw
from headway_runtime.kernels.triton.edit_logits import EditedRows, edited, edited_by_torch
from headway_runtime.kernels.triton.launch import DEFAULT
from headway_runtime.kernels.triton.top_logprobs import TopLogprobs, top_logprobs, top_logprobs_by_torch
from headway_runtime.kernels.triton.vocabulary import BlockNumbers, block_numbers, block_numbers_by_torch
from headway_runtime.request import SamplingParams

CPU = torch.device("cpu")
# Probabilities go as rank ** -DECAY.
DECAY = 1.2
ENTRIES_OF_ROW = 200
BITS_OF_WORD = 32
# Shown instead of -inf, which has no norm.
FORBIDDEN = -100.0
# Beyond them a CPU's draws take too long.
MOST_EXACT_ROWS = 32
# Of tokens: exponentials that differ in their last digits change a draw in ten thousand.
DRAW_TOLERANCE = 0.02


def logits_like_a_models(generator: Generator, rows: int, vocab_size: int) -> Tensor:
    """bfloat16, every token at a random rank."""
    ranks = torch.rand(rows, vocab_size, generator=generator, device=generator.device).argsort(-1)
    return (-DECAY * (ranks + 1).log()).bfloat16()


def blocks_case(name: str, rows: int, vocab_size: int) -> Case:
    block_size = block_size_of(vocab_size)

    def make(generator: Generator) -> Work:
        logits = logits_like_a_models(generator, rows, vocab_size)
        temperatures = torch.rand(rows, generator=generator, device=generator.device) + 0.5

        def shown(found: BlockNumbers) -> Result:
            return found.tops, found.sums

        return Work(
            lambda: block_numbers(logits, None, temperatures, block_size),
            lambda: shown(block_numbers_by_torch(logits, temperatures, block_size)),
            shown,
            {"softmax": lambda: lambda: logits.softmax(-1)},
        )

    cost = costs.vocabulary(rows, vocab_size)
    return Case(name, "vocabulary_blocks", DEFAULT, make, cost, tolerance=1e-4)


def draw_case(name: str, rows: int, vocab_size: int, params: SamplingParams) -> Case:
    """A token of each row, blocks' numbers and all; held against what a CPU draws."""
    block_size = block_size_of(vocab_size)

    def make(generator: Generator) -> Work:
        device = generator.device
        logits = logits_like_a_models(generator, rows, vocab_size)
        seeds = torch.randint(0, 1 << 40, (rows,), generator=generator, device=device).tolist()
        positions = torch.arange(rows, device=device) + 100
        tokens = torch.full((rows,), -7, device=device)
        parameters = _parameters(params, seeds, positions)

        def run() -> Tensor:
            draw(logits, parameters, tokens, block_size, reads_places=False)
            return tokens

        def exact() -> Result:
            return _drawn_by_cpu(logits.cpu(), params, seeds, positions.cpu())

        peers = _peers(logits, params)
        return Work(run, exact if rows <= MOST_EXACT_ROWS else None, peers=peers)

    cost = costs.vocabulary(rows, vocab_size)
    return Case(name, "draw", DEFAULT, make, cost, DRAW_TOLERANCE)


def broken_draw_case(name: str, vocab_size: int, params: SamplingParams) -> Case:
    """Rows that are no numbers have no token; the one beside them has its own."""
    block_size = block_size_of(vocab_size)
    seeds = [7, 8, 9, 10]

    def make(generator: Generator) -> Work:
        device = generator.device
        logits = logits_like_a_models(generator, len(seeds), vocab_size)
        logits[1], logits[3] = torch.nan, -torch.inf
        logits[2, vocab_size // 2] = torch.inf
        positions = torch.arange(len(seeds), device=device) + 100
        tokens = torch.full((len(seeds),), -7, device=device)
        parameters = _parameters(params, seeds, positions)

        def run() -> Tensor:
            draw(logits, parameters, tokens, block_size, reads_places=False)
            return tokens

        def exact() -> Result:
            (whole,) = _drawn_by_cpu(logits[:1].cpu(), params, seeds[:1], positions[:1].cpu()).tolist()
            return torch.tensor([whole, -1, -1, -1])

        return Work(run, exact)

    return Case(name, "draw", DEFAULT, make, costs.vocabulary(len(seeds), vocab_size), tolerance=0.0)


def edit_case(name: str, rows: int, vocab_size: int) -> Case:
    """Biases, penalties and a mask for each row."""

    def make(generator: Generator) -> Work:
        logits = logits_like_a_models(generator, rows, vocab_size)
        own = _edits(rows, vocab_size, generator)
        return Work(
            lambda: edited(logits, own),
            lambda: edited_by_torch(logits, own).clamp_min(FORBIDDEN),
            lambda found: found.clamp_min(FORBIDDEN),
        )

    return Case(name, "edit_logits", DEFAULT, make, costs.edits(rows, vocab_size), tolerance=1e-5)


def logprobs_case(name: str, rows: int, vocab_size: int, num_top: int) -> Case:
    block_size = block_size_of(vocab_size)

    def make(generator: Generator) -> Work:
        device = generator.device
        # Without equals among the likeliest, whose order nobody promises.
        logits = logits_like_a_models(generator, rows, vocab_size).float()
        logits += torch.rand(logits.shape, generator=generator, device=device) / 1e3
        tokens = torch.randint(0, vocab_size, (rows,), generator=generator, device=device)

        def shown(found: TopLogprobs) -> Result:
            return found.chosen, found.logprobs, found.tokens

        return Work(
            lambda: top_logprobs(logits, None, tokens, num_top, block_size),
            lambda: shown(top_logprobs_by_torch(logits, tokens, num_top)),
            shown,
            {"torch": lambda: lambda: top_logprobs_by_torch(logits, tokens, num_top)},
        )

    # Float32, as edited rows are.
    cost = costs.Cost(2 * costs.vocabulary(rows, vocab_size).num_bytes)
    return Case(name, "top_logprobs", DEFAULT, make, cost, tolerance=1e-4)


def _parameters(params: SamplingParams, seeds: list[int], positions: Tensor) -> DrawParameters:
    """The same for all rows, but for seeds."""
    count, device = len(seeds), positions.device

    def floats(value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float32, device=device)

    mixed = numpy.array([split_mix(seed & MASK_64) for seed in seeds], dtype=numpy.uint64)
    return DrawParameters(
        None,
        floats(params.temperature),
        torch.full((count,), params.top_k, dtype=torch.int32, device=device),
        floats(params.top_p),
        floats(params.min_p),
        torch.from_numpy(mixed.view(numpy.int64)).to(device),
        positions,
    )


def _drawn_by_cpu(logits: Tensor, params: SamplingParams, seeds: list[int], positions: Tensor) -> Tensor:
    if params.temperature < LOWEST_TEMPERATURE:
        return logits.float().argmax(-1)
    rows = list(range(len(logits)))
    drawer = Drawer(logits.shape[1], CPU)
    tokens = torch.full((len(logits),), -1)
    own = [replace(params, seed=seed) for seed in seeds]
    for part in drawer.plan(rows, rows, own):
        found, _ = drawer.draw(logits, part, positions.numpy())
        tokens[part.places] = found
    return tokens


def _edits(rows: int, vocab_size: int, generator: Generator) -> EditedRows:
    device = generator.device
    tokens = [
        torch.randperm(vocab_size, generator=generator, device=device)[:ENTRIES_OF_ROW].int()
        for _ in range(rows)
    ]
    count = min(ENTRIES_OF_ROW, vocab_size)
    words = -(-vocab_size // BITS_OF_WORD)
    masks = torch.randint(-(2**31), 2**31, (rows, words), generator=generator, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    return EditedRows(
        places=torch.randperm(rows, generator=generator, device=device).int(),
        mask_rows=torch.arange(rows, device=device).int() - 1,
        masks=masks.int(),
        starts=torch.arange(0, (rows + 1) * count, count, device=device).int(),
        tokens=torch.cat(tokens),
        biases=floats(rows * count) - 0.5,
        counts=(floats(rows * count) * 4 - 1).floor(),
        penalties=floats(rows, 3) + 0.5,
        # Every row's latest token is the device's alone: its first entry, or one beyond them.
        unread_places=torch.arange(rows, device=device).int(),
        sampled=(torch.stack([own[0] for own in tokens]).long() + torch.arange(rows, device=device) % 2)
        % vocab_size,
    )


def _peers(logits: Tensor, params: SamplingParams) -> dict[str, Peer]:
    """PyTorch's operators, as simple samplers use them."""

    def argmax() -> Callable[[], object]:
        return lambda: logits.argmax(-1)

    def multinomial() -> Callable[[], object]:
        return lambda: logits.softmax(-1, dtype=torch.float32).multinomial(1)

    def by_sorting() -> Callable[[], object]:
        def run() -> object:
            probabilities, order = logits.softmax(-1, dtype=torch.float32).sort(-1, descending=True)
            is_out = probabilities.cumsum(-1) - probabilities >= params.top_p
            if params.top_k:
                is_out[:, params.top_k :] = True
            return order.gather(1, probabilities.masked_fill_(is_out, 0.0).multinomial(1))

        return run

    if params.temperature < LOWEST_TEMPERATURE:
        return {"argmax": argmax}
    if params.top_k or params.top_p < 1.0:
        return {"sort": by_sorting}
    return {"multinomial": multinomial}
