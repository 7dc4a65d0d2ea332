"""Takes many uneventful steps at once: always of the same sequences, of which none ends.

Between two events of a replica (a request comes, one ends, a limit changes) its steps differ in nothing but
their times and the tokens they add. This does to sequences, blocks, prefix cache and metrics in one go what
the scheduler and the accounts would do step by step; the tests hold one against the other.

Uneventful are the next steps if nobody guesses, the last one launched has a part for every running sequence,
all of them decodes but at most one prompt, and as long as

- no decode gets its last token, and there are free blocks for all, so that nobody is preempted;
- the prompt is cut short each time, and it gets and leaves two tokens at least, as a single one is scheduled
  as a decode. How many it gets is found out by the scheduler's own rules;
- nobody is admitted: all places are taken that the next may have, or steps take no further prompt, or
  whoever waits has no part of them, or comes after one that waits for blocks. All of this stays so. Decodes
  only take blocks, answers are like no other, so that what the cache has for somebody grows by nothing but
  blocks of the prompt under way, and nobody that waits becomes late meanwhile, which would change their order
  and whom places are left for;
- no block of the prompt is in the cache already, under another one's number: whether it still is when the
  prompt gets there would hang on which blocks decodes have taken until then.

Times are computed one after the other by the very additions that the runner makes, so that they are the same
to the last digit.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby
from operator import sub

from headway_runtime.batch import UNREAD
from headway_runtime.metrics import EngineMetrics
from headway_runtime.overtaking import MAX_OVERTAKEN
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.prompt_cost import PromptCost
from headway_runtime.scheduler import Scheduler
from headway_runtime.sequence import Sequence
from headway_runtime.step_draft import StepDraft
from headway_simulator.simulated_runner import SimulatedRunner, Step, decode_context, pairs
from headway_simulator.step_model import StepModel

# How far one plan looks: an arrival cuts it short, and what it had computed beyond that is lost.
MOST_TURNS = 64
# A chunk of one token would stand among the decodes.
LEAST_PART = 2


@dataclass(slots=True)
class Plan:
    """The next turns of the loop.

    begins_at: when the first one does. num_turns: how many there are. decodes, prompt: what runs. step: the
    one under way, None where steps do not overlap. read_at: when each turn's step is read, and one time more
    where steps overlap: when the one that is under way after the last turn ends. parts: the tokens of these
    steps that are the prompt's, the first of them from `start` on. num_kv_tokens: that the first turn's
    decodes attend to.
    """

    begins_at: float
    step: Step | None
    decodes: list[Sequence]
    prompt: Sequence | None
    start: int
    parts: list[int]
    read_at: list[float]
    num_turns: int
    num_kv_tokens: int

    @property
    def ends_at(self) -> float:
        return self.read_at[self.num_turns - 1]

    def turns_before(self, now: float) -> int:
        """How many begin before `now`; the first one did when this was planned."""
        return 1 + bisect_left(self.read_at, now, 0, self.num_turns - 1)


def plan(
    scheduler: Scheduler, runner: SimulatedRunner, model: StepModel, *, is_under_way: bool
) -> Plan | None:
    """The uneventful turns ahead; None if the next one is not known to be. The last step must have had a
    part for every running sequence."""
    running, latest = scheduler.running, runner.latest
    if not running or latest is None or scheduler.limits.num_speculative_tokens:
        return None
    prompts = [one for one in running if one.num_pending > 1]
    decodes = [one for one in running if one.num_pending == 1] if prompts else list(running)
    count = len(decodes)
    if len(prompts) > 1 or latest.batch.num_decodes != count:
        return None
    if any(one.last_token_at != runner.now for one in decodes):
        return None
    most = min((one.most_tokens - len(one.token_ids) for one in decodes), default=MOST_TURNS)
    most = _with_blocks(scheduler, decodes, min(MOST_TURNS, most if is_under_way else most - 1))
    prompt = prompts[0] if prompts else None
    parts, draft = _parts(scheduler, prompt, count, most)
    start = 0 if prompt is None else prompt.num_computed
    if not parts or not _is_closed(scheduler, draft, prompt, start + sum(parts)):
        return None
    context = sum(one.num_computed for one in decodes) + count
    num_kv_tokens = context - count if is_under_way else context
    read_at, now, at = [], runner.now, start
    if is_under_way:
        assert decode_context(latest.batch.chunks[:count]) == num_kv_tokens, (
            "the step under way is another one"
        )
        now = latest.ends_at
        read_at.append(now)
    for part in parts:
        now += model.seconds(part, pairs(at, part), count, context)
        at += part
        context += count
        read_at.append(now)
    num_turns = len(parts)
    if draft.takes_prompts and scheduler.waiting:
        begins = [runner.now, *read_at]
        while num_turns and scheduler.promptness.is_any_late(begins[num_turns - 1]):
            num_turns -= 1
        if not num_turns:
            return None
    step = latest if is_under_way else None
    if step is not None:
        under_way = step.batch.num_prefill_tokens
        parts, start = [under_way, *parts], start - under_way
    return Plan(runner.now, step, decodes, prompt, start, parts, read_at, num_turns, num_kv_tokens)


def tell(
    ahead: Plan, num_turns: int, cost: PromptCost, metrics: EngineMetrics, step_time_error: float
) -> None:
    """Count the first turns of a plan, before they are taken over; but for their tokens.

    step_time_error: steps are counted as so many times as long as they are.
    """
    count = len(ahead.decodes)
    read_at, parts = ahead.read_at[:num_turns], ahead.parts[:num_turns]
    seconds = list(map(sub, read_at, [ahead.begins_at, *read_at]))
    told = [step_time_error * one for one in seconds]
    num_beginners = sum(one.num_generated == 1 for one in ahead.decodes)
    if num_beginners:
        metrics.first_decoded(seconds[0], num_beginners)
    metrics.steps(told, parts, count)
    if count:
        metrics.inter_tokens(seconds, count)
    at, num_kv_tokens = ahead.start, ahead.num_kv_tokens
    for one, part in zip(told, parts, strict=True):
        metrics.moments.step(1000.0 * one, cost.of(at, part) if part else 0, count, num_kv_tokens)
        at += part
        num_kv_tokens += count


def take_over(
    ahead: Plan, num_turns: int, scheduler: Scheduler, runner: SimulatedRunner, metrics: EngineMetrics
) -> float:
    """Do the first turns of a plan, at least one; returns when the last of them began."""
    count, prompt, end = len(ahead.decodes), ahead.prompt, ahead.start
    turns = zip(ahead.read_at[:num_turns], ahead.parts, strict=False)
    # Rates tell no moments apart within a second.
    for _, within in groupby(turns, lambda turn: int(turn[0])):
        times, parts = zip(*within, strict=True)
        runner.now = times[-1]
        end += sum(parts)
        num_computed = 0 if prompt is None else prompt.count_prompt_tokens(end)
        metrics.tokens(num_computed, generated=count * len(times))
    previous = runner.now
    is_ahead = ahead.step is not None
    for one in ahead.decodes:
        _advance(one, num_turns, scheduler, runner, is_ahead=is_ahead)
        one.last_token_at = previous
    launched_at = ahead.read_at[num_turns - 2] if num_turns > 1 else ahead.begins_at
    if prompt is not None:
        prompt.num_confirmed = end
        prompt.num_computed = prompt.num_given = end + (ahead.parts[num_turns] if is_ahead else 0)
        scheduler.cache.publish(prompt)
    if ahead.step is not None:
        _move_on(ahead.step, num_turns, count, end, ahead.parts[num_turns])
    runner.skip_to(previous, ahead.step, ahead.read_at[num_turns - (ahead.step is None)])
    return launched_at


def _draft(scheduler: Scheduler, num_decodes: int) -> StepDraft:
    """A step of which so many decodes have their token."""
    draft = scheduler.empty_draft()
    draft.budget -= num_decodes
    if num_decodes:
        draft.cost = scheduler.prompt_cost
    return draft


def _parts(
    scheduler: Scheduler, prompt: Sequence | None, num_decodes: int, most: int
) -> tuple[list[int], StepDraft]:
    """What a prompt gets, beside so many decodes, of at most so many steps, 0 without one; and the draft of
    the first, as whoever waits finds it. The others' are like it in what `_is_closed` looks at: a prompt that
    is cut short leaves no room each time, or each time none for long ones."""
    draft = _draft(scheduler, num_decodes)
    if prompt is None:
        return [0] * most, draft
    start, num_tokens = prompt.num_computed, len(prompt.token_ids)
    at, parts = start, list[int]()
    while len(parts) < most and draft.takes_prompts:
        part = draft.part_alone(at, num_tokens - at)
        if part < LEAST_PART or num_tokens - at - part < LEAST_PART:
            break
        parts.append(part)
        at += part
    if scheduler.cache.is_any_entered(scheduler.cache.keys_of_step(prompt, at - start)):
        return [], draft
    if parts:
        draft.give_prompt(prompt)
    return parts, draft


def _is_closed(scheduler: Scheduler, draft: StepDraft, prompt: Sequence | None, end: int) -> bool:
    """Whether nobody comes in, of a step with this draft and of those like it, in which a prompt is computed
    up to `end`."""
    num_running, cache = scheduler.num_running, scheduler.cache
    if not draft.takes_prompts or num_running >= scheduler.limits.max_num_seqs:
        return True
    for one in scheduler.waiting[:MAX_OVERTAKEN]:
        if scheduler.finds_no_place(one):
            return True
        num_tokens, num_found = len(one.token_ids), cache.most_found(one)
        finds_more = prompt is not None and _begins_alike(one, prompt, cache)
        if finds_more:
            num_found = max(num_found, min(num_tokens - 1, end) // cache.block_size * cache.block_size)
        if draft.part_for(num_found, num_tokens - num_found) == 0:
            # Nor with less found.
            continue
        # Decodes may take what it finds: it must have a part even without. Then nobody overtakes it while it
        # waits for blocks.
        if finds_more or draft.part_for(0, num_tokens) == 0:
            return False
        return cache.num_taken(one, cache.find(one)) + num_running > scheduler.pool.num_free
    return True


def _begins_alike(one: Sequence, prompt: Sequence, cache: PrefixCache) -> bool:
    """Whether it will find the next block that is entered of a prompt. A key tells of all blocks before."""
    index = prompt.num_published
    num_tokens = min(len(one.token_ids) - 1, len(prompt.token_ids))
    if index >= num_tokens // cache.block_size or not cache.is_read_by(one):
        return False
    cache.extend_keys(prompt, index + 1)
    # Mostly the first key that is known tells them apart.
    for count in (1, index + 1):
        cache.extend_keys(one, count)
        if one.block_keys[count - 1] != prompt.block_keys[count - 1]:
            return False
    return True


def _advance(
    one: Sequence, num_turns: int, scheduler: Scheduler, runner: SimulatedRunner, *, is_ahead: bool
) -> None:
    """A decode."""
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


def _move_on(step: Step, num_turns: int, num_decodes: int, start: int, part: int) -> None:
    """The step under way is now another one, with a part of the prompt from `start` on."""
    batch = step.batch
    for chunk in batch.chunks[:num_decodes]:
        chunk.start += num_turns
        chunk.num_generated += num_turns
    for chunk in batch.chunks[num_decodes:]:
        chunk.start, chunk.num_tokens = start, part
    batch.num_tokens = num_decodes + part


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
