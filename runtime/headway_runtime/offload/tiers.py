"""What becomes of blocks that leave the KV cache, and how they come back. No torch, no clock of its own.

Out. A block whose contents are entered and proven is about to be overwritten (`keep`): it gets a slot of
host memory, unless its contents lie in one already. If there is a disk, the slot is copied to it later, in
the background, so that giving up the slot loses nothing.

In. `slot_of` finds contents in host memory, which `load` brings into a block. They stay in their slot: when
the block is overwritten the next time, nothing has to be copied. What is only on the disk is first read into
slots (`fetch`), while the request that wants it waits, and is overtaken. It waits no longer than computing
would take, by what prompts' tokens took lately; and nothing is read that would take longer than that.

Both are planned while a step is scheduled and done before it is computed: `copies` is the list, first all
copies out, then all in. `copied` or `undo` must follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway_runtime.offload.counters import OffloadCounters, Tier
from headway_runtime.offload.disk_tier import Read
from headway_runtime.offload.host_index import HostIndex

# How long a request waits for the disk while it is not known what computing takes, and at most.
UNKNOWN_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 10.0
# Prompt tokens of a step from which what computing one takes can be told.
LEAST_TELLING_TOKENS = 64
SMOOTHING = 0.2
# How much faster the disk is taken to be each time that it is not tried because it was slow.
REVIVAL = 0.8
# Of the slots, for blocks that are read from the disk for one request.
LARGEST_FETCH_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Copies:
    """stores: pairs of block and slot, copied first. loads: pairs of slot and block."""

    stores: list[tuple[int, int]]
    loads: list[tuple[int, int]]

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads)


class Disk(Protocol):
    """What lies below host memory; see `disk_tier.DiskTier`."""

    def __contains__(self, key: bytes) -> bool: ...
    def write(self, key: bytes, slot: int) -> None: ...
    def read(self, key: bytes, slot: int) -> None: ...
    def let_go(self, slot: int) -> bool: ...
    def completed(self) -> list[Read]: ...
    def wait(self, seconds: float) -> None: ...
    def seconds_to_read(self, count: int) -> float | None: ...
    def forget_slowness(self, share: float) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def check_integrity(self, slot_of: Callable[[bytes], int | None]) -> None: ...


class KVOffload:
    """The tiers of one engine. One thread calls everything. disk: the tier below host memory, if any."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        block_size: int,
        counters: OffloadCounters,
        disk: Disk | None = None,
    ) -> None:
        self._index = HostIndex(num_slots, slot_bytes, counters.host, self._can_give_up)
        self._slot_bytes = slot_bytes
        self._block_size = block_size
        self._counters = counters
        self._disk = disk
        # Of the step that is being planned: block by slot; and slot, block.
        self._stores: dict[int, int] = {}
        self._loads: list[tuple[int, int]] = []
        self._pinned: set[int] = set()
        self._done: Copies | None = None
        # Being read from the disk.
        self._reading: dict[bytes, int] = {}
        # Read from the disk and not yet used.
        self._came_from_disk: set[bytes] = set()
        self._seconds_per_token: float | None = None

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def __contains__(self, key: bytes) -> bool:
        """Whether it is on any tier, or on its way from one to the other."""
        return key in self._index or key in self._reading or (self._disk is not None and key in self._disk)

    def slot_of(self, key: bytes) -> int | None:
        """The slot that holds what `key` names."""
        return self._index.get(key)

    def keep(self, key: bytes, block: int) -> None:
        """A block that holds what `key` names will be overwritten by the next step."""
        if key in self._index:
            self._index.touch(key)
            return
        if key in self._reading:
            return  # will be there soon
        slot = self._index.reserve()
        if slot is None:
            self._counters.lost_blocks += 1
            return
        self._index.enter(key, slot)
        self._stores[slot] = block

    def pin(self, keys: Sequence[bytes]) -> None:
        """What these name, found in slots, will be loaded by the next step: do not give it up for `keep`."""
        # The last one first: the beginning is what others want, too.
        for key in reversed(keys):
            slot = self._index.get(key)
            assert slot is not None, "not found"
            self._index.touch(key)
            self._pinned.add(slot)

    def load(self, key: bytes, block: int, *, is_hit: bool) -> None:
        """Bring what `key` names, pinned before, into a block. is_hit: for a request that starts."""
        slot = self._index.get(key)
        assert slot in self._pinned, "not pinned"
        self._loads.append((slot, block))
        tier: Tier = "disk" if key in self._came_from_disk else "host"
        self._came_from_disk.discard(key)
        if is_hit:
            self._counters.hit(tier, self._block_size)

    def copies(self) -> Copies:
        """All that was planned since the last call."""
        stores = [(block, slot) for slot, block in self._stores.items()]
        copies = Copies(stores, self._loads)
        self._stores, self._loads, self._pinned = {}, [], set()
        return copies

    def copied(self, copies: Copies, store_seconds: float, load_seconds: float) -> None:
        """They are done, or what reads of the slots will wait until they are."""
        self._done = copies
        counters, size = self._counters, self._slot_bytes
        num_stores, num_loads = len(copies.stores), len(copies.loads)
        counters.moved("device_to_host", num_stores, num_stores * size, store_seconds)
        counters.moved("host_to_device", num_loads, num_loads * size, load_seconds)
        if self._disk is not None:
            for _, slot in copies.stores:
                key = self._index.key_in(slot)
                assert key is not None, "stored and not entered"
                self._disk.write(key, slot)

    def undo(self, copies: Copies) -> None:
        """A step failed. Unless they had been done by then, forget the slots that were to be filled."""
        if copies is self._done:
            return
        for _, slot in copies.stores:
            key = self._index.key_in(slot)
            assert key is not None, "stored and not entered"
            self._index.forget(key)

    def fetch(self, keys: Sequence[bytes], num_found: int, now: float) -> float:
        """Read from the disk what follows, without a gap, of a request's blocks, as far as that is worth it.

        keys: of its blocks, as far as they may lie anywhere at all. num_found: those of them, the first ones,
        that lie in the KV cache or in slots. Returns when to stop waiting.
        """
        disk, index = self._disk, self._index
        assert disk is not None
        in_slots = [key for key in keys[:num_found] if key in index]
        for key in reversed(in_slots):
            index.touch(key)
        wanted = [key for key in keys[num_found:] if key not in index]
        largest = min(int(index.num_slots * LARGEST_FETCH_SHARE), index.num_slots - len(in_slots))
        del wanted[largest:]
        unread = [key for key in wanted if key not in self._reading]
        longest = self._longest_wait(len(wanted))
        seconds = disk.seconds_to_read(len(unread))
        if seconds is not None and seconds > longest:
            self._counters.unread_blocks += len(unread)
            disk.forget_slowness(REVIVAL)
            return now
        for key in unread:
            slot = self._index.reserve()
            if slot is None:
                break
            self._reading[key] = slot
            disk.read(key, slot)
        return now + longest

    def is_on_its_way(self, key: bytes) -> bool:
        """Whether the disk is being read for it."""
        return key in self._reading

    def poll(self) -> None:
        """Take over what was read from the disk."""
        if self._disk is None or not self._reading:
            return
        for read in self._disk.completed():
            del self._reading[read.key]
            if read.is_good:
                self._index.enter(read.key, read.slot)
                self._came_from_disk.add(read.key)
            else:
                self._index.give_back(read.slot)

    def wait(self, seconds: float) -> None:
        """Until something was read from the disk, at most so long."""
        if self._disk is not None:
            self._disk.wait(seconds)

    def observe_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn what computing a prompt takes from a step that did little else."""
        if num_prompt_tokens < LEAST_TELLING_TOKENS:
            return
        per_token, before = seconds / num_prompt_tokens, self._seconds_per_token
        self._seconds_per_token = per_token if before is None else before + SMOOTHING * (per_token - before)

    def reset(self) -> None:
        """Nothing that was kept so far may be found again."""
        self._check_nothing_planned()
        if self._disk is not None:
            self._disk.reset()
        self._index.clear()
        self._came_from_disk.clear()

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._disk is not None:
            self._disk.close()

    def check_integrity(self) -> None:
        """AssertionError if a slot is lost or held twice."""
        self._index.check_integrity(self._reading.values())
        self._check_nothing_planned()
        assert all(key in self._index for key in self._came_from_disk)
        if self._disk is not None:
            self._disk.check_integrity(self._index.get)

    def _check_nothing_planned(self) -> None:
        planned = [*self._stores, *self._loads, *self._pinned]
        assert not planned, f"planned and not handed out: {planned!r}"

    def _longest_wait(self, num_blocks: int) -> float:
        if self._seconds_per_token is None:
            return UNKNOWN_WAIT_SECONDS
        return min(num_blocks * self._block_size * self._seconds_per_token, LONGEST_WAIT_SECONDS)

    def _can_give_up(self, key: bytes, slot: int) -> bool:
        if slot in self._pinned or not (self._disk is None or self._disk.let_go(slot)):
            return False
        self._stores.pop(slot, None)
        self._came_from_disk.discard(key)
        return True
