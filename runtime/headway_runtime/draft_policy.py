"""How many tokens are guessed ahead for each sequence, so that speculation never costs more than it brings.

A guess is right with a probability that is learnt for each sequence (`Acceptance`), so that k guesses bring
1 + a + a^2 + ... + a^k tokens. What they cost is learnt, too, from the steps themselves: seconds of a step
with so many rows, and seconds of a pass of the draft model for so many sequences. Before each step the
lengths are chosen that bring most tokens per second:

    tokens / (step(rows) + passes * draft(sequences) + tokens * catch-up), tokens = sum of 1 + a + ... + a^k

over the sequences, with rows = sequences + all guesses. Before a draft model guesses for a sequence it
computes what it lacks of it, its prompt mostly: what that takes for a prompt is charged to each token, over
the tokens that answers have on average from steps with room for guesses (prompts leave none). The first time
says nothing of later ones (kernels are compiled, the draft reads its weights for the first time), and would
keep the second from ever being tried: it is left out.

What is promised so need not come: the draft is still at the prompts of some, or a cost was read between
places that were never seen. So what steps with guesses brought is kept, too, by the number of sequences;
where that was less than steps without would have brought, no promise counts.

A guess is worth its row if a^k is above some bound, the same for all sequences, so a few bounds are tried.
At small batches a step waits for memory and rows are nearly free; at large ones they cost as much as tokens
do, and the best is to guess nothing at all.

Learning needs both kinds of steps. Where guesses pay, every PLAIN_STEPS-th step is without, so that it stays
known what such a step costs. Where they do not, two tokens each are guessed now and then: after FIRST_PROBE
steps, then after twice as many, and so on, because what the first guesses cost says little, and later ones
seldom say anything new; and not before what catching up takes is a hundredth of the time since the last try.
Each number of sequences, by powers of two, has such a pace of its own, so that the few that are left of a
batch do not begin the learning of the next one anew; nor does a guess that seemed to pay for a moment.

Guesses follow tokens that are known, so a step with guesses is scheduled once the one before it was read. A
step without may be scheduled before: `may_guess` says which it is going to be, as far as that can be known by
then, and where a step turns out to have been scheduled too early for guesses, it makes none.

Owns no tokens, no clock and no torch. The idea of choosing lengths by a cost model and acceptance is that of
SmartSpec (arXiv 2406.14066).
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

PLAIN_STEPS = 64
FIRST_PROBE = 4
LAST_PROBE = 1024
# Guessing must promise so much more than not guessing: what is learnt is noisy.
LEAST_GAIN = 1.03
# A guess is worth its row if it comes true at least so often; the lengths that follow are compared.
BOUNDS = (0.75, 0.6, 0.45, 0.3, 0.2, 0.12, 0.07)
FIRST_ACCEPTANCE = 0.6
OWN_WEIGHT = 0.15
# What one more answer counts for in the average of their lengths.
ANSWER_WEIGHT = 0.05
# Share of the time that catching up for mere tries may take.
MOST_LOST = 0.01
COMMON_WEIGHT = 0.02
# Of what steps with guesses brought, what is kept from one to the next, and at each try without one.
KEPT_PER_STEP = 0.97
KEPT_PER_TRY = 0.8
# At first they are taken to bring as much as others, as if so many had been seen.
ASSUMED_STEPS = 8.0
# One step may take any time, when its kernels are compiled; for this little it counts at least.
LEAST_OUTCOME = 0.5
# Below this they cost more than they bring. That of 30 steps is known to a hundredth or two.
LEAST_MEAN = 0.98
# What is assumed of the first sequences counts for as much as so many guesses that were seen.
ASSUMED_GUESSES = 8
# A cost is the median of so many latest ones; of fewer than LEAST_COSTS, the lowest.
NUM_COSTS = 9
LEAST_COSTS = 3


@dataclass(slots=True)
class Acceptance:
    """How often a guess for one sequence came true, where all before it had."""

    rate: float = FIRST_ACCEPTANCE
    is_own: bool = False
    # That came in steps with room for guesses.
    num_tokens: int = 0


@dataclass(slots=True)
class _Pace:
    """Of tries, or of steps without guesses while guessing pays. num_steps: since the last one."""

    num_steps: int = 0
    probe_steps: int = FIRST_PROBE
    is_paying: bool = False
    has_paid_steps: int = 0
    # Over steps with guesses, the latest more: how many times as fast as without they were, and their number.
    outcomes: float = ASSUMED_STEPS
    num_outcomes: float = ASSUMED_STEPS

    @property
    def is_losing(self) -> bool:
        """Whether guesses have cost more than they brought."""
        return self.outcomes < LEAST_MEAN * self.num_outcomes

    def settle(self, outcome: float) -> None:
        """One step with guesses."""
        self._forget(KEPT_PER_STEP)
        self.outcomes += max(LEAST_OUTCOME, outcome)
        self.num_outcomes += 1.0

    def forgive(self) -> None:
        """Things may have changed since."""
        self._forget(KEPT_PER_TRY)

    def _forget(self, kept: float) -> None:
        self.outcomes += (1.0 - kept) * (ASSUMED_STEPS - self.outcomes)
        self.num_outcomes += (1.0 - kept) * (ASSUMED_STEPS - self.num_outcomes)

    def turn(self, *, is_paying: bool) -> None:
        """One more step, for which guessing pays, or not."""
        self.num_steps += 1
        if is_paying == self.is_paying:
            self.has_paid_steps += is_paying
            return
        # What has paid for long and does no more may soon do so again.
        if not is_paying and self.has_paid_steps >= PLAIN_STEPS:
            self.probe_steps = FIRST_PROBE
        self.is_paying, self.num_steps, self.has_paid_steps = is_paying, 0, int(is_paying)


class DraftPolicy:
    """The learnt numbers of one engine. is_adaptive: whether they decide anything."""

    def __init__(self, *, is_adaptive: bool = True) -> None:
        self._is_adaptive = is_adaptive
        self._common = FIRST_ACCEPTANCE
        self._num_guesses = ASSUMED_GUESSES
        self._step_costs = _Costs()
        self._draft_costs = _Costs()
        # On average: of an answer, in steps with room for guesses, and of its prompt, those computed.
        self._answer_tokens: float | None = None
        self._prompt_tokens: float | None = None
        # Seconds in which the draft computed a token that it lacked, but for the very first time.
        self._catch_ups: deque[float] = deque(maxlen=NUM_COSTS)
        self._has_caught_up = False
        self._paces: defaultdict[int, _Pace] = defaultdict(_Pace)

    def may_guess(self, acceptances: Sequence[Acceptance], most: int) -> bool:
        """Whether a step that decodes these sequences could have guesses, `most` at most for each.

        False: `lengths` would choose none. True: it would if there is room. Changes nothing.
        """
        if not acceptances or not most:
            return False
        if not self._is_adaptive:
            return True
        number = len(acceptances)
        pace = self._pace(number)
        # A try comes with the next step, if it is one more of those that do without.
        if not pace.is_paying and pace.num_steps + 1 >= self._steps_to_probe(number, pace):
            return True
        return any(self._promising(acceptances, pace, most, most * number))

    def lengths(
        self, acceptances: Sequence[Acceptance], most: int, room: int, *, is_blind: bool = False
    ) -> list[int]:
        """Guesses for each of these sequences, `most` at most, in all no more than there is room for.

        is_blind: their latest tokens are not known yet, so none are guessed; the step counts as one without.
        """
        if not acceptances:
            return []
        number = len(acceptances)
        if not self._is_adaptive:
            return [0] * number if is_blind else _within(room, [most] * number)
        for one in acceptances:
            one.num_tokens += 1
        pace = self._pace(number)
        if is_blind:
            pace.turn(is_paying=False)
            return [0] * number
        best = self._promising(acceptances, pace, most, room)
        pace.turn(is_paying=any(best))
        if pace.num_steps < (PLAIN_STEPS if pace.is_paying else self._steps_to_probe(number, pace)):
            return best
        pace.num_steps = 0
        if pace.is_paying:
            return [0] * number
        pace.probe_steps = min(2 * pace.probe_steps, LAST_PROBE)
        pace.forgive()
        # Two, as the draft's first pass has to catch up and so does not say what a pass costs.
        return _within(room, [min(2, most)] * number)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step that only decoded, without what guessing took."""
        self._step_costs.observe(num_rows, seconds)

    def observe_drafts(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        """Guessing for so many sequences. num_passes: of the draft model, at least 1."""
        self._draft_costs.observe(num_sequences, seconds / num_passes)

    def observe_outcome(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """What a step with guesses brought, and took with them; not what catching up took."""
        plain = self._step_costs.at(num_sequences)
        if plain:
            self._pace(num_sequences).settle(num_tokens * plain / (num_sequences * seconds))

    def observe_catch_up(self, num_tokens: int, seconds: float) -> None:
        """What the draft model took to compute so many tokens that it lacked."""
        if self._has_caught_up:
            self._catch_ups.append(seconds / num_tokens)
        self._has_caught_up = True

    def observe_answer(self, acceptance: Acceptance, num_prompt_tokens: int) -> None:
        """An answer that has ended. num_prompt_tokens: of its prompt, those that were computed for it."""
        self._answer_tokens = _averaged(self._answer_tokens, acceptance.num_tokens)
        self._prompt_tokens = _averaged(self._prompt_tokens, num_prompt_tokens)

    def observe_guesses(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """So many guesses for a sequence, and how many of them came true."""
        if not acceptance.is_own:
            acceptance.rate, acceptance.is_own = self._common, True
        acceptance.num_tokens += num_accepted
        for index in range(min(num_accepted + 1, num_drafted)):
            came_true = float(index < num_accepted)
            acceptance.rate += OWN_WEIGHT * (came_true - acceptance.rate)
            # At first the mean of all, then of the latest.
            self._num_guesses += 1
            self._common += max(COMMON_WEIGHT, 1 / self._num_guesses) * (came_true - self._common)

    def plain_seconds(self, num_sequences: int) -> float | None:
        """What a step without guesses takes, as far as is known."""
        return self._step_costs.at(num_sequences)

    def _pace(self, num_sequences: int) -> _Pace:
        return self._paces[num_sequences.bit_length()]

    @property
    def _catch_up_seconds(self) -> float:
        """Of a sequence; 0 where it is not known yet."""
        return _typical(self._catch_ups) * (self._prompt_tokens or 0.0) if self._catch_ups else 0.0

    def _steps_to_probe(self, num_sequences: int, pace: _Pace) -> float:
        """How many steps without guesses there must be before the next try."""
        plain = self._step_costs.at(num_sequences)
        if not plain or not self._catch_up_seconds:
            return pace.probe_steps
        return max(pace.probe_steps, num_sequences * self._catch_up_seconds / (MOST_LOST * plain))

    def _promising(self, acceptances: Sequence[Acceptance], pace: _Pace, most: int, room: int) -> list[int]:
        """The lengths that bring most; none where such promises were not kept."""
        if pace.is_losing:
            return [0] * len(acceptances)
        rates = [min(0.98, one.rate if one.is_own else self._common) for one in acceptances]
        return self._best(rates, most, room)

    def _best(self, rates: Sequence[float], most: int, room: int) -> list[int]:
        number = len(rates)
        best = [0] * number
        plain = self._step_costs.at(number)
        if plain is None:
            # Nothing is known yet: one step without guesses is the measure of all that follow.
            return best
        best_value = LEAST_GAIN * number / plain
        catch_up = self._catch_up_seconds / max(1.0, self._answer_tokens or math.inf)
        highest = max(rates)
        for bound in BOUNDS:
            if highest < bound or not _length(highest, bound, most):
                continue
            lengths = _within(room, [_length(rate, bound, most) for rate in rates])
            tokens = sum(
                (1.0 - rate ** (length + 1)) / (1.0 - rate)
                for rate, length in zip(rates, lengths, strict=True)
            )
            step = self._step_costs.at(number + sum(lengths)) or plain
            draft = self._draft_costs.at(sum(length > 0 for length in lengths)) or 0.0
            value = tokens / (max(step, plain) + max(lengths) * draft + tokens * catch_up)
            if value > best_value:
                best, best_value = lengths, value
        return best


def _length(rate: float, bound: float, most: int) -> int:
    """The guesses of which each comes true with at least probability `bound`."""
    return 0 if rate < bound else min(most, int(math.log(bound) / math.log(rate)))


def _within(room: int, lengths: list[int]) -> list[int]:
    """The first ones first."""
    if sum(lengths) <= room:
        return lengths
    found = []
    for length in lengths:
        found.append(min(length, room))
        room -= found[-1]
    return found


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + ANSWER_WEIGHT * (value - average)


def _typical(latest: Collection[float]) -> float:
    """The median; of fewer than LEAST_COSTS, the lowest."""
    return sorted(latest)[len(latest) // 2 if len(latest) >= LEAST_COSTS else 0]


class _Costs:
    """Seconds by size, learnt where they were seen, and read between those places on a straight line.

    Beyond them it goes on as it rose so far.
    A size that was hardly seen yet is taken for no more than in proportion to the next smaller one: what it
    took the first time (kernels are compiled) would else be what keeps it from being tried again.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []

    def observe(self, size: int, seconds: float) -> None:
        """Sizes above 16 share a place with their neighbours."""
        shift = max(0, size.bit_length() - 5)
        place = size >> shift << shift
        latest = self._latest.get(place)
        if latest is None:
            latest = self._latest[place] = deque(maxlen=NUM_COSTS)
            self._sizes = sorted(self._latest)
        latest.append(seconds)
        self._seconds[place] = _typical(latest)

    def at(self, size: int) -> float | None:
        """None where nothing is known."""
        sizes = self._sizes
        if not sizes:
            return None
        low = max((one for one in sizes if one <= size), default=None)
        high = min((one for one in sizes if one >= size), default=None)
        if low is None:
            return self._believed(sizes[0])
        if high is None:
            low, high = sizes[0], sizes[-1]
            rise = self._believed(high) - self._believed(low)
            return self._believed(high) + max(0.0, rise) * (size - high) / max(1, high - low)
        if low == high:
            return self._believed(low)
        share = (size - low) / (high - low)
        start, end = self._believed(low), self._believed(high)
        return start + share * (end - start)

    def _believed(self, place: int) -> float:
        seconds = self._seconds[place]
        smaller = self._sizes.index(place) - 1
        if smaller < 0 or len(self._latest[place]) >= LEAST_COSTS:
            return seconds
        before = self._sizes[smaller]
        return min(seconds, self._seconds[before] * place / before)
