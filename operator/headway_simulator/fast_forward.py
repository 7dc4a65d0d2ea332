"""Takes many uneventful steps at once: decodes of always the same sequences, of which none ends.

Between two events of a replica (a request comes, one ends, a limit changes) its steps differ in nothing but
their times and the tokens they add. This does to sequences, blocks, prefix cache and metrics in one go what
the scheduler and the accounts would do step by step; the tests hold one against the other.

Uneventful are the next steps if the last one launched decodes for every running sequence and nobody can be
admitted after it; and as long as no sequence gets its last token and there are free blocks for all, so that
nobody is preempted. Who waits goes on waiting if the step read before it ended nobody and had no prompt:
decodes only take blocks, and without a prompt under way nobody waits for another one's blocks either.

Times are computed one after the other by the very additions that the runner makes, so that they are the same
to the last digit.
"""

from bisect import bisect_left
from dataclasses import dataclass

from headway_runtime.batch import UNREAD
from headway_runtime.metrics import EngineMetrics
from headway_runtime.scheduler import Scheduler
from headway_runtime.sequence import Sequence
from headway_simulator.simulated_runner import SimulatedRunner, Step, decode_context
from headway_simulator.step_model import StepModel

# How far one plan looks: an arrival cuts it short, and what it had computed beyond that is lost.
MOST_TURNS = 64


@dataclass(slots=True)
class Plan:
    """The next turns of the loop.

    step: the one under way, None where steps do not overlap. read_at: when each turn's step is read, and one
    time more where steps overlap: when the one that is under way after the last turn ends.
    previous_read_at: of the step before the first turn's. num_kv_tokens: that the first turn's step attends
    to.
    """

    begins_at: float
    step: Step | None
    sequences: list[Sequence]
    read_at: list[float]
    num_turns: int
    previous_read_at: float
    num_kv_tokens: int

    @property
    def ends_at(self) -> float:
        return self.read_at[self.num_turns - 1]

    def turns_before(self, now: float) -> int:
        """How many begin before `now`."""
        if now <= self.begins_at:
            return 0
        return 1 + bisect_left(self.read_at, now, 0, self.num_turns - 1)


def plan(
    scheduler: Scheduler, runner: SimulatedRunner, model: StepModel, *, is_under_way: bool
) -> Plan | None:
    """The uneventful turns ahead; None if the next one is not known to be. The last step must have been."""
    sequences = scheduler.running
    latest = runner.latest
    if not sequences or latest is None or scheduler.limits.num_speculative_tokens:
        return None
    last_at = sequences[0].last_token_at
    if last_at is None or any(one.last_token_at != last_at for one in sequences):
        return None
    left = min(one.most_tokens - len(one.token_ids) for one in sequences)
    num_turns = _with_blocks(scheduler, sequences, min(MOST_TURNS, left if is_under_way else left - 1))
    if num_turns < 1:
        return None
    count, read_at, now = len(sequences), [], runner.now
    context = sum(one.num_computed for one in sequences) + count
    num_kv_tokens = context - count if is_under_way else context
    if is_under_way:
        assert decode_context(latest.batch.chunks) == context - count, "the step under way is another one"
        read_at.append(latest.ends_at)
        now = latest.ends_at
    for _ in range(num_turns):
        now += model.seconds(0, 0, count, context)
        context += count
        read_at.append(now)
    step = latest if is_under_way else None
    return Plan(runner.now, step, list(sequences), read_at, num_turns, last_at, num_kv_tokens)


def take_over(
    ahead: Plan,
    num_turns: int,
    scheduler: Scheduler,
    runner: SimulatedRunner,
    metrics: EngineMetrics,
    step_time_error: float = 1.0,
) -> float:
    """Do the first turns of a plan, at least one; returns when the last of them began.

    step_time_error: steps are counted as so many times as long as they are.
    """
    count = len(ahead.sequences)
    previous = ahead.previous_read_at
    num_kv_tokens = ahead.num_kv_tokens
    num_beginners = sum(one.num_generated == 1 for one in ahead.sequences)
    if num_beginners:
        metrics.first_decoded(ahead.read_at[0] - previous, num_beginners)
    for now in ahead.read_at[:num_turns]:
        seconds = now - previous
        runner.now = now
        told_seconds = step_time_error * seconds
        metrics.step(told_seconds, 0, count)
        metrics.moments.step(1000.0 * told_seconds, 0, count, num_kv_tokens)
        num_kv_tokens += count
        metrics.tokens(generated=count)
        metrics.inter_token(seconds, count)
        previous = now
    for one in ahead.sequences:
        _advance(one, num_turns, scheduler, runner, is_ahead=ahead.step is not None)
        one.last_token_at = previous
    if ahead.step is not None:
        for chunk in ahead.step.batch.chunks:
            chunk.start += num_turns
            chunk.num_generated += num_turns
    runner.skip_to(previous, ahead.step, ahead.read_at[num_turns - (ahead.step is None)])
    return ahead.read_at[num_turns - 2] if num_turns > 1 else ahead.begins_at


def _advance(
    one: Sequence, num_turns: int, scheduler: Scheduler, runner: SimulatedRunner, *, is_ahead: bool
) -> None:
    token = runner.answers[one.request.request_id].token_id
    assert token is not None
    one.token_ids[len(one.token_ids) - is_ahead :] = [token] * num_turns + [UNREAD] * is_ahead
    one.num_computed += num_turns
    one.num_given = one.num_computed
    one.num_confirmed += num_turns
    missing = -(-one.num_computed // scheduler.block_size) - len(one.block_table)
    if missing > 0:
        scheduler.cache.allocate(one, missing)
    scheduler.cache.publish(one)
    scheduler.cache.prove(one)


def _with_blocks(scheduler: Scheduler, sequences: list[Sequence], num_turns: int) -> int:
    """How many of these turns there are free blocks for, perhaps a few less."""
    size, num_free = scheduler.block_size, scheduler.pool.num_free
    while num_turns > 0:
        missing = sum(
            max(0, -(-(one.num_computed + num_turns) // size) - len(one.block_table)) for one in sequences
        )
        if missing <= num_free:
            return num_turns
        num_turns //= 2
    return 0
