"""Which tokens the next step computes, and who gets or loses KV blocks for it. No torch, no clock.

There are no phases. Every sequence wants its computed tokens to catch up with its known tokens. Sequences
have a rank: that of the moment they came, put back by `priority_ageing_seconds` for each unit of priority
and, once, by `late_yield_seconds` when they never ran and can no longer meet the TTFT target (`promptness`);
of equals the first to come is first. A step is filled in this order, until its token budget is spent:

1. Running sequences that are one token short (decodes), by rank. One that needs a new block when none is free
   preempts: of the running ones but the first in rank, those of the worst (highest) priority, of these the
   one with least computed tokens, of these the youngest. It may hit the one that asked. The victim gives all
   its blocks back and later computes what the prefix cache has lost by then.
2. Prompts under way, by rank. A long prompt, one that wants more than `long_prefill_share` of the budget,
   gets no more than what others of its kind have left of that share. Where a decode has a token in this step,
   a prompt's tokens count by what they cost (`prompt_cost`), so that the step takes no longer at the end of a
   prompt than at its beginning. One that gets any gets one token at least, whatever it costs; one that is cut
   short has spent the budget, or long ones' share (`step_draft`).
3. New and preempted sequences, by rank. One is admitted only if blocks for all its known tokens are free,
   plus one for each running sequence; its blocks are taken at once, so that prompts under way never compete
   for blocks. Nobody overtakes one that waits for blocks, or one found late that finds no more places free
   than the root of their number: these are left to who may be in time. Four wait for less and are
   overtaken: a long prompt when the share for such is spent; a sequence of whose tokens this very step
   computes, for another one, at least half, by cost, of what it could compute itself; one whose adapter would
   be one more than may be in a step (`adapters.admission`); and, once and no longer than `awaits_until`, one
   whose beginning is being read from a disk.
4. What is left goes to the prompts that were cut short, by rank.
5. What is left then goes to guesses for the decodes, by rank: as many tokens as `DraftPolicy` finds worth it
   and the request can still take, in blocks that are free beyond one for each running sequence. Guesses never
   preempt and never keep anybody waiting. They follow tokens that are known: a step that may have some is
   scheduled once the one before it was read (`needs_reading`), and any other has none.

A step may be under way, and not read yet, while the next one is scheduled; see `commits`. What it computes
and samples counts as there. A sequence whose last token it samples is in no step any more. While there is
one, nobody is preempted: its blocks will be free in a moment, and who needs one waits a step for it.

Why nothing waits for ever. A sequence alone always fits (`add` refuses others), and a generated token is
never taken back. Only finitely many sequences ever rank before a given one: of those that come later, only
such as come within `priority_ageing_seconds` per unit by which their priority is better, and, before one that
was put back, within `late_yield_seconds` more. So each one becomes the first in rank of all, unless it ends
before. The first, once running, is never preempted, gets its token or a part of its prompt in every step in
which fewer tokens than the budget go to decodes, and so ends. While it waits for blocks or a place, nobody is
admitted, and those who run go on until there is room, because the first of them in rank is not preempted
either. While it is overtaken, prompts under way get shorter in every step, or its own beginning gets into the
cache, or it is overtaken one time less of those that it can be before adapters make room.

Lowering a limit drains: max_num_seqs only stops admissions; a lower token budget is kept at the next step,
and running decodes beyond it pause, the last in rank first, with their blocks kept.
"""

import bisect
import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter
from headway_runtime.adapters.admission import AdapterAdmission
from headway_runtime.batch import Batch, StepResult
from headway_runtime.blocks import BlockPool
from headway_runtime.commits import Commits, Committed, Progress
from headway_runtime.config import Limits
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.guessing import give_guesses
from headway_runtime.offload.tiers import Copies, KVOffload
from headway_runtime.overtaking import MAX_OVERTAKEN, has_no_part, is_overtaken
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.prompt_cost import EVEN, PromptCost
from headway_runtime.promptness import Promptness
from headway_runtime.request import Request
from headway_runtime.sequence import Sequence, rank_of, take_out
from headway_runtime.step_draft import StepDraft

if TYPE_CHECKING:
    from headway_runtime.grammar_matcher import TokenMatcher

__all__ = ["Committed", "Progress", "Schedule", "Scheduler"]


def num_left_by_the_late(most: int) -> int:
    """Of so many places, those that the late leave to those who may be in time; of the only one none. As many
    as a standard deviation of the number that runs, if that is Poisson's: of a hundred that run on average
    ten more do at times, by chance, and the late, who take whatever is free, would make these wait."""
    return min(most - 1, math.isqrt(most))


@dataclass(slots=True)
class Schedule:
    """One step's decision, and what it did to the queues.

    batch: the work; without chunks when nothing can run.
    admitted: sequences scheduled for the first time. preempted: sequences that lost their blocks.
    blocks_to_clear: blocks to be zeroed before the step is computed.
    copies: of blocks to and from host memory, to be made after that and before the step.
    """

    batch: Batch
    admitted: list[Sequence]
    preempted: list[Sequence]
    blocks_to_clear: list[int]
    copies: Copies


class Scheduler:
    """Owns every live sequence and the KV blocks.

    limits: may be replaced between steps by any value inside the envelope that the caller keeps.
    long_prefill_share: above 0, at most 1. prompt_cost: of prompt tokens beside decodes. max_adapters:
    different ones in a step.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        limits: Limits,
        long_prefill_share: float,
        prompt_cost: PromptCost = EVEN,
        priority_ageing_seconds: float = 60.0,
        late_yield_seconds: float = 120.0,
        enable_prefix_caching: bool = True,
        proof_reach: int | None = None,
        draft_policy: DraftPolicy | None = None,
        max_adapters: int = 0,
        offload: KVOffload | None = None,
    ) -> None:
        assert num_blocks * block_size >= max_model_len, "a sequence alone must fit"
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(
            self.pool,
            block_size,
            is_enabled=enable_prefix_caching,
            proof_reach=proof_reach,
            offload=offload,
        )
        self.draft_policy = draft_policy or DraftPolicy()
        self._max_adapters = max_adapters
        self._long_prefill_share = long_prefill_share
        self.prompt_cost = prompt_cost
        self._priority_ageing_seconds = priority_ageing_seconds
        self.promptness = Promptness(late_yield_seconds, prompt_cost)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        self._queue: list[Sequence] = []  # by rank: all that do not run
        # Those of the queue that never ran, by arrival; from an ordered dict an abort takes any at once.
        self._unscheduled: OrderedDict[str, Sequence] = OrderedDict()
        self._num_arrived = 0
        self._latest_received_at = -math.inf
        self._commits = Commits(self._sequences, self.cache, self.draft_policy, self.remove, block_size)

    @property
    def running(self) -> list[Sequence]:
        """Those that hold blocks, by rank; not to be changed."""
        return self._running

    @property
    def waiting(self) -> list[Sequence]:
        """Those that hold none, by rank; not to be changed."""
        return self._queue

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def late_share(self) -> float:
        """Of all that are here, those that wait although their first token comes too late: new ones overtake
        them. Never all: at least one is being served, or was until now."""
        num_late = self.promptness.num_late
        return num_late / max(len(self._sequences), num_late + 1)

    @property
    def num_empty_slots(self) -> int:
        """Slots for tokens in blocks that are in use, with nothing in them. Shared blocks are always full."""
        return sum(len(one.block_table) * self.block_size - one.num_computed for one in self._running)

    def finds_no_place(self, sequence: Sequence) -> bool:
        """Whether all places are taken that one of the queue may have."""
        most = self.limits.max_num_seqs
        num_left = num_left_by_the_late(most) if self.promptness.is_late(sequence) else 0
        return len(self._running) >= most - num_left

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(
        self, request: Request, matcher: "TokenMatcher | None" = None, adapter: Adapter = NO_ADAPTER
    ) -> Sequence:
        """Queue a request. Its prompt leaves room for a token, its id is new."""
        assert 0 < len(request.prompt_token_ids) < self.max_model_len
        assert request.request_id not in self._sequences
        # Not before those that are here: of equal priority, nobody overtakes by a clock that was set back.
        self._latest_received_at = max(self._latest_received_at, request.received_at)
        served_as_of = self._latest_received_at + request.priority * self._priority_ageing_seconds
        sequence = Sequence(request, self._num_arrived, served_as_of, matcher, adapter)
        sequence.most_tokens = min(sequence.most_tokens, self.max_model_len)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._unscheduled[request.request_id] = sequence
        self.promptness.begin(sequence)
        bisect.insort(self._queue, sequence, key=rank_of)
        return sequence

    def remove(self, request_id: str) -> Sequence | None:
        """Forget a sequence and free its blocks now; None if it is not (any more) live."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        self._unscheduled.pop(request_id, None)
        self.promptness.end(request_id)
        if not take_out(self._queue, sequence):
            take_out(self._running, sequence)
            self.cache.release(sequence)
        return sequence

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of sequences that run, and of those that wait; "" for none."""
        running, waiting = ([one.adapter.name for one in some] for some in (self._running, self._queue))
        return running, waiting

    def reset_prefix_cache(self) -> None:
        """Let no request that is admitted from now on use what was computed before."""
        self.cache.reset(self._running)

    def oldest_unanswered_at(self) -> float | None:
        """When the longest waiting request that has no token yet was received; None if there is none."""
        oldest = [next(iter(self._unscheduled.values()))] if self._unscheduled else []
        num_preempted = len(self._queue) - len(self._unscheduled)
        preempted = (one for one in self._queue if one.scheduled_at is not None) if num_preempted else ()
        without_token = (one for one in preempted if one.first_token_at is None)
        return min((one.request.received_at for one in chain(oldest, without_token)), default=None)

    def schedule(self, now: float) -> Schedule:
        """Decide the next step. Blocks are taken and given back at once; tokens count from `launch`."""
        draft = self.empty_draft()
        prompts = self._schedule_decodes(draft)
        if draft.shares:
            draft.cost = self.prompt_cost
        for sequence in prompts:
            if draft.takes_prompts and sequence not in draft.preempted:
                draft.give_prompt(sequence)
        if self._queue and draft.takes_prompts:
            self._admit(draft, now)
        draft.give_rest()
        most_guesses = self.limits.num_speculative_tokens
        if most_guesses and draft.budget > 0 and draft.shares:
            num_free = self.pool.num_free - len(self._running)
            policy, is_blind = self.draft_policy, self._commits.is_any_unread
            give_guesses(
                draft, policy, most_guesses, self.cache, num_free, self.block_size, is_blind=is_blind
            )
        to_clear, copies = self.cache.blocks_to_clear(), self.cache.copies()
        return Schedule(draft.batch(), draft.admitted, draft.preempted, to_clear, copies)

    def empty_draft(self) -> StepDraft:
        """A step of which nothing is given yet."""
        budget = self.limits.max_num_batched_tokens
        largest = max(1, int(self._long_prefill_share * budget))
        return StepDraft(budget, largest, largest)

    def launch(self, batch: Batch) -> None:
        """A step was launched: the next one may be scheduled before it is read, unless `needs_reading`."""
        self._commits.launch(batch)

    @property
    def needs_reading(self) -> bool:
        """Whether the step that was launched last must be read before the next one is scheduled."""
        if self._commits.needs_reading:
            return True
        most_guesses = self.limits.num_speculative_tokens
        if not most_guesses:
            return False
        decodes = [one for one in self._running if not one.is_ending and one.takes_guesses]
        return self.draft_policy.may_guess([one.acceptance for one in decodes], most_guesses)

    def commit(self, batch: Batch, result: StepResult, now: float) -> Committed:
        """Take over what a step computed, read at `now`. Sequences removed meanwhile are passed over."""
        return self._commits.commit(batch, result, now)

    def drop(self, batch: Batch) -> list[Sequence]:
        """A step failed: forget its sequences, which are returned."""
        return self._commits.drop(batch)

    def check_integrity(self) -> None:
        """Prove that queues, block tables, pool and prefix cache agree. AssertionError if not."""
        queued = [*self._running, *self._queue]
        assert len(queued) == len(self._sequences), "a sequence is in no queue, or in two"
        assert {one.request.request_id for one in queued} == self._sequences.keys()
        for one in queued:
            assert 0 <= one.num_computed < len(one.token_ids) <= self.max_model_len, one.request.request_id
            assert one.num_computed <= len(one.block_table) * self.block_size, one.request.request_id
        for one in self._queue:
            assert not one.block_table, f"{one.request.request_id} waits and holds blocks"
            is_unscheduled = one.request.request_id in self._unscheduled
            assert is_unscheduled == (one.scheduled_at is None), one.request.request_id
        assert self._unscheduled.keys() <= {one.request.request_id for one in self._queue}
        for ranked in (self._running, self._queue):
            assert all(first.rank < second.rank for first, second in pairwise(ranked)), "not in order of rank"
        self.cache.check_integrity(self._running)
        self._commits.check_integrity()

    def _schedule_decodes(self, draft: StepDraft) -> list[Sequence]:
        """Give decodes their token; returns the prompts under way."""
        prompts = []
        block_size = self.block_size
        for sequence in self._running.copy():
            num_tokens = len(sequence.token_ids)
            if num_tokens >= sequence.most_tokens:
                continue  # its last token is on its way
            if num_tokens - sequence.num_computed > 1:
                prompts.append(sequence)
            elif draft.budget > 0 and not (draft.preempted and sequence in draft.preempted):
                has_room = num_tokens <= len(sequence.block_table) * block_size
                if has_room or self._make_room(sequence, draft):
                    draft.give_decode(sequence)
        return prompts

    def _make_room(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Give a sequence the block its last known token needs; False if it has none in this step."""
        while self.pool.num_free == 0:
            if any(one.is_ending for one in self._running):
                return False  # their blocks will be free once the step that is under way is read
            victim = min(
                self._running[1:], key=lambda one: (-one.request.priority, one.num_computed, -one.arrival)
            )
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        self.cache.allocate(sequence, 1)
        return True

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        draft.take_back(victim)
        take_out(self._running, victim)
        self.cache.release(victim)
        victim.forget_computed()
        bisect.insort(self._queue, victim, key=rank_of)

    def _admit(self, draft: StepDraft, now: float) -> None:
        """Admit from the queue, by rank; see the header for who may be overtaken."""
        self.cache.poll()
        self._put_back_late(now)
        under_way: set[bytes] = set()
        for sequence in {*draft.prompts, *self._commits.prompts_under_way()}:
            under_way.update(self.cache.keys_of_step(sequence, draft.shares.get(sequence, 0)))
        adapters = AdapterAdmission(self._max_adapters, self._running) if self._max_adapters else None
        position = 0
        while draft.takes_prompts and len(self._running) < self.limits.max_num_seqs:
            if position == min(len(self._queue), MAX_OVERTAKEN):
                return
            sequence = self._queue[position]
            if self.finds_no_place(sequence):
                return
            if adapters is not None and adapters.holds_back(sequence):
                position += 1
                continue
            if has_no_part(sequence, self.cache, draft):
                position += 1
                continue
            found = self.cache.find(sequence)
            if is_overtaken(sequence, found, under_way, self.cache, draft) or self.cache.is_awaited(
                sequence, found, now
            ):
                position += 1
                continue
            if self.cache.num_taken(sequence, found) + len(self._running) > self.pool.num_free:
                return
            del self._queue[position]
            self._start(sequence, found, draft, now)
            if adapters is not None:
                adapters.admitted(sequence)
            under_way.update(self.cache.keys_of_step(sequence, draft.shares[sequence]))

    def _put_back_late(self, now: float) -> None:
        """Who can no longer be answered in time yields, once, to those who can."""
        for sequence in self.promptness.take_late(now):
            take_out(self._queue, sequence)
            served_as_of, arrival = sequence.rank
            sequence.rank = (served_as_of + self.promptness.late_yield_seconds, arrival)
            bisect.insort(self._queue, sequence, key=rank_of)

    def _start(self, sequence: Sequence, found: list[int], draft: StepDraft, now: float) -> None:
        self.cache.take(sequence, found)
        bisect.insort(self._running, sequence, key=rank_of)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached = sequence.num_computed
            del self._unscheduled[sequence.request.request_id]
            self.promptness.end(sequence.request.request_id)
            draft.admitted.append(sequence)
        draft.give_prompt(sequence)
