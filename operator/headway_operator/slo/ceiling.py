"""The most that a replica was seen to do (`crowd` finds it), and of what requests that says something."""

from dataclasses import dataclass
from math import inf

from headway_operator.slo.predictions import Workload

# Alike are mean tokens, and places, that differ by no more than this share.
LIKE = 0.25


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Requests per second of one replica. prompt, answer: their mean tokens, computed (by cost) and
    generated.
    max_num_seqs: the most places that were thought best then."""

    per_second: float
    prompt: float
    answer: float
    max_num_seqs: int

    def of(self, work: Workload, max_num_seqs: int) -> float:
        """For such requests in so many places; inf where they are not alike, or there are more places."""
        is_like = is_alike(self.prompt, work.prompt) and is_alike(self.answer, work.answer)
        return self.per_second if is_like and max_num_seqs <= (1.0 + LIKE) * self.max_num_seqs else inf


def is_alike(one: float, other: float) -> bool:
    """Whether two means differ by no more than LIKE of the larger."""
    return abs(one - other) <= LIKE * max(one, other)
