"""The scheduler while a step is under way: what it assumes, and what follows when it turns out otherwise."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from headway_runtime.batch import UNREAD, Batch, Sample, StepResult
from headway_runtime.commits import Committed
from headway_runtime.config import Limits
from headway_runtime.draft_policy import Acceptance, DraftPolicy
from headway_runtime.request import FinishReason, Grammar, Request, SamplingParams
from headway_runtime.scheduler import Schedule, Scheduler
from headway_runtime.step_draft import StepDraft

BLOCK_SIZE = 4
STOP = 99
PLAIN = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=frozenset({STOP}))


class Steps:
    """A scheduler, driven by hand: tokens are what the test says."""

    def __init__(self, num_blocks: int = 32, limits: Limits | None = None, max_model_len: int = 64) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            limits=limits or Limits(8, 32),
            long_prefill_share=1.0,
        )
        self.now = 0.0

    def add(self, name: str, prompt: range, sampling: SamplingParams = PLAIN, salt: str = "") -> None:
        self.scheduler.add(Request(name, tuple(prompt), sampling, self.now, cache_salt=salt))

    def launch(self) -> Schedule:
        self.now += 1.0
        schedule = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self.scheduler.launch(schedule.batch)
        self.scheduler.check_integrity()
        return schedule

    def read(self, schedule: Schedule, **tokens: int | None) -> Committed:
        """What each request got; 1 for those that are not named, None for logits that are not finite."""
        samples = tuple(
            Sample(tokens.get(chunk.request_id, 1)) if chunk.samples else None
            for chunk in schedule.batch.chunks
        )
        committed = self.scheduler.commit(schedule.batch, StepResult(samples), self.now)
        self.scheduler.check_integrity()
        return committed


def names(batch: Batch) -> list[str]:
    return [chunk.request_id for chunk in batch.chunks]


def progress(committed: Committed) -> dict[str, tuple[int | None, FinishReason | None]]:
    return {
        one.sequence.request.request_id: (one.sample.token_id, one.finish_reason)
        for one in committed.progress
    }


def test_the_next_step_computes_the_token_that_is_not_read_yet() -> None:
    steps = Steps()
    steps.add("a", range(6))
    first = steps.launch()
    second = steps.launch()
    (chunk,) = second.batch.chunks
    assert (chunk.start, chunk.num_tokens, chunk.num_generated) == (6, 1, 1)
    assert chunk.token_ids[6] == UNREAD
    assert progress(steps.read(first, a=17)) == {"a": (17, None)}
    assert chunk.token_ids == [*range(6), 17, UNREAD]
    assert progress(steps.read(second, a=18)) == {"a": (18, None)}
    assert chunk.token_ids == [*range(6), 17, 18]


def test_a_prompt_goes_on_while_its_beginning_is_under_way() -> None:
    steps = Steps(limits=Limits(8, 8))
    steps.add("a", range(20))
    launched = [steps.launch()]
    shares = []
    for _ in range(4):
        launched.append(steps.launch())
        steps.read(launched.pop(0))
        shares.append([(chunk.start, chunk.num_tokens) for chunk in launched[0].batch.chunks])
    assert shares == [[(8, 8)], [(16, 4)], [(20, 1)], [(21, 1)]]


def test_a_stop_token_is_noticed_late_and_what_was_computed_meanwhile_is_nobodys() -> None:
    steps = Steps()
    steps.add("a", range(6))
    steps.add("b", range(10, 13))
    first, second = steps.launch(), steps.launch()
    committed = steps.read(first, a=STOP)
    assert progress(committed) == {"a": (STOP, FinishReason.STOP), "b": (1, None)}
    (ended,) = (one.sequence for one in committed.progress if one.finish_reason is not None)
    assert ended.num_generated == 1
    assert ended.seconds_per_output_token() is None
    third = steps.launch()
    assert names(second.batch) == ["a", "b"]
    assert names(third.batch) == ["b"]
    assert progress(steps.read(second, a=5)) == {"b": (1, None)}
    steps.scheduler.remove("b")
    assert steps.scheduler.pool.num_used == 0


def test_what_a_late_step_leaves_in_a_freed_block_is_cleared_before_others_write_there() -> None:
    steps = Steps(num_blocks=16)
    steps.add("a", range(6))
    first, second = steps.launch(), steps.launch()
    steps.read(first, a=STOP)
    # The second step writes the token at position 6, into the second of its two blocks.
    late = second.batch.chunks[0].block_table[1]
    steps.add("b", range(20, 20 + 16 * BLOCK_SIZE - 1), replace(PLAIN, max_tokens=1))
    assert late in steps.launch().blocks_to_clear


@pytest.mark.parametrize("max_model_len", [64, 9])
def test_an_end_that_can_be_foreseen_is_never_run_over(max_model_len: int) -> None:
    steps = Steps(max_model_len=max_model_len)
    steps.add("a", range(6), replace(PLAIN, max_tokens=3))
    launched = [steps.launch(), steps.launch()]
    steps.read(launched[0])
    launched.append(steps.launch())
    steps.read(launched[1])
    assert names(launched[2].batch) == ["a"]
    assert names(steps.scheduler.schedule(9.0).batch) == []
    assert progress(steps.read(launched[2])) == {"a": (1, FinishReason.LENGTH)}


def test_nobody_is_preempted_for_a_block_that_is_about_to_be_free() -> None:
    steps = Steps(num_blocks=5, max_model_len=20)
    steps.add("grows", range(8), PLAIN, "x")
    steps.add("ends", range(4), replace(PLAIN, max_tokens=5), "y")
    under_way = steps.launch()
    for _ in range(4):
        following = steps.launch()
        steps.read(under_way)
        under_way = following
    assert steps.scheduler.pool.num_free == 0
    # Twelve tokens fill the blocks of the one; the other one's last token is on its way.
    schedule = steps.scheduler.schedule(9.0)
    assert (names(schedule.batch), schedule.preempted) == ([], [])
    assert progress(steps.read(under_way)) == {"grows": (1, None), "ends": (1, FinishReason.LENGTH)}
    assert names(steps.launch().batch) == ["grows"]


def test_an_aborted_request_leaves_at_once_and_its_name_is_free() -> None:
    steps = Steps()
    steps.add("a", range(6))
    first = steps.launch()
    assert steps.scheduler.remove("a") is not None
    assert steps.scheduler.pool.num_used == 0
    steps.add("a", range(30, 40))
    second = steps.launch()
    # What the first step brings is for the request that had this name before.
    assert progress(steps.read(first, a=17)) == {}
    assert progress(steps.read(second, a=18)) == {"a": (18, None)}


def preempted_while_under_way(steps: Steps) -> tuple[Schedule, Schedule]:
    """`old` takes the last block from `young`, of which a step is under way."""
    steps.add("old", range(12), PLAIN, "x")
    steps.add("young", range(7), PLAIN, "y")
    steps.read(steps.launch())
    under_way = steps.launch()
    assert names(under_way.batch) == ["old", "young"]
    following = steps.launch()
    assert [one.request.request_id for one in following.preempted] == ["young"]
    return under_way, following


def test_a_preempted_sequence_gets_the_token_that_was_under_way() -> None:
    steps = Steps(num_blocks=6, max_model_len=24)
    under_way, following = preempted_while_under_way(steps)
    assert progress(steps.read(under_way, young=55)) == {"old": (1, None), "young": (55, None)}
    sequence = steps.scheduler._sequences["young"]
    assert sequence.token_ids == [*range(7), 1, 55]
    assert (sequence.num_computed, sequence.num_confirmed) == (0, 0)
    steps.scheduler.remove("old")
    again = steps.launch()
    assert progress(steps.read(following)) == {}
    (chunk,) = again.batch.chunks
    assert chunk.start + chunk.num_tokens == 9
    assert progress(steps.read(again, young=56)) == {"young": (56, None)}


def test_a_preempted_sequence_may_turn_out_to_have_ended() -> None:
    steps = Steps(num_blocks=6, max_model_len=24)
    under_way, _ = preempted_while_under_way(steps)
    assert progress(steps.read(under_way, young=STOP))["young"] == (STOP, FinishReason.STOP)
    assert "young" not in steps.scheduler
    assert steps.scheduler.num_waiting == 0


def test_blocks_of_a_preempted_sequence_that_was_not_finite_leave_the_cache() -> None:
    steps = Steps(limits=Limits(8, 8))
    steps.add("a", range(12))
    first, second = steps.launch(), steps.launch()
    steps.read(first)
    cache, sequence = steps.scheduler.cache, steps.scheduler._sequences["a"]
    assert len(cache._block_of) == 2
    steps.scheduler._preempt(sequence, StepDraft(8, 8, 8))
    assert progress(steps.read(second, a=None)) == {"a": (None, FinishReason.ERROR)}
    assert not cache._block_of
    assert steps.scheduler.pool.num_used == 0


def test_who_begins_alike_waits_for_a_beginning_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway_runtime.overtaking.LEAST_TOKENS_WORTH_WAITING", 2 * BLOCK_SIZE)
    steps = Steps(limits=Limits(8, 64))
    steps.add("first", range(24))
    launched = [steps.launch()]
    steps.add("second", range(25))
    launched.append(steps.launch())
    assert names(launched[1].batch) == ["first"], "it is in no cache yet, but computed already"
    steps.read(launched[0])
    third = steps.launch()
    assert [(chunk.request_id, chunk.start) for chunk in third.batch.chunks] == [
        ("first", 25),
        ("second", 24),
    ]


def test_blocks_are_shared_once_their_step_was_read() -> None:
    steps = Steps()
    steps.add("a", range(9))
    first = steps.launch()
    assert not steps.scheduler.cache._block_of
    second = steps.launch()
    steps.read(first)
    assert len(steps.scheduler.cache._block_of) == 2
    assert not steps.scheduler.cache._unproven
    steps.read(second)


def test_a_step_that_fails_when_it_is_read_ends_its_own_requests() -> None:
    steps = Steps(limits=Limits(8, 32))
    steps.add("a", range(6))
    failing = steps.launch()
    steps.add("b", range(10, 16))
    following = steps.launch()
    assert names(following.batch) == ["a", "b"]
    assert [one.request.request_id for one in steps.scheduler.drop(failing.batch)] == ["a"]
    steps.scheduler.check_integrity()
    assert progress(steps.read(following, b=7)) == {"b": (7, None)}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        pytest.param({}, False, id="nothing asked"),
        pytest.param(
            {"logit_bias": ((3, 1.0),), "min_tokens": 2, "num_logprobs": 1}, False, id="no tokens asked"
        ),
        pytest.param({"grammar": Grammar("regex", "a")}, True, id="grammar"),
        pytest.param({"repetition_penalty": 1.1}, False, id="repetition penalty"),
        pytest.param({"presence_penalty": -0.1, "frequency_penalty": 0.1}, False, id="other penalties"),
        pytest.param({"num_prompt_logprobs": 0}, False, id="log-probabilities of the prompt"),
    ],
)
def test_who_must_know_tokens_has_them_read_first(change: dict[str, object], *, want: bool) -> None:
    steps = Steps()
    sampling: Callable[..., SamplingParams] = replace
    steps.add("a", range(6), sampling(PLAIN, **change))
    assert not steps.scheduler.needs_reading
    launched = steps.launch()
    assert steps.scheduler.needs_reading == want
    steps.read(launched)
    assert not steps.scheduler.needs_reading


class Told(DraftPolicy):
    """Guesses three tokens for all, where a test says that it pays."""

    pays = False

    def may_guess(self, acceptances: Sequence[Acceptance], most: int) -> bool:
        return self.pays and bool(acceptances)

    def lengths(
        self, acceptances: Sequence[Acceptance], most: int, room: int, *, is_blind: bool = False
    ) -> list[int]:
        self.is_blind = is_blind
        return [3 * (self.pays and not is_blind)] * len(acceptances)


@pytest.fixture
def guessing() -> tuple[Steps, Told]:
    steps, policy = Steps(limits=Limits(8, 32, 3)), Told()
    steps.scheduler.draft_policy = policy
    steps.add("a", range(6))
    return steps, policy


def test_a_step_that_could_have_guesses_has_tokens_read_first(guessing: tuple[Steps, Told]) -> None:
    steps, policy = guessing
    policy.pays = True
    prompt = steps.launch()
    assert steps.scheduler.needs_reading
    steps.read(prompt)
    launched = steps.launch()
    assert (launched.batch.num_drafts, policy.is_blind) == (3, False)
    assert steps.scheduler.needs_reading


def test_steps_overlap_while_guessing_is_on_and_does_not_pay(guessing: tuple[Steps, Told]) -> None:
    steps, policy = guessing
    launched = [steps.launch()]
    for _ in range(4):
        assert not steps.scheduler.needs_reading
        launched.append(steps.launch())
        assert policy.is_blind
        assert launched[-1].batch.num_drafts == 0
        steps.read(launched.pop(0))
    policy.pays = True
    assert steps.scheduler.needs_reading
    steps.read(launched.pop())
    assert steps.launch().batch.num_drafts == 3


def test_prompts_under_way_are_nobodys_to_guess_for() -> None:
    steps = Steps(limits=Limits(8, 8, 3))
    steps.scheduler.draft_policy = DraftPolicy(is_adaptive=False)
    steps.add("a", range(20))
    first = steps.launch()
    assert not steps.scheduler.needs_reading
    second = steps.launch()
    assert not steps.scheduler.needs_reading
    steps.read(first)
    third = steps.launch()
    assert [chunk.samples for chunk in third.batch.chunks] == [True]
    steps.read(second)
    scheduler = steps.scheduler
    assert scheduler.needs_reading, "the next step would decode"


def test_guesses_that_are_under_way_are_read_first_when_they_are_turned_off() -> None:
    steps = Steps(limits=Limits(8, 32, 3))
    steps.scheduler.draft_policy = DraftPolicy(is_adaptive=False)
    steps.add("a", range(6))
    steps.read(steps.launch())
    launched = steps.launch()
    assert launched.batch.num_drafts == 3
    steps.scheduler.limits = Limits(8, 32)
    assert steps.scheduler.needs_reading
    steps.read(launched)
    assert not steps.scheduler.needs_reading
