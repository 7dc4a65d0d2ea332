"""The pool of fixed-size KV blocks: which are free, and how often each other one is referred to.

Owns block ids and reference counts only. Knows nothing of tensors, of sequences, or of what a block holds.

Free blocks form a doubly linked list whose links lie in two flat lists indexed by block id. Blocks are taken
from its head. One is given back at the tail when its contents may be wanted again, so that the contents
longest unused are overwritten first, and else at the head; `share` can also take a block out of the middle,
which is what lets a block that was given back, and whose KV is still intact, be used again.

Id 0 is the null block. It is never handed out: padding in gathered block tables points at it, and it is
also the list's sentinel, which spares every special case at the ends.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """num_blocks: blocks that can be handed out; their ids are 1..num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._num_references = [0] * (num_blocks + 1)
        # A ring through the sentinel: 0 -> 1 -> ... -> num_blocks -> 0.
        self._next = [*range(1, num_blocks + 1), NULL_BLOCK]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def num_in_use(self, blocks: Iterable[int]) -> int:
        """How many of these somebody refers to."""
        num_references = self._num_references
        return sum([num_references[block] > 0 for block in blocks])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has checked num_free."""
        assert count <= self.num_free, (count, self.num_free)
        following, num_references = self._next, self._num_references
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            num_references[block] = 1
            block = following[block]
        # The ring is closed behind them all at once.
        following[NULL_BLOCK] = block
        self._previous[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def share(self, block: int) -> bool:
        """Add a reference to a block: to one in use, or to a free one, which then is free no more (True)."""
        assert 0 < block <= self.num_blocks, block
        was_free = self._num_references[block] == 0
        if was_free:
            self._unlink(block)
        self._num_references[block] += 1
        return was_free

    def release(self, blocks: Iterable[int], are_wanted: Iterable[bool]) -> list[bool]:
        """Give back one reference of each block, in this order; says of each whether it was the last, and the
        block is free now.

        are_wanted: whether the contents of each may be used again, so that other free blocks are to be taken
        before it.
        """
        following, previous, num_references = self._next, self._previous, self._num_references
        freed = []
        for block, is_wanted in zip(blocks, are_wanted, strict=True):
            references = num_references[block] - 1
            assert references >= 0, f"block {block} is released more often than it was taken"
            num_references[block] = references
            if references:
                freed.append(False)
                continue
            before = previous[NULL_BLOCK] if is_wanted else NULL_BLOCK
            after = following[before]
            following[before] = previous[after] = block
            previous[block] = before
            following[block] = after
            freed.append(True)
        self.num_free += sum(freed)
        return freed

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """AssertionError unless, given every live block table, no block is leaked or wrongly shared."""
        held: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table!r}"
            held.update(table)
        free = self._walk_free()
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, num_free={self.num_free}"
        assert NULL_BLOCK not in held, "a table holds the null block"
        for block in range(1, self.num_blocks + 1):
            references = self._num_references[block]
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
            assert (references == 0) == (block in free), f"block {block}: {references} references and free"

    def _walk_free(self) -> set[int]:
        """The ids in the free list, with both directions of every link checked."""
        seen: set[int] = set()
        block = NULL_BLOCK
        while True:
            following = self._next[block]
            assert self._previous[following] == block, f"link {block} -> {following} does not lead back"
            if following == NULL_BLOCK:
                return seen
            assert following not in seen, f"block {following} is twice in the free list"
            seen.add(following)
            block = following

    def _unlink(self, block: int) -> None:
        previous, following = self._previous[block], self._next[block]
        self._next[previous] = following
        self._previous[following] = previous
        self.num_free -= 1
