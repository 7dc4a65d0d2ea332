"""What offloading moved, found again and lost, counted. The engine's and the disk's thread have their own."""

from dataclasses import dataclass, field, fields, replace
from typing import Literal

Tier = Literal["host", "disk"]
# What a copy goes from and to. "device" is where the KV cache lies, be it a GPU or main memory.
TRANSFERS = ("device_to_host", "host_to_device", "host_to_disk", "disk_to_host")


@dataclass(frozen=True, slots=True)
class TransferSnapshot:
    """num_blocks, num_bytes: moved so far. seconds: what that took."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier.

    held_blocks, held_bytes: now. limit_bytes: at most; 0 where there is no such tier.
    hit_tokens: prompt tokens that requests found there when they were first scheduled.
    evicted_blocks: given up because the limit was reached.
    """

    held_blocks: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class OffloadSnapshot:
    """Everything so far.

    transfers: by the names in TRANSFERS.
    lost_blocks: evicted from the KV cache while no slot was to be had.
    corrupt_blocks: files that did not hold what was written, and are deleted.
    unread_blocks: on disk, and not read, because computing them again was sooner done.
    unwritten_blocks: that could not be written to the disk, or not before their slot went to others.
    """

    host: TierSnapshot = TierSnapshot()
    disk: TierSnapshot = TierSnapshot()
    transfers: dict[str, TransferSnapshot] = field(
        default_factory=lambda: {name: TransferSnapshot() for name in TRANSFERS}
    )
    lost_blocks: int = 0
    corrupt_blocks: int = 0
    unread_blocks: int = 0
    unwritten_blocks: int = 0


@dataclass(slots=True)
class TierCounters:
    """The live numbers of one tier."""

    held_blocks: int = 0
    held_bytes: int = 0
    limit_bytes: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    def snapshot(self) -> TierSnapshot:
        return TierSnapshot(**{one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(slots=True)
class OffloadCounters:
    """The live numbers. Nothing here is ever reset."""

    host: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    lost_blocks: int = 0
    corrupt_blocks: int = 0
    unread_blocks: int = 0
    unwritten_blocks: int = 0
    _transfers: dict[str, TransferSnapshot] = field(
        default_factory=lambda: {name: TransferSnapshot() for name in TRANSFERS}
    )

    def moved(self, transfer: str, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Blocks were copied, or their time became known. transfer: one of TRANSFERS, each by one thread."""
        before = self._transfers[transfer]
        self._transfers[transfer] = replace(
            before,
            num_blocks=before.num_blocks + num_blocks,
            num_bytes=before.num_bytes + num_bytes,
            seconds=before.seconds + seconds,
        )

    def hit(self, tier: Tier, num_tokens: int) -> None:
        """A request that is scheduled for the first time found so many tokens of its prompt in a tier."""
        (self.host if tier == "host" else self.disk).hit_tokens += num_tokens

    def snapshot(self) -> OffloadSnapshot:
        """A copy."""
        return OffloadSnapshot(
            self.host.snapshot(),
            self.disk.snapshot(),
            dict(self._transfers),
            self.lost_blocks,
            self.corrupt_blocks,
            self.unread_blocks,
            self.unwritten_blocks,
        )
