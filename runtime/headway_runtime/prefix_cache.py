"""What the KV blocks hold: which of them a new sequence can use again, and which must not be met unwashed.

Owns the keys of blocks and, through the pool, their references. Knows no queue and no tensor; a block of a
sequence is written by the runner, and this module is told when a step has done so.

Keys. A full block's key is sha256 over its predecessor's key and its own token ids; before the first block
stands a hash of the cache salt and of the adapter's contents. A key thus names everything that the KV in the
block depends on, and only sequences of one salt and one adapter, whatever its name, can ever agree on one.
Each key is computed once per sequence, when it is first needed.

Life of a block. `publish` enters a block under its key once a step has computed its last token, be it of a
prompt or of an answer; of equal blocks the first one stays entered. `take` gives a new sequence the entered
blocks of its longest known beginning, and others from the free list's head, whose keys are forgotten: a block
stays entered after its last release until it is the longest unused free block. A block that is not full is
never entered, so that a shared one is never written. The last known token is always left to be computed.

Proof. What is not finite would spread: to sharers, and through the masked tail of a reused block (0 * nan).
A finite sample proves all tokens before it, since it depends on each of them. Blocks that are entered or
given back before such a sample are remembered as unproven, and the runner is told to zero them before they
are written again. A sample that is not finite takes the unproven blocks of its sequence out of the cache.
In a model whose layers have windows, a sample proves no more than the least window before it: the beginning
of a longer prompt stays unproven.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise

from headway_runtime.blocks import BlockPool
from headway_runtime.sequence import Sequence


class PrefixCache:
    """is_enabled: whether blocks are entered, and so found again; unproven ones are kept track of anyhow.

    proof_reach: how many tokens, the last ones, a finite sample proves; None: all before it.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, is_enabled: bool, proof_reach: int | None = None
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._proof_reach = proof_reach
        # Whether a sample proves at least all that a block has room for.
        self.proves_blocks = proof_reach is None or proof_reach >= block_size
        self._is_enabled = is_enabled
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * (pool.num_blocks + 1)
        self._unproven: set[int] = set()
        self._to_clear: list[int] = []
        # Free blocks that are entered.
        self.num_reusable = 0

    def is_read_by(self, sequence: Sequence) -> bool:
        """Whether a sequence may use what others computed; log-probabilities of a prompt want it computed."""
        return self._is_enabled and sequence.request.sampling.num_prompt_logprobs is None

    def find(self, sequence: Sequence) -> list[int]:
        """The entered blocks that hold the beginning of a sequence without blocks; the last token is left."""
        found: list[int] = []
        if not self.is_read_by(sequence):
            return found
        keys = sequence.block_keys
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            if index == len(keys):
                self.extend_keys(sequence, index + 1)
            block = self._block_of.get(keys[index])
            if block is None:
                break
            found.append(block)
        return found

    def keys_of_step(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that a step completes if it computes `num_tokens` of a sequence."""
        if not self._is_enabled or not sequence.is_cacheable:
            return []
        end = (sequence.num_computed + num_tokens) // self._block_size
        self.extend_keys(sequence, end)
        return sequence.block_keys[sequence.num_computed // self._block_size : end]

    def num_tokens_under_way(self, sequence: Sequence, found: list[int], keys: set[bytes]) -> int:
        """How many tokens lie in blocks of these keys, from `found` on without a gap; never the last one."""
        end = (len(sequence.token_ids) - 1) // self._block_size
        self.extend_keys(sequence, end)
        index = len(found)
        while index < end and sequence.block_keys[index] in keys:
            index += 1
        return (index - len(found)) * self._block_size

    def num_taken(self, sequence: Sequence, found: list[int]) -> int:
        """Free blocks that `take` would use up, some of `found` perhaps among them."""
        num_blocks = -(-len(sequence.token_ids) // self._block_size)
        return num_blocks - sum(self._pool.num_references(block) > 0 for block in found)

    def take(self, sequence: Sequence, found: list[int]) -> None:
        """Give a sequence without blocks those for all its known tokens; what `found` holds is computed."""
        assert not sequence.block_table
        for block in found:
            # First, lest the blocks that are found are those handed out.
            self.num_reusable -= self._pool.share(block)
        sequence.block_table.extend(found)
        self.allocate(sequence, -(-len(sequence.token_ids) // self._block_size) - len(found))
        proven = next((index for index, block in enumerate(found) if block in self._unproven), len(found))
        sequence.num_computed = sequence.num_given = len(found) * self._block_size
        sequence.num_published = len(found)
        # What was found after a preemption is no hit, but not computed either.
        sequence.num_prompt_counted = max(
            sequence.num_prompt_counted, min(sequence.num_computed, sequence.num_prompt)
        )
        sequence.num_proven = proven * self._block_size

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Append `count` blocks of unknown contents to a sequence's table."""
        blocks = self._pool.allocate(count)
        for block in blocks:
            if self._key_of[block] is not None:
                self._forget(block)
                self.num_reusable -= 1
            if block in self._unproven:
                self._unproven.remove(block)
                self._to_clear.append(block)
        sequence.block_table.extend(blocks)

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, the last first: its head is what another one may want again."""
        size = self._block_size
        table = sequence.block_table
        first_unproven = sequence.num_proven // size
        end = -(-sequence.num_given // size) if sequence.num_given > sequence.num_proven else 0
        for index in range(len(table) - 1, -1, -1):
            block = table[index]
            is_entered = self._key_of[block] is not None
            if not self._pool.release(block, is_wanted=is_entered):
                continue
            if is_entered:
                self.num_reusable += 1
            elif first_unproven <= index < end:
                self._unproven.add(block)
        # A new table, because a batch under way may still refer to the old one.
        sequence.block_table = array("q")

    def publish(self, sequence: Sequence) -> None:
        """Enter the blocks that were computed to their end since the last call, unproven as yet."""
        start, end = sequence.num_published, sequence.num_computed // self._block_size
        sequence.num_published = end
        if not self._is_enabled or not sequence.is_cacheable:
            return
        self.extend_keys(sequence, end)
        for index in range(start, end):
            key, block = sequence.block_keys[index], sequence.block_table[index]
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key
                self._unproven.add(block)

    def prove(self, sequence: Sequence) -> None:
        """Take note that a finite sample has followed all computed tokens."""
        size, start = self._block_size, sequence.num_proven
        if self._proof_reach is not None:
            start = max(start, sequence.num_computed - self._proof_reach)
        if start > sequence.num_proven:
            # What lies between stays unproven, and with it, for the partial block that a sequence may give
            # back, all that follows; whole blocks within reach are proven all the same.
            first = -(-start // size)
        else:
            first = start // size
            sequence.num_proven = sequence.num_computed
        self._unproven.difference_update(sequence.block_table[first : sequence.num_published])

    def distrust(self, sequence: Sequence) -> None:
        """Take a sequence's unproven blocks out of the cache: its sample was not finite."""
        for block in self._unproven.intersection(sequence.block_table):
            if self._key_of[block] is not None:
                self._forget(block)

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forget all contents; nor is what `running` sequences have computed, or will, ever reused."""
        for block in list(self._block_of.values()):
            self._forget(block)
        self.num_reusable = 0
        for sequence in running:
            sequence.is_cacheable = False

    def blocks_to_clear(self) -> list[int]:
        """Blocks handed out since the last call that hold something unproven; zero them before the step."""
        blocks, self._to_clear = self._to_clear, []
        return blocks

    def not_cleared(self, blocks: Iterable[int]) -> None:
        """Remember blocks that could not be zeroed after all."""
        self._unproven.update(blocks)

    def extend_keys(self, sequence: Sequence, count: int) -> None:
        """Compute the keys of a sequence's first `count` blocks, as far as it has none."""
        keys, size = sequence.block_keys, self._block_size
        if len(keys) >= count:
            return
        first = len(keys)
        key = keys[-1] if keys else root_key(sequence.request.cache_salt, sequence.adapter.digest)
        text = array("I", sequence.token_ids[first * size : count * size]).tobytes()
        width = len(text) // (count - first)
        for start in range(0, len(text), width):
            key = sha256(key + text[start : start + width]).digest()
            keys.append(key)

    def check_integrity(self, running: list[Sequence]) -> None:
        """AssertionError unless keys, blocks and references agree, and no block that is written is shared."""
        self._pool.check_integrity(one.block_table for one in running)
        entered = {block: key for block, key in enumerate(self._key_of) if key is not None}
        assert {key: block for block, key in entered.items()} == self._block_of
        assert len(entered) == len(self._block_of), "two blocks are entered under one key"
        num_free = sum(self._pool.num_references(block) == 0 for block in entered)
        assert num_free == self.num_reusable, f"{num_free} free blocks entered, not {self.num_reusable}"
        for one in running:
            self._check_sequence(one)

    def _check_sequence(self, one: Sequence) -> None:
        name, size = one.request.request_id, self._block_size
        assert 0 <= one.num_proven <= one.num_computed <= one.num_given, name
        assert one.num_published == one.num_computed // size, f"{name}: a full block is not entered"
        want = [root_key(one.request.cache_salt, one.adapter.digest)]
        for start, end in pairwise(range(0, one.num_published * size + 1, size)):
            want.append(sha256(want[-1] + array("I", one.token_ids[start:end]).tobytes()).digest())
        for index, block in enumerate(one.block_table):
            key = self._key_of[block]
            if index < one.num_published:
                assert key in (None, want[index + 1]), f"{name}: block {block} is entered under a wrong key"
            else:
                assert key is None, f"{name}: block {block} is entered and not full"
                assert self._pool.num_references(block) == 1, f"{name}: block {block} is shared and written"

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None, block
        del self._block_of[key]
        self._key_of[block] = None


def root_key(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """What stands for the predecessor of a sequence's first block. adapter_digest: empty, or 32 bytes."""
    purpose = b"headway adapter prefix " if adapter_digest else b"headway prefix "
    return sha256(purpose + adapter_digest + cache_salt.encode("utf-8", "surrogatepass")).digest()
