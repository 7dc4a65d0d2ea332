"""How many tokens are guessed: simulated engines with known costs and known luck, step after step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headway_runtime.draft_policy import LAST_PROBE, Acceptance, DraftPolicy

PROMPT_TOKENS = 1000
ROOM = 10**6


@dataclass
class Machine:
    """step_seconds: by rows. draft_seconds: of a pass, by sequences. luck: how often a guess comes true.

    catch_up_seconds: of a sequence that is guessed for the first time; first_catch_up_seconds: of the very
    first one. answer_tokens: then another one comes. most_guesses: that a step has room for.
    overlaps: whether steps that are to have no guesses are chosen while the one before them runs.
    """

    step_seconds: Callable[[int], float]
    draft_seconds: Callable[[int], float]
    luck: float
    num_sequences: int
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    noise: float = 0.1
    catch_up_seconds: float = 0.0
    first_catch_up_seconds: float | None = None
    answer_tokens: int = 10**9
    most_guesses: int = 10**9
    overlaps: bool = False
    num_blind_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    num_guessing_steps: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(4)
        self.acceptances = [Acceptance() for _ in range(self.num_sequences)]
        self.lacking = [True] * self.num_sequences
        self.left = [self.answer_tokens] * self.num_sequences

    def run(self, num_steps: int, most: int = 6) -> None:
        """Decode for that many steps."""
        self.seconds = self.num_tokens = self.num_guessing_steps = self.num_blind_steps = 0
        for _ in range(num_steps):
            may_guess = self.policy.may_guess(self.acceptances, most)
            is_blind = self.overlaps and not may_guess
            self.num_blind_steps += is_blind
            lengths = self.policy.lengths(self.acceptances, most, ROOM, is_blind=is_blind)
            assert may_guess or not any(lengths), "a step that could have guesses is known to be one"
            assert all(0 <= length <= most for length in lengths)
            room, num_tokens = self.most_guesses, self.num_tokens
            for place, length in enumerate(lengths):
                lengths[place] = min(length, room)
                room -= lengths[place]
            noise = 1.0 + self.random.uniform(-self.noise, self.noise)
            step = self.step_seconds(len(lengths) + sum(lengths)) * noise
            self.policy.observe_step(len(lengths) + sum(lengths), step)
            draft = max(lengths) * self.draft_seconds(sum(length > 0 for length in lengths))
            if max(lengths):
                self.num_guessing_steps += 1
                self.policy.observe_drafts(sum(length > 0 for length in lengths), max(lengths), draft)
            self.seconds += step + draft
            for place, length in enumerate(lengths):
                acceptance = self.acceptances[place]
                if length and self.lacking[place]:
                    self.lacking[place] = False
                    first, self.first_catch_up_seconds = self.first_catch_up_seconds, None
                    catch_up = self.catch_up_seconds if first is None else first
                    self.seconds += catch_up
                    self.policy.observe_catch_up(PROMPT_TOKENS, catch_up)
                num_true = next((i for i in range(length) if self.random.random() > self.luck), length)
                self.num_tokens += 1 + num_true
                if length:
                    self.policy.observe_guesses(acceptance, length, num_true)
                self.left[place] -= 1 + num_true
                if self.left[place] <= 0:
                    self.policy.observe_answer(acceptance, PROMPT_TOKENS)
                    self.acceptances[place], self.lacking[place] = Acceptance(), True
                    self.left[place] = self.answer_tokens
            if any(lengths):
                self.policy.observe_outcome(len(lengths), self.num_tokens - num_tokens, step + draft)

    @property
    def speedup(self) -> float:
        """Over decoding without guesses."""
        plain = self.step_seconds(self.num_sequences) * self.num_tokens / self.num_sequences
        return plain / self.seconds


def waits_for_memory(rows: int) -> float:
    """Rows are nearly free up to some, as on an engine that streams its weights."""
    return 0.020 + 0.0002 * rows


def computes(rows: int) -> float:
    """Each row costs, as in a large batch."""
    return 0.002 + 0.002 * rows


def pays_for_one_row_as_for_many(rows: int) -> float:
    """A tenth more for any row beyond 16, as where kernels take 16 rows at a time."""
    return 0.022 if rows > 16 else 0.020


def small_draft(_: int) -> float:
    return 0.002


def free(_: int) -> float:
    return 0.0


def test_good_guesses_are_made_long_where_rows_are_free() -> None:
    machine = Machine(waits_for_memory, small_draft, luck=0.85, num_sequences=1)
    machine.run(100)
    machine.run(500)
    # (1 - 0.85**7) / 0.15 tokens in (21.4 + 12) / 20.2 of the time are 2.7 times as fast.
    assert machine.speedup > 2.1
    assert machine.num_guessing_steps > 450


@pytest.mark.parametrize("luck", [0.05, 0.3, 0.6])
def test_nothing_is_lost_where_each_row_costs(luck: float) -> None:
    machine = Machine(computes, small_draft, luck, num_sequences=16)
    machine.run(100)
    machine.run(2000)
    assert machine.speedup > 0.985
    assert machine.num_guessing_steps <= 10


def test_bad_guesses_are_given_up_and_tried_again_ever_more_rarely() -> None:
    machine = Machine(waits_for_memory, small_draft, luck=0.0, num_sequences=4)
    machine.run(200)
    machine.run(5000)
    assert 1 <= machine.num_guessing_steps <= 5000 / LAST_PROBE + 5
    assert machine.speedup > 0.99


def test_the_last_ones_of_a_batch_do_not_make_the_next_batch_learn_again() -> None:
    machine = Machine(computes, free, luck=0.1, num_sequences=16)
    machine.run(6000)
    few = Machine(waits_for_memory, free, luck=0.9, num_sequences=2, policy=machine.policy)
    num_tries = 0
    for _ in range(20):
        few.run(10)
        assert few.num_guessing_steps  # guessing pays there
        machine.run(100)
        num_tries += machine.num_guessing_steps
    assert num_tries <= 3  # 2,000 steps, of which one in LAST_PROBE tries


def test_a_guess_that_seemed_to_pay_for_a_moment_begins_no_new_tries() -> None:
    machine = Machine(pays_for_one_row_as_for_many, free, luck=0.03, num_sequences=16)
    machine.run(6000)
    num_guessing_steps = 0
    for _ in range(20):
        machine.acceptances[0].rate = 0.97
        machine.run(100)
        num_guessing_steps += machine.num_guessing_steps
    # Three or four until each such belief has been found wrong, and no series of tries after it.
    assert num_guessing_steps <= 20 * 4


def test_luck_that_turns_is_noticed() -> None:
    machine = Machine(waits_for_memory, small_draft, luck=0.0, num_sequences=2)
    machine.run(300)
    machine.luck = 0.9
    machine.run(6 * LAST_PROBE)
    machine.run(300)
    assert machine.speedup > 1.8
    machine.luck = 0.0
    machine.run(100)
    machine.run(500)
    assert machine.speedup > 0.97


def test_a_growing_batch_ends_guessing_and_a_shrinking_one_brings_it_back() -> None:
    def step_seconds(rows: int) -> float:
        return max(0.020, 0.0012 * rows)

    machine = Machine(step_seconds, small_draft, luck=0.7, num_sequences=1)
    machine.run(300)
    assert machine.speedup > 1.4
    many = Machine(step_seconds, small_draft, luck=0.7, num_sequences=64, policy=machine.policy)
    many.run(50)
    many.run(500)
    assert many.speedup > 0.98
    machine.run(20)
    machine.run(200)
    assert machine.speedup > 1.4


def test_each_sequence_gets_what_its_own_luck_is_worth() -> None:
    policy = DraftPolicy()
    lucky, unlucky = Acceptance(0.95, is_own=True), Acceptance(0.05, is_own=True)
    for rows in (2, 8):
        policy.observe_step(rows, waits_for_memory(rows))
    policy.observe_drafts(1, 1, 0.002)
    lengths = policy.lengths([lucky, unlucky], 6, ROOM)
    assert lengths[0] >= 4
    assert lengths[1] == 0


def test_prompt_lookup_costs_no_passes() -> None:
    machine = Machine(waits_for_memory, free, luck=0.5, num_sequences=1)
    machine.run(100)
    machine.run(500)
    assert machine.speedup > 1.7


def test_a_first_time_that_takes_long_is_no_measure_of_later_ones() -> None:
    """Kernels are compiled then, and weights read from a disk."""
    machine = Machine(
        waits_for_memory,
        small_draft,
        0.9,
        1,
        catch_up_seconds=0.02,
        first_catch_up_seconds=2.0,
        answer_tokens=160,
    )
    machine.run(100)
    machine.run(200)
    assert machine.speedup > 1.5


def test_a_first_step_that_takes_long_is_no_measure_of_its_size() -> None:
    """Its kernels are compiled then; and guesses that nearly all come true are worth a step of that size."""
    slow = {7: 0.2}
    machine = Machine(lambda rows: slow.pop(rows, waits_for_memory(rows)), small_draft, 0.98, 1)
    machine.run(60)
    assert not slow
    machine.run(200)
    assert machine.speedup > 3.0


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_prompts_that_the_draft_must_read_are_charged_to_its_guesses(num_sequences: int) -> None:
    """Ten tokens are not worth a tenth of a second before the first of them; a thousand are."""
    short = Machine(waits_for_memory, small_draft, 0.6, num_sequences, catch_up_seconds=0.1, answer_tokens=10)
    short.run(300)
    short.run(3000)
    assert short.speedup > 0.97
    long = Machine(
        waits_for_memory, small_draft, 0.6, num_sequences, catch_up_seconds=0.1, answer_tokens=1000
    )
    long.run(300)
    long.run(2000)
    assert long.speedup > 1.15


def test_guesses_that_find_no_room_are_no_reason_to_go_on() -> None:
    """All are to be guessed for, which would pay; there is room for one guess a step, which does not."""

    def step_seconds(rows: int) -> float:
        return {16: 0.020, 17: 0.024}.get(rows, 0.026)

    whole = Machine(step_seconds, free, luck=0.9, num_sequences=16)
    whole.run(100)
    whole.run(500)
    assert whole.speedup > 3.0
    cramped = Machine(step_seconds, free, luck=0.9, num_sequences=16, policy=whole.policy, most_guesses=1)
    cramped.run(500)
    cramped.run(3000)
    assert cramped.speedup > 0.98
    whole.run(2 * LAST_PROBE)
    whole.run(500)
    assert whole.speedup > 3.0


def test_larger_steps_than_any_before_are_expected_to_cost_more() -> None:
    """Else the largest is chosen for ever where there is room for half of it."""
    policy = DraftPolicy()
    for rows in (16, 24, 32):
        for _ in range(3):
            policy.observe_step(rows, computes(rows))
    sure = [Acceptance(0.9, is_own=True) for _ in range(16)]
    assert not any(policy.lengths(sure, 6, ROOM))


def test_only_tokens_that_might_have_been_guessed_bear_what_catching_up_costs() -> None:
    """Of an answer whose other tokens come in steps without room for guesses."""
    policy = DraftPolicy()

    def is_worth_it(num_answer_tokens: int) -> bool:
        for _ in range(100):
            policy.observe_answer(Acceptance(num_tokens=num_answer_tokens), 1000)
        return any(policy.lengths([Acceptance(0.8, is_own=True)], 4, ROOM))

    for rows in range(1, 8):
        for _ in range(3):
            policy.observe_step(rows, 0.020)
    for _ in range(4):
        policy.observe_catch_up(100, 0.1)  # a second for each prompt
    assert not is_worth_it(20)
    assert is_worth_it(1000)


def test_a_slow_first_guess_does_not_decide() -> None:
    machine = Machine(waits_for_memory, small_draft, luck=0.8, num_sequences=1)
    machine.policy.observe_step(1, waits_for_memory(1))
    machine.policy.observe_drafts(1, 1, 0.5)
    machine.policy.observe_step(2, 0.5)
    machine.run(40)
    machine.run(100)
    assert machine.speedup > 1.8


def test_one_slow_step_does_not_decide() -> None:
    machine = Machine(waits_for_memory, small_draft, luck=0.8, num_sequences=1)
    machine.run(200)
    machine.policy.observe_step(1, 50.0)
    machine.policy.observe_step(5, 50.0)
    machine.run(50)
    machine.run(300)
    assert machine.speedup > 1.8


@pytest.mark.parametrize("luck", [0.0, 0.85])
def test_steps_that_are_chosen_early_learn_and_try_as_others_do(luck: float) -> None:
    machines = [
        Machine(waits_for_memory, small_draft, luck, 4, overlaps=overlaps) for overlaps in (False, True)
    ]
    for machine in machines:
        machine.run(3000)
    plain, overlapping = machines
    assert overlapping.num_guessing_steps == plain.num_guessing_steps > 0
    assert overlapping.seconds == plain.seconds
    assert plain.num_blind_steps == 0
    if luck:
        # Where guesses pay, each step waits for those before it, but for the first, the measure of all.
        assert overlapping.num_blind_steps < 10
    else:
        # Tries after 4, 8, 16, ... steps, and as many until the first were found wrong.
        assert overlapping.num_blind_steps > 0.98 * 3000


def test_a_try_that_comes_too_early_is_made_up_for_at_the_next_step() -> None:
    policy = DraftPolicy()
    sequences = [Acceptance(0.0, is_own=True)]
    policy.observe_step(1, 0.020)
    assert not any(
        policy.may_guess(sequences, 2) or any(policy.lengths(sequences, 2, ROOM)) for _ in range(3)
    )
    assert policy.may_guess(sequences, 2)
    assert not any(policy.lengths(sequences, 2, ROOM, is_blind=True))
    assert policy.may_guess(sequences, 2)
    assert any(policy.lengths(sequences, 2, ROOM))
    assert not policy.may_guess(sequences, 2)


def test_nothing_may_be_guessed_where_there_is_nobody_or_no_leave() -> None:
    always = DraftPolicy(is_adaptive=False)
    assert always.may_guess([Acceptance()], 1)
    assert not always.may_guess([], 4)
    assert not always.may_guess([Acceptance()], 0)
    assert always.lengths([Acceptance()] * 2, 3, ROOM, is_blind=True) == [0, 0]


def test_nobody_decoding_is_no_work() -> None:
    assert DraftPolicy().lengths([], 4, ROOM) == []


def test_a_dozen_wrong_guesses_are_enough_to_doubt_the_rest() -> None:
    """At first each counts for more than what was assumed: new sequences are not tried in vain."""
    policy = DraftPolicy()
    for size, seconds in ((16, 0.020), (32, 0.028)):
        for _ in range(9):
            policy.observe_step(size, seconds)
    assert any(policy.lengths([Acceptance() for _ in range(16)], 1, ROOM)), "what is assumed is worth a try"
    for _ in range(12):
        policy.observe_guesses(Acceptance(), 1, 0)
    assert not any(policy.lengths([Acceptance() for _ in range(16)], 1, ROOM))
    for _ in range(60):
        policy.observe_guesses(Acceptance(), 1, 1)
    assert any(policy.lengths([Acceptance() for _ in range(16)], 1, ROOM)), "and it is not for ever"
