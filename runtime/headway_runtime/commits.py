"""What steps do to their sequences: assumed when one is launched, taken over when it is read. No torch.

A launched step computes its tokens before anything that is launched after it, so the next one can be
scheduled at once, as if it had been read: its tokens are computed, and what it samples is a known token of
which only the value is missing. What needs that value waits until the step is read: whether the sequence has
ended, and which blocks may be shared, as blocks are known by their tokens, and proven by a finite sample.

So by the time a step is read, the next one may have been launched, and what is read may surprise:

- The sequence has ended, by a stop token or an error: what the next step computes for it belongs to nobody
  and is passed over when it is read. Its blocks are free at once. Whoever gets them is launched later, and
  what the next step leaves in them counts as unproven, as of any sequence that goes while a step is under
  way.
- It was aborted, preempted or admitted again meanwhile, or its id was given to another one. A chunk knows its
  sequence by the list of its tokens, and whether that still holds the same blocks by the table of these; each
  table is given up with its blocks. A preempted sequence still gets its token.

An end that can be foreseen, by the number of tokens, is: such a sequence is in no step after its last.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from headway_runtime.batch import UNREAD, Batch, Chunk, Sample, StepResult, Verified
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.request import FinishReason, TokenLogprobs
from headway_runtime.sequence import Sequence


@dataclass(slots=True)
class Progress:
    """What one sample did to its sequence. Not frozen for the same reason as `Chunk`.

    previous_token_at: when its token before this one was made; None for the first.
    finish_reason: set when this was the last token; the sequence's blocks are free then.
    more: the samples after it, if tokens were guessed and came true.
    """

    sequence: Sequence
    sample: Sample
    previous_token_at: float | None
    finish_reason: FinishReason | None
    more: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step did. num_prompt_tokens: prompt tokens computed for the first time."""

    progress: list[Progress]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """needs_reading: whether the next step must wait until this one is read."""

    batch: Batch
    needs_reading: bool


class Commits:
    """The steps that were launched and not read yet, in order.

    sequences: all live ones, by request id. remove: forgets one of them, and frees its blocks.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        cache: PrefixCache,
        draft_policy: DraftPolicy,
        remove: Callable[[str], object],
        block_size: int,
    ) -> None:
        self._sequences = sequences
        self._cache = cache
        self._draft_policy = draft_policy
        self._remove = remove
        self._block_size = block_size
        self._launched: deque[_Launched] = deque()

    @property
    def needs_reading(self) -> bool:
        """Whether no step can be scheduled before the latest one is read."""
        return bool(self._launched) and self._launched[-1].needs_reading

    @property
    def is_any_unread(self) -> bool:
        """Whether a step is under way that was not read yet."""
        return bool(self._launched)

    def launch(self, batch: Batch) -> None:
        """Assume that a step does what it was told."""
        # Guesses may bring more tokens than one.
        needs_reading = batch.num_drafts > 0
        sequences = self._sequences
        for chunk in batch.chunks:
            sequence = sequences.get(chunk.request_id)
            if sequence is None or sequence.token_ids is not chunk.token_ids:
                continue  # nobody's, as `_owner` says
            sequence.num_computed += chunk.num_tokens
            if chunk.samples:
                sequence.expect_token()
            needs_reading = needs_reading or sequence.needs_reading
        self._launched.append(_Launched(batch, needs_reading))

    def commit(self, batch: Batch, result: StepResult, now: float) -> Committed:
        """Take over what the first launched step computed, read at `now`.

        A step of which nothing was assumed, because it is read before another one is scheduled, may be new
        here.
        """
        self._take_first(batch)
        progress = []
        num_prompt_tokens = 0
        for index, entries in result.prompt_logprobs.items():
            self._take_prompt_logprobs(batch.chunks[index], entries)
        sequences = self._sequences
        for index, (chunk, sample) in enumerate(zip(batch.chunks, result.samples, strict=True)):
            sequence = sequences.get(chunk.request_id)
            if sequence is None or sequence.token_ids is not chunk.token_ids:
                continue  # nobody's, as `_owner` says
            end = chunk.start + chunk.num_tokens
            if sequence.num_prompt_counted < sequence.num_prompt:
                num_prompt_tokens += sequence.count_prompt_tokens(end)
            has_blocks = chunk.block_table is sequence.block_table
            if has_blocks:
                sequence.num_confirmed = end
            if sample is not None and sample.token_id is None:
                if sample.error is None:
                    self._cache.distrust(chunk.block_table)
                self._remove(chunk.request_id)
                progress.append(Progress(sequence, sample, sequence.last_token_at, FinishReason.ERROR))
            elif chunk.num_drafts and sample is not None:
                progress.append(self._take_verified(sequence, sample, result.verified.get(index), now))
            else:
                if has_blocks:
                    self._confirm(sequence, is_proven=sample is not None)
                if sample is not None:
                    progress.append(self._take_sample(sequence, sample, now))
        return Committed(progress, num_prompt_tokens)

    def drop(self, batch: Batch) -> list[Sequence]:
        """A step failed, when it was launched or when it was read: remove its sequences, and return them."""
        if self._launched and self._launched[0].batch is batch:
            self._launched.popleft()
        sequences = [one for chunk in batch.chunks if (one := self._owner(chunk)) is not None]
        for sequence in sequences:
            self._remove(sequence.request.request_id)
        return sequences

    def prompts_under_way(self) -> Iterator[Sequence]:
        """Those of whose prompts launched steps compute more than a token, in blocks that they still hold."""
        for launched in self._launched:
            for chunk in launched.batch.chunks[launched.batch.num_decodes :]:
                sequence = self._owner(chunk)
                if sequence is not None and chunk.block_table is sequence.block_table:
                    yield sequence

    def check_integrity(self) -> None:
        """AssertionError unless sequences expect just the tokens that launched steps sample."""
        expected = dict.fromkeys(self._sequences, 0)
        for launched in self._launched:
            for chunk in launched.batch.chunks:
                if chunk.samples and self._owner(chunk) is not None:
                    expected[chunk.request_id] += 1
        for name, sequence in self._sequences.items():
            count, num_tokens = sequence.num_unread, len(sequence.token_ids)
            assert count == expected[name], f"{name}: {count} tokens unread, {expected[name]} sampled"
            assert sequence.token_ids.count(UNREAD) == count, name
            assert sequence.token_ids[num_tokens - count :] == [UNREAD] * count, name
            assert num_tokens <= sequence.most_tokens, f"{name}: a step too many"

    def _take_first(self, batch: Batch) -> None:
        """It is under way no more."""
        if not self._launched or self._launched[0].batch is not batch:
            assert not self._launched, "steps are read in the order in which they were launched"
            self.launch(batch)
        self._launched.popleft()

    def _take_prompt_logprobs(self, chunk: Chunk, entries: list[TokenLogprobs]) -> None:
        sequence = self._owner(chunk)
        if sequence is not None:
            sequence.add_prompt_logprobs(chunk.start, entries)

    def _owner(self, chunk: Chunk) -> Sequence | None:
        """The sequence that a chunk was made for, if it lives."""
        sequence = self._sequences.get(chunk.request_id)
        return sequence if sequence is not None and sequence.token_ids is chunk.token_ids else None

    def _confirm(self, sequence: Sequence, *, is_proven: bool) -> None:
        """What was computed of a sequence is certain; is_proven: and a finite sample has followed it."""
        if sequence.num_confirmed >= (sequence.num_published + 1) * self._block_size:
            self._cache.publish(sequence)
        if not is_proven:
            return
        is_full = sequence.num_proven < sequence.num_published * self._block_size
        if is_full or not self._cache.proves_blocks:
            self._cache.prove(sequence)
        else:
            sequence.num_proven = sequence.num_confirmed

    def _take_sample(self, sequence: Sequence, sample: Sample, now: float) -> Progress:
        previous_token_at = sequence.last_token_at
        assert sample.token_id is not None
        reason = sequence.read_token(sample.token_id, now)
        if reason is not None:
            self._remove(sequence.request.request_id)
        return Progress(sequence, sample, previous_token_at, reason)

    def _take_verified(
        self, sequence: Sequence, sample: Sample, verified: Verified | None, now: float
    ) -> Progress:
        """Take a sample, and those after the guesses that came true; the KV of these guesses is computed."""
        previous_token_at = sequence.last_token_at
        following = () if verified is None else verified.samples
        taken, reason = [], None
        for one in (sample, *following):
            assert one.token_id is not None
            taken.append(one)
            reason = sequence.read_token(one.token_id, now)
            if reason is not None:
                break
        sequence.num_computed += len(taken) - 1
        sequence.num_confirmed = sequence.num_computed
        if verified is None or verified.is_finite:
            # What was computed for wrong guesses is written over, and harmless until then.
            sequence.num_given = sequence.num_computed
        if verified is not None:
            self._draft_policy.observe_guesses(sequence.acceptance, verified.num_drafted, len(following))
        self._cache.publish(sequence)
        self._cache.prove(sequence)
        if reason is not None:
            self._remove(sequence.request.request_id)
        return Progress(sequence, sample, previous_token_at, reason, tuple(taken[1:]))
