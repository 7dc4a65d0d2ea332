"""Guesses what follows from what followed before: prompt lookup.

The last tokens of a sequence are looked for earlier in it, prompt and answer alike; what came after the
latest place where they stand is the guess. It costs no model and comes true where answers repeat their
prompt: in summaries, edits, code, extraction.
(Apoorv Saxena, "Prompt Lookup Decoding", 2023.) Imports no torch.
"""

from collections import OrderedDict

from headway_runtime.batch import Chunk

# So many tokens of a sequence are indexed in one step: a long prompt must not hold up the others.
MOST_INDEXED_AT_ONCE = 8192


class NgramDrafts:
    """Indices of the sequences that were guessed for lately."""

    def __init__(self, shortest: int, longest: int, max_num_seqs: int) -> None:
        """shortest, longest: how many last tokens are looked for; the longest found counts."""
        self._lengths = range(longest, shortest - 1, -1)
        self._max_num_seqs = max_num_seqs
        self._indices: OrderedDict[int, _Index] = OrderedDict()

    def propose(self, chunks: list[Chunk]) -> list[tuple[int, ...]]:
        """Up to `num_drafts` guesses for each chunk; none where nothing is found."""
        found = [self._index(chunk).following(chunk.num_drafts) for chunk in chunks]
        while len(self._indices) > self._max_num_seqs:
            self._indices.popitem(last=False)
        return found

    def _index(self, chunk: Chunk) -> "_Index":
        # The list is the sequence's own, and kept alive here, so that no other one has its identity.
        key = id(chunk.token_ids)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = _Index(chunk.token_ids, self._lengths)
        self._indices.move_to_end(key)
        return index


class _Index:
    """Where each run of tokens last ended, by its length."""

    __slots__ = ("_ends", "_lengths", "_num_indexed", "_token_ids")

    def __init__(self, token_ids: list[int], lengths: range) -> None:
        self._token_ids = token_ids
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def following(self, count: int) -> tuple[int, ...]:
        """What followed the last tokens before."""
        tokens, num_known = self._token_ids, len(self._token_ids)
        # The last tokens themselves are not indexed yet: they would be found.
        start, stop = self._num_indexed, min(num_known - 1, self._num_indexed + MOST_INDEXED_AT_ONCE)
        for end in range(start + 1, stop + 1):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(start, stop)
        for length in self._lengths:
            if length >= num_known:
                continue
            found = self._ends.get(tuple(tokens[num_known - length :]))
            if found is not None:
                return _repeated(tokens, found, count)
        return ()


def _repeated(tokens: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end it goes on with what it has just said."""
    found = tokens[start : start + count]
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
