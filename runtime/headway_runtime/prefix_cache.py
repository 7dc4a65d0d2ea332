"""What the KV blocks hold: which of them a new sequence can use again, and which must not be met unwashed.

Owns the keys of blocks and, through the pool, their references. Knows no queue and no tensor; a block of a
sequence is written by the runner, and this module is told when a step has done so.

Keys. A full block's key is sha256 over its predecessor's key and its own token ids; before the first block
stands a hash of the cache salt and of the adapter's contents. A key thus names everything that the KV in the
block depends on, and only sequences of one salt and one adapter, whatever its name, can ever agree on one.
Each key is computed once per sequence, when it is first needed.

Life of a block. `publish` enters a block under its key once a step that computed its last token was read, be
it of a prompt or of an answer; of equal blocks the first one stays entered. `take` gives a new sequence the
entered blocks of its longest known beginning, and others from the free list's head, whose keys are forgotten:
a block stays entered after its last release until it is the longest unused free block. A block that is not
full is never entered, so that a shared one is never written. The last known token is always left to be
computed.

Proof. What is not finite would spread: to sharers, and through the masked tail of a reused block (0 * nan).
A finite sample proves all tokens before it, since it depends on each of them. Blocks that are entered or
given back before such a sample are remembered as unproven, and the runner is told to zero them before they
are written again. A sample that is not finite takes the unproven blocks of its sequence out of the cache.
In a model whose layers have windows, a sample proves no more than the least window before it: the beginning
of a longer prompt stays unproven.

Offload. What is entered and proven goes, before it is overwritten, where `offload` keeps it, if there is one.
`find` goes on there: such contents get a block of their own, are loaded into it before the step, and are
entered at once, like others. `undo` takes back what a failed step may not have done.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise, repeat, takewhile

from headway_runtime.blocks import BlockPool
from headway_runtime.offload.tiers import Copies, KVOffload
from headway_runtime.sequence import Sequence

NO_COPIES = Copies([], [])


class PrefixCache:
    """is_enabled: whether blocks are entered, and so found again; unproven ones are kept track of anyhow.

    proof_reach: how many tokens, the last ones, a finite sample proves; None: all before it.
    offload: what keeps the contents of blocks that are overwritten; None: nobody does.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        is_enabled: bool,
        proof_reach: int | None = None,
        offload: KVOffload | None = None,
    ) -> None:
        assert is_enabled or offload is None, "what is not entered is not kept"
        self._pool = pool
        self._offload = offload
        self.block_size = block_size
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
        """Where the beginning of a sequence without blocks lies; the last token is left to be computed.

        Of each block, the entered one that holds it, or ~slot where its contents are in host memory only.
        """
        found: list[int] = []
        if self.is_read_by(sequence):
            end = self._num_findable(sequence)
            if self._offload is None:
                # All that is known already, without a call for each.
                found = list(takewhile(bool, map(self._block_of.get, sequence.block_keys[:end], repeat(0))))
            while len(found) < end and (place := self._place_at(sequence, len(found))) is not None:
                found.append(place)
        sequence.most_found = len(found)
        return found

    def most_found(self, sequence: Sequence) -> int:
        """Tokens that `find` finds at most, without looking again at those that it found before."""
        if not self.is_read_by(sequence):
            return 0
        # If one of them has been forgotten since, it finds fewer.
        index, end = sequence.most_found, self._num_findable(sequence)
        while index < end and self._place_at(sequence, index) is not None:
            index += 1
        sequence.most_found = index
        return index * self.block_size

    def is_awaited(self, sequence: Sequence, found: list[int], now: float) -> bool:
        """Whether more of a sequence's beginning is being read from a disk, and worth waiting for.

        The first time that a sequence without blocks is asked for, the reading begins.
        """
        offload, end = self._offload, self._num_findable(sequence)
        if offload is None or not offload.has_disk or len(found) == end or not self.is_read_by(sequence):
            return False
        self.extend_keys(sequence, end)
        keys = sequence.block_keys
        if sequence.awaits_until is None:
            within = takewhile(self._is_anywhere, keys[:end])
            sequence.awaits_until = offload.fetch(list(within), len(found), now)
        return now < sequence.awaits_until and offload.is_on_its_way(keys[len(found)])

    def _num_findable(self, sequence: Sequence) -> int:
        """Full blocks of a sequence's tokens, the last one left out."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def _place_at(self, sequence: Sequence, index: int) -> int | None:
        """Where its block of this index lies, as `find` says it; None if nowhere."""
        if index == len(sequence.block_keys):
            # Several at once take half the time for each.
            self.extend_keys(sequence, min(2 * index + 1, self._num_findable(sequence)))
        key = sequence.block_keys[index]
        block = self._block_of.get(key)
        if block is not None or self._offload is None:
            return block
        slot = self._offload.slot_of(key)
        return None if slot is None else ~slot

    def _is_anywhere(self, key: bytes) -> bool:
        return key in self._block_of or (self._offload is not None and key in self._offload)

    def is_any_entered(self, keys: Iterable[bytes]) -> bool:
        """Whether a block lies under one of these keys."""
        return not self._block_of.keys().isdisjoint(keys)

    def keys_of_step(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Keys of the blocks that are complete, and not entered yet, once those steps have run that are under
        way, and one that computes `num_tokens` of a sequence."""
        if not self._is_enabled or not sequence.is_cacheable:
            return []
        num_read = len(sequence.token_ids) - sequence.num_unread
        end = min(sequence.num_computed + num_tokens, num_read) // self.block_size
        self.extend_keys(sequence, end)
        return sequence.block_keys[sequence.num_published : end]

    def num_tokens_under_way(self, sequence: Sequence, found: list[int], keys: set[bytes]) -> int:
        """How many tokens lie in blocks of these keys, from `found` on without a gap; never the last one."""
        end = self._num_findable(sequence)
        self.extend_keys(sequence, end)
        index = len(found)
        while index < end and sequence.block_keys[index] in keys:
            index += 1
        return (index - len(found)) * self.block_size

    def num_taken(self, sequence: Sequence, found: list[int]) -> int:
        """Free blocks that `take` would use up, some of `found` perhaps among them."""
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        return num_blocks - self._pool.num_in_use(place for place in found if place > 0)

    def take(self, sequence: Sequence, found: list[int]) -> None:
        """Give a sequence without blocks those for all its known tokens; what `found` holds is computed."""
        assert not sequence.block_table
        for block in found:
            if block > 0:
                # First, lest the blocks that are found are those handed out.
                self.num_reusable -= self._pool.share(block)
        if self._offload is not None:
            self._offload.pin([sequence.block_keys[index] for index, place in enumerate(found) if place < 0])
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        fresh = iter(self._hand_out(num_blocks - sum(place > 0 for place in found)))
        for index, place in enumerate(found):
            sequence.block_table.append(place if place > 0 else self._load(sequence, index, next(fresh)))
        sequence.block_table.extend(fresh)
        table, unproven = sequence.block_table, self._unproven
        proven = next((index for index in range(len(found)) if table[index] in unproven), len(found))
        sequence.num_computed = sequence.num_confirmed = sequence.num_given = len(found) * self.block_size
        sequence.num_published = len(found)
        # What was found after a preemption is no hit, but not computed either.
        sequence.num_prompt_counted = max(
            sequence.num_prompt_counted, min(sequence.num_computed, sequence.num_prompt)
        )
        sequence.num_proven = proven * self.block_size

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Append `count` blocks of unknown contents to a sequence's table."""
        sequence.block_table.extend(self._hand_out(count))

    def _hand_out(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        key_of, unproven = self._key_of, self._unproven
        entered = [block for block in blocks if key_of[block] is not None]
        for block in entered:
            key = key_of[block]
            assert key is not None
            if self._offload is not None and block not in unproven:
                self._offload.keep(key, block)
            del self._block_of[key]
            key_of[block] = None
        self.num_reusable -= len(entered)
        if not unproven.isdisjoint(blocks):
            to_clear = [block for block in blocks if block in unproven]
            unproven.difference_update(to_clear)
            self._to_clear += to_clear
        return blocks

    def _load(self, sequence: Sequence, index: int, block: int) -> int:
        """Have a block filled from host memory, and enter it; returns it."""
        assert self._offload is not None
        key = sequence.block_keys[index]
        # What is found again after a preemption is no hit.
        self._offload.load(key, block, is_hit=sequence.scheduled_at is None)
        self._block_of[key] = block
        self._key_of[block] = key
        return block

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, the last first: its head is what another one may want again."""
        size, key_of = self.block_size, self._key_of
        blocks = sequence.block_table[::-1]
        are_entered = [key_of[block] is not None for block in blocks]
        freed = self._pool.release(blocks, are_entered)
        self.num_reusable += sum([first and second for first, second in zip(freed, are_entered, strict=True)])
        if sequence.num_given > sequence.num_proven:
            first, end = sequence.num_proven // size, min(len(blocks), -(-sequence.num_given // size))
            for position in range(len(blocks) - end, len(blocks) - first):
                if freed[position] and not are_entered[position]:
                    self._unproven.add(blocks[position])
        # A new table, because a batch under way may still refer to the old one.
        sequence.block_table = array("q")

    def publish(self, sequence: Sequence) -> None:
        """Enter the blocks that were confirmed to their end since the last call, unproven as yet."""
        start, end = sequence.num_published, sequence.num_confirmed // self.block_size
        sequence.num_published = end
        if not self._is_enabled or not sequence.is_cacheable:
            return
        self.extend_keys(sequence, end)
        block_of, key_of = self._block_of, self._key_of
        new = dict(zip(sequence.block_keys[start:end], sequence.block_table[start:end], strict=True))
        if not block_of.keys().isdisjoint(new):
            new = {key: block for key, block in new.items() if key not in block_of}
        block_of.update(new)
        self._unproven.update(new.values())
        for key, block in new.items():
            key_of[block] = key

    def prove(self, sequence: Sequence) -> None:
        """Take note that a finite sample has followed all confirmed tokens."""
        size, start = self.block_size, sequence.num_proven
        if self._proof_reach is not None:
            start = max(start, sequence.num_confirmed - self._proof_reach)
        if start > sequence.num_proven:
            # What lies between stays unproven, and with it, for the partial block that a sequence may give
            # back, all that follows; whole blocks within reach are proven all the same.
            first = -(-start // size)
        else:
            first = start // size
            sequence.num_proven = sequence.num_confirmed
        self._unproven.difference_update(sequence.block_table[first : sequence.num_published])

    def distrust(self, blocks: Iterable[int]) -> None:
        """Take those that are unproven out of the cache: a sample that hangs on them was not finite.

        They may have been given back since the step was launched. What was overwritten by then is proven, or
        not entered.
        """
        for block in self._unproven.intersection(blocks):
            self._take_out(block)

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forget all contents; nor is what `running` sequences have computed, or will, ever reused."""
        for block in list(self._block_of.values()):
            self._forget(block)
        self.num_reusable = 0
        for sequence in running:
            sequence.is_cacheable = False
        if self._offload is not None:
            self._offload.reset()

    def blocks_to_clear(self) -> list[int]:
        """Blocks handed out since the last call that hold something unproven; zero them before the step."""
        blocks, self._to_clear = self._to_clear, []
        return blocks

    def not_cleared(self, blocks: Iterable[int]) -> None:
        """Remember blocks that could not be zeroed after all."""
        self._unproven.update(blocks)

    def poll(self) -> None:
        """Take over what a disk was read for: `find` finds it then."""
        if self._offload is not None:
            self._offload.poll()

    def copies(self) -> Copies:
        """What is to be copied before the step, once those blocks are zeroed; none of them is copied out."""
        return NO_COPIES if self._offload is None else self._offload.copies()

    def undo(self, copies: Copies) -> None:
        """A step failed: these may not have been done."""
        for _, block in copies.loads:
            self._take_out(block)
            self._unproven.add(block)
        if self._offload is not None:
            self._offload.undo(copies)

    def extend_keys(self, sequence: Sequence, count: int) -> None:
        """Compute the keys of a sequence's first `count` blocks, as far as it has none."""
        keys, size = sequence.block_keys, self.block_size
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
        if self._offload is not None:
            self._offload.check_integrity()

    def _check_sequence(self, one: Sequence) -> None:
        name, size = one.request.request_id, self.block_size
        assert 0 <= one.num_proven <= one.num_confirmed <= one.num_computed <= one.num_given, name
        assert one.num_published == one.num_confirmed // size, f"{name}: a full block is not entered"
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

    def _take_out(self, block: int) -> None:
        """Let nobody find a block any more, be it in use or free."""
        if self._key_of[block] is not None:
            self._forget(block)
            self.num_reusable -= self._pool.num_references(block) == 0

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None, block
        del self._block_of[key]
        self._key_of[block] = None


def root_key(cache_salt: str, adapter_digest: bytes = b"") -> bytes:
    """What stands for the predecessor of a sequence's first block. adapter_digest: empty, or 32 bytes."""
    purpose = b"headway adapter prefix " if adapter_digest else b"headway prefix "
    return sha256(purpose + adapter_digest + cache_salt.encode("utf-8", "surrogatepass")).digest()
