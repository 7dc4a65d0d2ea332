"""Which tokens the next step computes, and who gets or loses KV blocks for it. No torch, no clock.

There are no phases. Every sequence wants its computed tokens to catch up with its known tokens, and a step is
filled in this order, until its token budget is spent:

1. Running sequences that are one token short (decodes), in order of admission. One that needs a new block
   when none is free preempts the running sequence with least computed tokens (the youngest of equals),
   which may be itself: it gives all its blocks back and computes everything known again later.
2. Prompts under way, in order of admission, each at most `long_prefill_share` of the budget.
3. New sequences, preempted ones first (oldest first), then the waiting ones in order of arrival; nobody
   overtakes. One is admitted only if blocks for all its known tokens are free, plus one for each running
   sequence; its blocks are taken at once, so that prompts under way never compete for blocks.
4. What is left goes to the prompts that step 2 or 3 cut short.

Why nothing waits for ever: a sequence alone always fits (`add` refuses others), a preemption happens only
when another sequence gets a token for it, a generated token is never taken back, and nobody overtakes.
The running sequence with most computed tokens is never preempted, so that every step makes progress.

Lowering a limit drains: max_num_seqs only stops admissions; a lower token budget is kept at the next step,
and running decodes beyond it pause, youngest first, with their blocks kept.
"""

import bisect
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain

from headway_runtime.batch import Batch, Chunk, Sample, StepResult
from headway_runtime.blocks import BlockPool
from headway_runtime.config import Limits
from headway_runtime.request import FinishReason, Request
from headway_runtime.sequence import Sequence


@dataclass(slots=True)
class Schedule:
    """One step's decision, and what it did to the queues.

    batch: the work; without chunks when nothing can run.
    admitted: sequences scheduled for the first time. preempted: sequences that lost their blocks.
    """

    batch: Batch
    admitted: list[Sequence]
    preempted: list[Sequence]


@dataclass(frozen=True, slots=True)
class Progress:
    """What one sample did to its sequence.

    previous_token_at: when its token before this one was made; None for the first.
    finish_reason: set when this was the last token; the sequence's blocks are free then.
    """

    sequence: Sequence
    sample: Sample
    previous_token_at: float | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step did. num_prompt_tokens: prompt tokens computed for the first time."""

    progress: list[Progress]
    num_prompt_tokens: int


@dataclass(slots=True)
class _Draft:
    """A step in the making: the tokens given to each sequence so far, and what is left to give."""

    budget: int
    shares: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        self.shares[sequence] = self.shares.get(sequence, 0) + num_tokens
        self.budget -= num_tokens


class Scheduler:
    """Owns every live sequence and the block pool.

    limits: may be replaced between steps by any value inside the envelope that the caller keeps.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        limits: Limits,
        long_prefill_share: float,
    ) -> None:
        assert num_blocks * block_size >= max_model_len, "a sequence alone must fit"
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self._long_prefill_share = long_prefill_share
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._preempted: list[Sequence] = []  # oldest first
        # An ordered dict gives a queue from which an abort takes any element in constant time.
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Its prompt leaves room for a token, its id is new."""
        assert 0 < len(request.prompt_token_ids) < self.max_model_len
        assert request.request_id not in self._sequences
        sequence = Sequence(request, self._num_arrived)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._waiting[request.request_id] = sequence

    def remove(self, request_id: str) -> Sequence | None:
        """Forget a sequence and free its blocks now; None if it is not (any more) live."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        if request_id in self._waiting:
            del self._waiting[request_id]
        elif sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._running.remove(sequence)
            self._release_blocks(sequence)
        return sequence

    def oldest_unanswered_at(self) -> float | None:
        """When the longest waiting request that has no token yet was received; None if there is none."""
        oldest = [next(iter(self._waiting.values()))] if self._waiting else []
        without_token = (one for one in self._preempted if one.first_token_at is None)
        return min((one.request.received_at for one in chain(oldest, without_token)), default=None)

    def schedule(self, now: float) -> Schedule:
        """Decide the next step. Blocks are taken and given back at once; tokens count from `commit`."""
        draft = _Draft(self.limits.max_num_batched_tokens)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        self._admit(draft, now)
        self._spend_rest(draft)
        return Schedule(self._batch(draft), draft.admitted, draft.preempted)

    def commit(self, batch: Batch, result: StepResult, now: float) -> Committed:
        """Take over what a step computed, at `now`. Sequences removed meanwhile are passed over."""
        progress = []
        num_prompt_tokens = 0
        for chunk, sample in zip(batch.chunks, result.samples, strict=True):
            sequence = self._sequences.get(chunk.request_id)
            if sequence is None:
                continue
            num_prompt_tokens += sequence.count_computed(chunk.num_tokens)
            if sample is not None:
                progress.append(self._take_sample(sequence, sample, now))
        return Committed(progress, num_prompt_tokens)

    def check_integrity(self) -> None:
        """Prove that queues, block tables and the pool agree. AssertionError if not."""
        queued = [*self._running, *self._preempted, *self._waiting.values()]
        assert len(queued) == len(self._sequences), "a sequence is in no queue, or in two"
        assert {one.request.request_id for one in queued} == self._sequences.keys()
        for one in queued:
            assert 0 <= one.num_computed < len(one.token_ids) <= self.max_model_len, one.request.request_id
            assert one.num_computed <= len(one.block_table) * self.block_size, one.request.request_id
        for one in chain(self._preempted, self._waiting.values()):
            assert not one.block_table, f"{one.request.request_id} waits and holds blocks"
        assert [one.arrival for one in self._preempted] == sorted(one.arrival for one in self._preempted)
        self.pool.check_integrity(one.block_table for one in self._running)

    def _take_sample(self, sequence: Sequence, sample: Sample, now: float) -> Progress:
        previous_token_at = sequence.last_token_at
        reason: FinishReason | None = FinishReason.ERROR
        if sample.token_id is not None:
            reason = sequence.append_token(sample.token_id, now, self.max_model_len)
        if reason is not None:
            self.remove(sequence.request.request_id)
        return Progress(sequence, sample, previous_token_at, reason)

    def _schedule_decodes(self, draft: _Draft) -> None:
        for sequence in [one for one in self._running if one.num_pending == 1]:
            if draft.budget == 0:
                return
            if sequence not in draft.preempted and self._make_room(sequence, draft):
                draft.give(sequence, 1)

    def _make_room(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give a sequence the block its last known token needs; False if it had to give way itself."""
        if len(sequence.token_ids) <= len(sequence.block_table) * self.block_size:
            return True
        while self.pool.num_free == 0:
            victim = min(self._running, key=lambda one: (one.num_computed, -one.arrival))
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        sequence.block_table.extend(self.pool.allocate(1))
        return True

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        draft.budget += draft.shares.pop(victim, 0)
        draft.preempted.append(victim)
        self._running.remove(victim)
        self._release_blocks(victim)
        victim.num_computed = 0
        bisect.insort(self._preempted, victim, key=lambda one: one.arrival)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        # A new table, because a batch under way may still refer to the old one.
        sequence.block_table = array("q")

    def _prefill_share(self, sequence: Sequence, draft: _Draft) -> int:
        largest = max(1, int(self._long_prefill_share * self.limits.max_num_batched_tokens))
        return min(sequence.num_pending, draft.budget, largest)

    def _schedule_prefills(self, draft: _Draft) -> None:
        for sequence in self._running:
            if draft.budget == 0:
                return
            if sequence.num_pending > 1:
                draft.give(sequence, self._prefill_share(sequence, draft))

    def _admit(self, draft: _Draft, now: float) -> None:
        while draft.budget > 0 and len(self._running) < self.limits.max_num_seqs:
            if self._preempted:
                sequence = self._preempted[0]
            elif self._waiting:
                sequence = next(iter(self._waiting.values()))
            else:
                return
            num_blocks = -(-len(sequence.token_ids) // self.block_size)
            if num_blocks + len(self._running) > self.pool.num_free:
                return
            if self._preempted:
                del self._preempted[0]
            else:
                del self._waiting[sequence.request.request_id]
            sequence.block_table.extend(self.pool.allocate(num_blocks))
            self._running.append(sequence)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
                draft.admitted.append(sequence)
            draft.give(sequence, self._prefill_share(sequence, draft))

    def _spend_rest(self, draft: _Draft) -> None:
        for sequence, share in list(draft.shares.items()):
            extra = min(sequence.num_pending - share, draft.budget)
            if extra > 0:
                draft.give(sequence, extra)

    def _batch(self, draft: _Draft) -> Batch:
        ordered = sorted(draft.shares.items(), key=lambda item: item[1] > 1)
        chunks = tuple(
            Chunk(
                request_id=sequence.request.request_id,
                token_ids=sequence.token_ids,
                start=sequence.num_computed,
                num_tokens=share,
                block_table=sequence.block_table,
                num_generated=sequence.num_generated,
                samples=share == sequence.num_pending,
                sampling=sequence.request.sampling,
            )
            for sequence, share in ordered
        )
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        return Batch(chunks, num_decodes, sum(chunk.num_tokens for chunk in chunks))
