"""Which part of a tensor belongs to a rank: arithmetic alone, no torch.

Heads, the middles of MLPs and the vocabulary are cut; all else is on every rank.
"""

from dataclasses import dataclass

# Rows of the vocabulary's tensors come in panels of so many outputs, as CPU kernels want them; the last
# rank's are filled up with rows of zeros.
VOCABULARY_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Range:
    """[first, last) of some rows or columns."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def times(self, count: int) -> "Range":
        """The same of things that have `count` rows each."""
        return Range(self.first * count, self.last * count)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's. `fit.placement.one_rank` has refused before what cannot be cut."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> Range:
        """Of something that the ranks divide evenly."""
        assert total % self.size == 0, (total, self.size)
        each = total // self.size
        return Range(self.rank * each, (self.rank + 1) * each)

    def of_kv_heads(self, num_kv_heads: int) -> Range:
        """Where there are fewer than ranks, each is held by several, side by side as the queries are cut."""
        if num_kv_heads >= self.size:
            return self.of(num_kv_heads)
        assert self.size % num_kv_heads == 0, (num_kv_heads, self.size)
        first = self.rank * num_kv_heads // self.size
        return Range(first, first + 1)

    def of_vocabulary(self, vocab_size: int) -> Range:
        """The last may reach past the end, and a rank of a small vocabulary's may begin there."""
        each = vocabulary_rows(vocab_size, self.size)
        return Range(self.rank * each, (self.rank + 1) * each)


WHOLE = Share()


def vocabulary_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of the embedding and of the head that each rank holds."""
    if num_ranks == 1:
        return vocab_size
    each = -(-vocab_size // num_ranks)
    return -(-each // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
