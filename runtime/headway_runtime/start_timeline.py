"""Where the time of a start goes: seconds, and bytes, of its stages in the order in which they end.

Reads the clock it is given, and nothing else; who starts something says when a stage has ended.
"""

import time
from collections.abc import Callable, Mapping

# In this order; a start may lack some.
STAGES = ("imports", "config", "read", "copy", "repack", "compile", "profile", "graphs", "ready")


class StartTimeline:
    """Begins when it is made. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended_at = clock()
        self.seconds: dict[str, float] = {}
        self.num_bytes: dict[str, int] = {}

    def ended(self, stage: str, num_bytes: int = 0) -> None:
        """What was done since the latest such word belongs to this stage."""
        now = self._clock()
        self.add(stage, now - self._ended_at, num_bytes)
        self._ended_at = now

    def ended_in_parts(self, parts: Mapping[str, float], rest: str, num_bytes: Mapping[str, int]) -> None:
        """The same of several stages that were done in turns. parts: seconds of all but the `rest`."""
        now = self._clock()
        left = now - self._ended_at
        for stage, seconds in parts.items():
            own = min(seconds, left)
            self.add(stage, own, num_bytes.get(stage, 0))
            left -= own
        self.add(rest, left, num_bytes.get(rest, 0))
        self._ended_at = now

    def add(self, stage: str, seconds: float, num_bytes: int = 0) -> None:
        assert stage in STAGES, stage
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.num_bytes[stage] = self.num_bytes.get(stage, 0) + num_bytes

    def told(self) -> str:
        """One line: each stage's seconds, and GB/s where bytes were moved."""
        parts = []
        for stage in STAGES:
            if stage not in self.seconds:
                continue
            own = f"{stage} {self.seconds[stage]:.2f} s"
            moved = self.num_bytes[stage]
            if moved and self.seconds[stage] > 0:
                own += f" ({moved / 1e9:.2f} GB, {moved / 1e9 / self.seconds[stage]:.1f} GB/s)"
            parts.append(own)
        return f"started in {sum(self.seconds.values()):.2f} s: {', '.join(parts)}"
