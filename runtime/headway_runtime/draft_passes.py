"""Passes of a draft model as recorded work, launched one behind the other.

What a pass draws the next one computes, without the host having seen it: so the device goes from pass to pass
by itself, and the host waits once, for all that was guessed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import Chunk

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs


@dataclass(frozen=True, slots=True)
class _Guess:
    """One that the pass before has drawn, at a position."""

    start: int
    block_table: "array[int]"

    @property
    def num_tokens(self) -> int:
        return 1

    def tokens(self) -> list[int]:
        """The device alone knows it."""
        return [0]


def run_ahead(graphs: "DecodeGraphs", chunks: list[Chunk], counts: Sequence[int]) -> list[list[int]] | None:
    """The tokens that follow each chunk, `counts` of them at most, as its request has them chosen.

    Fewer behind logits that are not finite. None where not all passes are recorded, or chunks do not reach
    their last known token.
    """
    sizes = [one.num_tokens for one in chunks]
    form = graphs.smallest(sum(sizes), max(sizes), draws=True)
    has_later = graphs.smallest(len(chunks), 1, draws=True) is not None
    if form is None or not has_later or not all(one.samples for one in chunks):
        return None
    params = [one.sampling for one in chunks for _ in range(one.num_tokens)]
    graphs.replay(chunks, form, params=params)
    # Whose tokens are where in those of the latest pass.
    places = {index: end - 1 for index, end in enumerate(accumulate(sizes))}
    drawn: list[tuple[dict[int, int], Tensor]] = [(places, transfers.brought(graphs.tokens))]
    for number in range(1, max(counts)):
        going = [index for index in places if counts[index] > number]
        form = graphs.smallest(len(going), 1, draws=True)
        assert form is not None
        fed = [_Guess(chunks[one].start + sizes[one] + number - 1, chunks[one].block_table) for one in going]
        sources = {row: places[index] for row, index in enumerate(going)}
        params = [chunks[index].sampling for index in going]
        graphs.replay(fed, form, graphs.tokens, sources, params)
        places = {index: row for row, index in enumerate(going)}
        drawn.append((places, transfers.brought(graphs.tokens)))
    transfers.Moment(graphs.tokens.device).wait()
    return _cut_short([(places, tokens.tolist()) for places, tokens in drawn], len(chunks))


def _cut_short(drawn: Sequence[tuple[dict[int, int], list[int]]], num_chunks: int) -> list[list[int]]:
    """Each chunk's tokens of all passes, up to the first that is none."""
    found: list[list[int]] = [[] for _ in range(num_chunks)]
    has_ended = [False] * num_chunks
    for places, tokens in drawn:
        for index, place in places.items():
            has_ended[index] = has_ended[index] or tokens[place] < 0
            if not has_ended[index]:
                found[index].append(tokens[place])
    return found
