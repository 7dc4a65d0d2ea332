"""What all recordings of an engine take of the device's memory, and may take. Numbers only."""

from dataclasses import dataclass


@dataclass(slots=True)
class GraphMemory:
    """limit_bytes: beyond which no more is recorded; None: there is no limit."""

    limit_bytes: int | None = None
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.limit_bytes is not None and self.num_bytes >= self.limit_bytes
