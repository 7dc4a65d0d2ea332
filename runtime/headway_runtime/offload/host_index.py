"""Which block's contents lie in which slot of host memory. No memory, no files, no clock.

A slot is free, or entered under the key of what it holds, or reserved for contents that are on their way.
When none is free, the slot whose contents were longest unused is given up: of those that nobody holds on to.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from headway_runtime.offload.counters import TierCounters


class HostIndex:
    """can_give_up: asked, with key and slot, before contents are given up; False keeps them for now."""

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        counters: TierCounters,
        can_give_up: Callable[[bytes, int], bool],
    ) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._can_give_up = can_give_up
        self._counters = counters
        counters.limit_bytes = num_slots * slot_bytes
        # The longest unused first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._key_in: dict[int, bytes] = {}
        # The lowest slot is handed out first, so that memory is touched in order.
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: set[int] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def get(self, key: bytes) -> int | None:
        """The slot that holds what `key` names; this is no use of it."""
        return self._slot_of.get(key)

    def key_in(self, slot: int) -> bytes | None:
        """Under which key a slot is entered."""
        return self._key_in.get(slot)

    def touch(self, key: bytes) -> None:
        """Its contents were used."""
        self._slot_of.move_to_end(key)

    def reserve(self) -> int | None:
        """A slot for other contents, entered under no key; None where all are held on to."""
        if self._free:
            slot = self._free.pop()
        else:
            longest_unused = self._slot_of.items()
            found = next((one for one in longest_unused if self._can_give_up(*one)), None)
            if found is None:
                return None
            key, slot = found
            del self._slot_of[key], self._key_in[slot]
            self._counters.evicted_blocks += 1
        self._reserved.add(slot)
        self._count()
        return slot

    def enter(self, key: bytes, slot: int) -> None:
        """A reserved slot holds, or will before anyone reads it, what `key` names."""
        assert key not in self._slot_of, "entered twice"
        self._reserved.remove(slot)
        self._slot_of[key] = slot
        self._key_in[slot] = key
        self._count()

    def give_back(self, slot: int) -> None:
        """A reserved slot is not wanted after all."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def forget(self, key: bytes) -> None:
        """What lies under a key is not what it names."""
        slot = self._slot_of.pop(key)
        del self._key_in[slot]
        self._free.append(slot)
        self._count()

    def clear(self) -> None:
        """Forget all contents. Reserved slots stay so."""
        self._free += self._key_in
        self._slot_of.clear()
        self._key_in.clear()
        self._count()

    def check_integrity(self, reserved: Collection[int]) -> None:
        """AssertionError unless each slot is exactly one of free, entered, and one of `reserved`."""
        assert self._reserved == set(reserved), (self._reserved, reserved)
        assert {slot: key for key, slot in self._slot_of.items()} == self._key_in
        slots = [*self._free, *self._slot_of.values(), *self._reserved]
        assert sorted(slots) == list(range(self.num_slots)), f"slots lost, or held twice: {sorted(slots)!r}"

    def _count(self) -> None:
        self._counters.held_blocks = len(self._slot_of)
        self._counters.held_bytes = len(self._slot_of) * self._slot_bytes
