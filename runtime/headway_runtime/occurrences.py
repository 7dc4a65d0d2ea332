"""Which tokens occur in the sequences that are penalized for them, and how often.

A token that is UNREAD is not counted: the device alone knows which it is. Counted on from step to step while
a sequence stays in the batch; one that comes back, after a preemption or a pause, is counted from its tokens
again. So nothing has to be told here when a sequence ends.
"""

import numpy
from numpy.typing import NDArray

from headway_runtime.batch import UNREAD, Chunk

Counts = tuple[NDArray[numpy.int64], NDArray[numpy.float32]]
# Room for different tokens that a sequence begins with.
FIRST_ROOM = 64


class OccurrenceCounters:
    """The counts of all sequences of the batch."""

    def __init__(self) -> None:
        self._live: dict[int, _Occurrences] = {}
        self._previous: dict[int, _Occurrences] = {}

    def next_step(self) -> None:
        """Forget those who were not counted in the step before."""
        self._previous, self._live = self._live, {}

    def count(self, chunk: Chunk) -> Counts:
        """Tokens, each once, and how often each is in the answer; those of the prompt alone 0 times."""
        # The list is the sequence's own, and kept alive here, so that no other one has its identity.
        found = self._previous.get(id(chunk.token_ids))
        if found is None:
            found = _Occurrences(chunk)
        self._live[id(chunk.token_ids)] = found
        return _with_guesses(found.count(), chunk.ahead) if chunk.ahead else found.count()


def _with_guesses(counts: Counts, ahead: tuple[int, ...]) -> Counts:
    """The counts once these tokens have been generated, too."""
    tokens, numbers = counts
    guessed, more = numpy.unique(numpy.array(ahead, dtype=numpy.int64), return_counts=True)
    numbers = numbers.copy()
    is_new = numpy.ones(len(guessed), dtype=numpy.bool_)
    for index, token in enumerate(guessed):
        places = numpy.flatnonzero(tokens == token)
        if len(places):
            numbers[places[0]] += more[index]
            is_new[index] = False
    return (
        numpy.concatenate([tokens, guessed[is_new]]),
        numpy.concatenate([numbers, more[is_new].astype(numpy.float32)]),
    )


class _Occurrences:
    """The counts of one sequence."""

    __slots__ = ("_counts", "_num_counted", "_places", "_token_ids", "_tokens")

    def __init__(self, chunk: Chunk) -> None:
        self._token_ids = chunk.token_ids
        num_prompt = len(chunk.token_ids) - chunk.num_generated
        # Without a repetition penalty the prompt does not count.
        is_whole = chunk.sampling.repetition_penalty != 1.0
        tokens = list(dict.fromkeys(chunk.token_ids[:num_prompt])) if is_whole else []
        self._places = {token: place for place, token in enumerate(tokens)}
        self._tokens = numpy.array(tokens + [0] * FIRST_ROOM, dtype=numpy.int64)
        self._counts = numpy.zeros(len(self._tokens), dtype=numpy.float32)
        self._num_counted = num_prompt

    def count(self) -> Counts:
        num_read = len(self._token_ids) - (self._token_ids[-1] == UNREAD)
        for token in self._token_ids[self._num_counted : num_read]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens = numpy.concatenate([self._tokens, numpy.zeros_like(self._tokens)])
                self._counts = numpy.concatenate([self._counts, numpy.zeros_like(self._counts)])
            self._tokens[place] = token
            self._counts[place] += 1.0
        self._num_counted = num_read
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]
