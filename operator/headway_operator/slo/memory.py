"""What the controller remembers between passes; serialisable, so that a restart forgets little."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Memory:
    """Empty for now: the first decisions need no past."""

    started_at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"version": 1, "startedAt": self.started_at}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None, now: float) -> "Memory":
        """The memory written by `to_dict`; a fresh one for None or an unknown version."""
        if data is None or data.get("version") != 1:
            return cls(started_at=now)
        return cls(started_at=float(data["startedAt"]))
