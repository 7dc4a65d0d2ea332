"""The most that a replica was seen to do (`crowd` finds it), and of what requests that says something."""

from dataclasses import dataclass
from math import inf

from headway_operator.slo.capacity import Workload

# Requests are alike whose mean tokens differ by no more than this share.
LIKE = 0.25


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Requests per second of one replica; prompt, answer: their mean tokens, computed and generated."""

    per_second: float
    prompt: float
    answer: float

    def of(self, work: Workload) -> float:
        """For such requests; inf where they are not alike."""
        pairs = ((self.prompt, work.prompt), (self.answer, work.answer))
        return self.per_second if all(abs(a - b) <= LIKE * max(a, b) for a, b in pairs) else inf
