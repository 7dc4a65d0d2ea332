"""What a request would wait for at a replica, as far as one gateway knows; the simulator has it, too. No I/O.

The unit is a request that decodes beside it. A prompt that is computed before its own holds it up far more,
which a stream of which nothing has come stands for; and where all places are taken, it waits until an answer
has ended. How many prompts take as long is measured.
"""

from dataclasses import dataclass
from typing import NamedTuple

# A prompt to be computed counts as so many more requests.
UNANSWERED_WEIGHT = 8.0
# Of a running mean, what the latest counts.
LATEST_SHARE = 1 / 16
# While nothing was measured: a place is left for each prompt that is computed, and where places are what is
# short prompts take a third of a replica's time, say.
ASSUMED_PROMPTS_PER_PLACE = 3.0
MOST_PROMPTS_PER_PLACE = 100.0
# Where more of the requests wait too late than this, a new one overtakes them; fewer only say that the
# replica is slow at the moment, so that one more had better go elsewhere.
MOSTLY_LATE = 0.5
# One that answered 503 comes after all others for so long.
BUSY_SECONDS = 0.5


@dataclass(slots=True)
class Pace:
    """Running means of what a gateway sees of streamed answers; None before the first of each.

    prompt_seconds: what a prompt takes, of requests that had a place at once. answer_seconds: from the first
    piece of an answer to its end; none of broken ones.
    """

    prompt_seconds: float | None = None
    answer_seconds: float | None = None

    def answered(self, seconds: float, num_prompts: float) -> None:
        """A first piece came so long after its request was given to a replica, which had a place for it and
        then so many prompts to compute, its own among them."""
        self.prompt_seconds = _mean(self.prompt_seconds, seconds / max(1.0, num_prompts))

    def ended(self, seconds: float) -> None:
        """An answer has left its place so long after its first piece."""
        self.answer_seconds = _mean(self.answer_seconds, seconds)

    def prompts_per_place(self, max_num_seqs: int) -> float:
        """How many prompts take as long as one of so many places is waited for, where all are taken."""
        if not self.prompt_seconds or self.answer_seconds is None:
            return ASSUMED_PROMPTS_PER_PLACE
        return min(MOST_PROMPTS_PER_PLACE, self.answer_seconds / max_num_seqs / self.prompt_seconds)


def _mean(so_far: float | None, latest: float) -> float:
    return latest if so_far is None else so_far + LATEST_SHARE * (latest - so_far)


class Given(NamedTuple):
    """A request was given to a replica with `num_prompts` to compute and `num_met` requests in all,
    its own among them."""

    at: float
    num_prompts: float
    num_met: float


@dataclass(slots=True, eq=False, kw_only=True)
class ReplicaLoad:
    """What one gateway has given a replica, and what the replica said of it.

    num_late: of those in flight, by its latest answer, requests that wait too late to be answered in time;
    0 where these are not most. num_unanswered: of those in flight, requests whose answer is to be streamed
    and of which nothing has come. max_num_seqs: how many it computes at once, by its latest answer, before
    which it is taken to be like the others; None before any answer. busy_until: when it will again be chosen
    like the others, after a 503. last_picked: the number of the choice that fell on it last.
    """

    in_flight: int = 0
    num_late: float = 0.0
    num_unanswered: int = 0
    max_num_seqs: int | None = None
    busy_until: float = 0.0
    last_picked: int = 0

    @property
    def num_met(self) -> float:
        """Requests that a new one meets there: it overtakes the late."""
        return max(0.0, self.in_flight - self.num_late)

    @property
    def num_prompts(self) -> float:
        """Of these, those whose prompts are to be computed, as far as it can be told."""
        return max(0.0, self.num_unanswered - self.num_late)

    def given(self, now: float) -> Given:
        """Of the request that was given to it last, and is counted."""
        return Given(now, self.num_prompts, self.num_met)

    def note_answered(self, given: Given, pace: Pace, now: float) -> None:
        """The first piece of a stream is here. Where it waited for a place, or the late let others pass, its
        time says nothing of prompts."""
        if self.max_num_seqs is not None and given.num_met <= self.max_num_seqs and not self.num_late:
            pace.answered(now - given.at, given.num_prompts)

    def note_late_share(self, share: float) -> None:
        """It said what share of its requests waits too late; this gateway's are taken to be no others."""
        self.num_late = share * self.in_flight if share > MOSTLY_LATE else 0.0

    def note_busy(self, now: float) -> None:
        """It answered 503."""
        self.busy_until = now + BUSY_SECONDS

    def take_back(self) -> None:
        """One request less in flight; it was late as likely as any other there."""
        self.num_late *= (self.in_flight - 1) / self.in_flight
        self.in_flight -= 1

    def rank(self, pace: Pace, now: float) -> tuple[bool, float, int]:
        """Of several, the one with the least takes the next request."""
        return now < self.busy_until, self.load(pace), self.last_picked

    def load(self, pace: Pace) -> float:
        """What a new one would wait for."""
        met, prompts = self.num_met, self.num_prompts
        if self.max_num_seqs is not None and met >= self.max_num_seqs:
            # One place: those who wait for theirs before it are prompts, too, streamed or not.
            prompts = max(prompts, met - self.max_num_seqs) + pace.prompts_per_place(self.max_num_seqs)
        return met + UNANSWERED_WEIGHT * prompts
