"""How many different adapters may be in a step, and who waits for that. No torch, no clock.

Sequences run with at most `max_adapters` different ones, so that no step has more. One that would bring one
more waits. Meanwhile others may overtake it: those without an adapter as they like, and those whose adapters
are running anyway so many times, after which they wait behind it. Then each running adapter's sequences come
to their ends, none are added to them, and one of the adapters makes room: nobody waits for ever.
"""

from collections.abc import Iterable

from headway_runtime.sequence import Sequence

# How often a sequence that waits for its adapter's turn may be overtaken by others with adapters.
MOST_OVERTAKING = 64


class AdapterAdmission:
    """One step's decisions; made anew for each."""

    __slots__ = ("_held_back", "_is_closed", "_max_adapters", "_slots")

    def __init__(self, max_adapters: int, running: Iterable[Sequence]) -> None:
        self._max_adapters = max_adapters
        self._slots = {one.adapter.slot for one in running} - {0}
        self._held_back: list[Sequence] = []
        self._is_closed = False

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether this one has to wait. To be asked by rank."""
        slot = sequence.adapter.slot
        if not slot:
            return False
        if slot in self._slots or len(self._slots) < self._max_adapters:
            return self._is_closed
        self._held_back.append(sequence)
        if sequence.num_overtaken >= MOST_OVERTAKING:
            self._is_closed = True
        return True

    def admitted(self, sequence: Sequence) -> None:
        """It runs now."""
        slot = sequence.adapter.slot
        if not slot:
            return
        self._slots.add(slot)
        for one in self._held_back:
            one.num_overtaken += 1
            if one.num_overtaken >= MOST_OVERTAKING:
                self._is_closed = True
