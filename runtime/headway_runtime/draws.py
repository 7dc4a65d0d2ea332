"""Random draws from rows of logits: each hangs on its logits, parameters, seed and position alone.

A draw is a race: every token finishes at Exp / probability, where Exp is an exponentially distributed number,
and the first one wins; it wins with its probability. (In logarithms that is known as Gumbel-max.) The number
is a hash of (seed, position, token), so that one seed gives the same tokens whatever else is in the batch.

To spare most of the hashing, tokens are raced in two heats, which gives the same distribution: blocks of
tokens by the sum of their probabilities, then the tokens of the winning block.

- min-p leaves out what is less likely than that share of the likeliest token; top-k what is less likely than
  the k-th likeliest. Equals of the last one kept are kept.
- top-p keeps, of what is left, the smallest set of likeliest tokens that has at least the share p of it,
  again with equals. Nothing is sorted for it: a token that is drawn is in the set if what is likelier has
  less than p. If it is not, it is left out with all that is not likelier than it, and the draw is repeated.
  (Rejection leaves the distribution over the set as it is; FlashInfer's sampling kernels do the same.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime.request import SamplingParams

# Probabilities of more tokens at once than this no longer fit a processor's cache.
CPU_TOKENS_AT_ONCE = 1 << 19
# Temperatures below this are greedy: dividing by them gains nothing but infinities.
LOWEST_TEMPERATURE = 1e-5
MASK_64 = (1 << 64) - 1
GOLDEN_64 = 0x9E3779B97F4A7C15
GOLDEN_32 = 0x1E3779B1

Integers = NDArray[numpy.int64]


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows that are drawn together: all have the same filters, with values of their own.

    rows: which rows of the logits they are: a slice, or their indices. places: where in the batch they
        belong.
    temperatures, top_k, min_p, top_p: [rows, 1], or None where none of them has it. largest_k: of top_k.
    seeds: hashes of the seeds.
    """

    rows: slice | Tensor
    places: list[int]
    temperatures: Tensor | None
    top_k: Tensor | None
    largest_k: int
    min_p: Tensor | None
    top_p: Tensor | None
    seeds: NDArray[numpy.uint64]


class Drawer:
    """Holds what only depends on the vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._block_size = block_size_of(vocab_size)
        num_blocks = vocab_size // self._block_size
        # Blocks have hashes of their own, as if they were more tokens.
        numbers = torch.arange(vocab_size + num_blocks, dtype=torch.int32, device=device)
        hashes = _mix(numbers.mul_(GOLDEN_32))
        self._token_hashes = hashes[:vocab_size].view(num_blocks, self._block_size)
        self._block_hashes = hashes[vocab_size:]
        self._vocab_size = vocab_size
        self._rows_at_once = max(1, CPU_TOKENS_AT_ONCE // vocab_size) if device.type == "cpu" else 1 << 30

    def plan(
        self, rows: Sequence[int], places: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[DrawRows]:
        """Cut rows of logits into parts that are drawn together."""
        kinds: dict[tuple[bool, ...], list[int]] = {}
        for index, one in enumerate(params):
            kind = (one.top_k > 0, one.min_p > 0.0, one.top_p < 1.0, one.temperature != 1.0)
            kinds.setdefault(kind, []).append(index)
        parts = []
        for indices in kinds.values():
            for start in range(0, len(indices), self._rows_at_once):
                part = indices[start : start + self._rows_at_once]
                parts.append(
                    self._plan_part(
                        [rows[i] for i in part], [places[i] for i in part], [params[i] for i in part]
                    )
                )
        return parts

    def draw(self, logits: Tensor, part: DrawRows, positions: Integers) -> tuple[Tensor, Tensor]:
        """One token of each row of a part.

        logits: [rows, vocab_size], not changed. positions: by place, of the tokens to be drawn.
        Returns token ids, and numbers that are finite exactly where the row's probabilities were.
        """
        keys = self._keys(part, positions)
        own = logits[part.rows] if isinstance(part.rows, slice) else logits.index_select(0, part.rows)
        if part.temperatures is not None:
            own = own / part.temperatures
        weights = own.softmax(dim=-1, dtype=torch.float32)
        floor = self._floor(weights, part)
        if floor is not None:
            weights = _kept(weights, torch.ge, floor)
        tokens, times, total = self._race(weights, keys)
        if part.top_p is not None:
            self._reject(weights, keys, part.top_p * total.unsqueeze(1), tokens, times)
        return tokens, times

    def _plan_part(self, rows: list[int], places: list[int], params: list[SamplingParams]) -> DrawRows:
        one = params[0]
        is_range = rows == list(range(rows[0], rows[-1] + 1))
        top_k = [min(each.top_k, self._vocab_size) for each in params]
        return DrawRows(
            rows=slice(rows[0], rows[-1] + 1) if is_range else torch.tensor(rows, device=self._device),
            places=places,
            temperatures=self._column([each.temperature for each in params])
            if one.temperature != 1.0
            else None,
            top_k=self._column(top_k) if one.top_k > 0 else None,
            largest_k=max(top_k),
            min_p=self._column([each.min_p for each in params]) if one.min_p > 0.0 else None,
            top_p=self._column([each.top_p for each in params]) if one.top_p < 1.0 else None,
            seeds=numpy.array([split_mix(each.seed & MASK_64) for each in params], dtype=numpy.uint64),
        )

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device).unsqueeze(1)

    def _keys(self, part: DrawRows, positions: Integers) -> Tensor:
        """32 well-mixed bits of each row's seed and position, as integers [rows, 1]."""
        mixed = _split_mix_array(part.seeds + positions[part.places].astype(numpy.uint64))
        bits = (mixed >> numpy.uint64(32)).astype(numpy.uint32).view(numpy.int32)
        return torch.from_numpy(bits).to(self._device).unsqueeze(1)

    def _floor(self, weights: Tensor, part: DrawRows) -> Tensor | None:
        """The least weight that each row keeps [rows, 1]."""
        floor = None
        if part.min_p is not None:
            floor = weights.amax(dim=-1, keepdim=True) * part.min_p
        if part.top_k is not None:
            best = self._largest(weights, part.largest_k).gather(1, part.top_k - 1)
            floor = best if floor is None else torch.maximum(floor, best)
        return floor

    def _largest(self, weights: Tensor, count: int) -> Tensor:
        """The largest weights of each row, in descending order [rows, count]."""
        blocks = weights.view(len(weights), -1, self._block_size)
        if 2 * count >= blocks.shape[1]:
            return weights.topk(count).values
        # They all are in the blocks with the largest maxima.
        places = blocks.amax(dim=-1).topk(count, sorted=False).indices
        found = blocks.gather(1, places.unsqueeze(2).expand(-1, -1, self._block_size))
        return found.flatten(1).topk(count).values

    def _race(self, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw by weights: tokens, the winners' inverse times, and sums of the weights; all [rows]."""
        blocks = weights.view(len(weights), -1, self._block_size)
        sums = blocks.sum(dim=-1)
        times, block = (sums / _exponentials(self._block_hashes ^ keys)).max(dim=-1)
        index = block.view(-1, 1, 1).expand(-1, 1, self._block_size)
        hashes = self._token_hashes.index_select(0, block)
        within = (blocks.gather(1, index).squeeze(1) / _exponentials(hashes ^ keys)).argmax(dim=-1)
        return block * self._block_size + within, times, sums.sum(dim=-1)

    def _reject(self, weights: Tensor, keys: Tensor, wanted: Tensor, tokens: Tensor, times: Tensor) -> None:
        """Replace tokens that are not among the likeliest ones whose weights sum up to `wanted` [rows, 1]."""
        places = torch.arange(len(tokens), device=tokens.device)
        own, attempt = tokens, 0
        while True:
            pivot = weights.gather(1, own.unsqueeze(1))
            likelier = _kept(weights, torch.gt, pivot)
            above = likelier.sum(dim=-1, keepdim=True)
            # The likeliest one is always in, even if p rounds to nothing.
            again = ((above >= wanted) & (above > 0.0)).flatten().nonzero().flatten()
            if len(again) == 0:
                return
            attempt += 1
            places, weights, wanted = places[again], likelier[again], wanted[again]
            keys = _mix(keys[again] + attempt * GOLDEN_32)
            own, own_times, _ = self._race(weights, keys)
            tokens[places], times[places] = own, own_times


def block_size_of(vocab_size: int) -> int:
    """The divisor of the vocabulary's size that makes blocks and their number together the fewest."""
    divisors = (size for size in range(1, math.isqrt(vocab_size) + 1) if vocab_size % size == 0)
    return vocab_size // max(divisors)


def _kept(weights: Tensor, compare: Callable[..., Tensor], bound: Tensor) -> Tensor:
    """The weights that compare so to their row's bound [rows, 1]; 0 for the others.

    Filling by a mask of booleans, which says it better, takes five times as long on a CPU.
    """
    return compare(weights, bound, out=torch.empty_like(weights)).mul_(weights)


def _exponentials(hashes: Tensor) -> Tensor:
    """Exponentially distributed numbers from 32-bit integers, which are overwritten.

    Small ones, which decide, are the finely spaced ones.
    """
    uniform = (_mix(hashes) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def split_mix(value: int) -> int:
    """SplitMix64's step: 64 well-mixed bits."""
    value = (value + GOLDEN_64) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _split_mix_array(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The same for an array; its arithmetic wraps by itself."""
    values = values + numpy.uint64(GOLDEN_64)
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


def _mix(values: Tensor) -> Tensor:
    """A 32-bit mixer of two multiplications, in place (the constants of Chris Wellons' lowbias32).

    Shifts of int32 copy the sign, so that the copied bits are masked away.
    """
    values ^= (values >> 16) & 0xFFFF
    values *= 0x7FEB352D
    values ^= (values >> 15) & 0x1FFFF
    values *= 0x846CA68B - (1 << 32)
    values ^= (values >> 16) & 0xFFFF
    return values
