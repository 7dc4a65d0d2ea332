"""What all recordings of an engine take of the device's memory, and may take. Numbers only."""

from dataclasses import dataclass

# Of one recording, beside PyTorch's memory: what the driver keeps of its launches, for which 8 MiB are set
# aside, and of kernels that it meets for the first time. What more the device lacks then is others' doing.
MOST_DRIVER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class UsedBytes:
    """Of the device's memory. pool: what PyTorch has for this process. rest: all else that is not free.

    Of the rest the device does not tell what is this process' (its driver's part) and what is others'.
    """

    pool: int
    rest: int = 0


@dataclass(slots=True)
class GraphMemory:
    """limit_bytes: beyond which no more is recorded; None: there is no limit."""

    limit_bytes: int | None = None
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.limit_bytes is not None and self.num_bytes >= self.limit_bytes

    def recorded(self, before: UsedBytes, after: UsedBytes) -> None:
        """Count one more recording. PyTorch's part is exact; of the rest no more counts than one may take, so
        that another process that grows meanwhile leaves no steps unrecorded. One that shrinks hides it."""
        driver = min(max(0, after.rest - before.rest), MOST_DRIVER_BYTES)
        self.num_bytes += max(0, after.pool - before.pool) + driver
