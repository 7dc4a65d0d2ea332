"""A runner that stands in for the model, and what a request's answer is with it when it runs alone.

It keeps in each slot a checksum of all tokens up to it, read from the slot before, as KV depends on all that
came before: a block shared wrongly, or too early, changes the tokens that follow. Token 7 makes its slot and
all that depend on it "not a number", which also spreads from the tail of a block. What it copies to host
memory, and what a disk holds of that, is judged likewise. Like a device it computes steps in the order of
their launches, and knows what they sample before it is read.
"""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from headway_runtime.batch import UNREAD, Batch, Chunk, Sample, StepResult, Verified
from headway_runtime.offload.disk_tier import Read
from headway_runtime.request import FinishReason, Request

BLOCK_SIZE = 4
VOCAB_SIZE = 40
POISON = 7
STOP = 3


def link(previous: int | None, token_id: int) -> int | None:
    """What a slot holds: None for not a number."""
    if previous is None or token_id == POISON:
        return None
    return zlib.crc32(f"{previous}/{token_id}".encode())


def next_token(last: int, seed: int) -> int:
    return zlib.crc32(f"{last}+{seed}".encode()) % VOCAB_SIZE


Failure = Literal["copying", "launching", "reading"]


@dataclass
class ChainRunner:
    """Stands in for the model. slots: by block id * BLOCK_SIZE + offset; untouched ones are missing.

    host: what slots of host memory hold. sampled: what the latest step sampled after which list of tokens.
    fails: where the next step fails. on_launch: called when a step is under way.
    """

    slots: dict[int, int | None] = field(default_factory=dict)
    host: dict[int, list[int | None]] = field(default_factory=dict)
    sampled: list[tuple[list[int], int]] = field(default_factory=list)
    num_accepted: int = 0
    num_fed: int = 0
    fails: Failure | None = None
    on_launch: Callable[[Batch], None] | None = None

    def clear_blocks(self, blocks: "array[int]") -> None:
        for block in blocks:
            self.slots.update(dict.fromkeys(range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE), 0))

    def copy_blocks(self, stores: list[tuple[int, int]], loads: list[tuple[int, int]]) -> tuple[float, float]:
        is_failing = self.fails == "copying"
        for block, slot in stores:
            found = [self.slots[block * BLOCK_SIZE + offset] for offset in range(BLOCK_SIZE)]
            self.host[slot] = [None] * BLOCK_SIZE if is_failing else found
        for slot, block in loads:
            for offset, value in enumerate(self.host[slot]):
                # What is launched after copies and fails may have spoilt them.
                self.slots[block * BLOCK_SIZE + offset] = None if self.fails == "launching" else value
        if is_failing:
            for _, block in loads:
                self.slots.update(dict.fromkeys(range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)))
            self.fails = None
            raise RuntimeError("copies fail")
        return 0.0, 0.0

    def launch(self, batch: Batch) -> StepResult | None:
        """None if reading it fails."""
        if self.fails in ("copying", "launching"):
            self.fails = None
            for chunk in batch.chunks:
                for position in range(chunk.start, chunk.start + chunk.num_tokens + chunk.num_drafts):
                    self.slots[self._slot(chunk, position)] = None
            raise RuntimeError("a launch fails")
        result = self.execute(batch)
        self.sampled = [
            # What has no token goes on with any, as nobody will ask for it.
            (chunk.token_ids, 0 if sample.token_id is None else sample.token_id)
            for chunk, sample in zip(batch.chunks, result.samples, strict=True)
            if sample is not None
        ]
        if self.on_launch is not None:
            self.on_launch(batch)
        if self.fails is None:
            return result
        self.fails = None
        return None

    def read(self, pending: StepResult | None) -> StepResult:
        if pending is None:
            raise RuntimeError("reading fails")
        return pending

    def is_usable(self) -> bool:
        return True

    def _token(self, chunk: Chunk, position: int) -> int:
        """What the device computes at a position of a chunk."""
        token_id = chunk.token_ids[position]
        if token_id != UNREAD:
            return token_id
        assert chunk.samples, "a token that is not known is not the last one"
        assert position == len(chunk.token_ids) - 1
        self.num_fed += 1
        (found,) = (token for token_ids, token in self.sampled if token_ids is chunk.token_ids)
        return found

    def execute(self, batch: Batch) -> StepResult:
        assert batch.num_drafts == sum(chunk.num_drafts for chunk in batch.chunks)
        assert batch.num_tokens == sum(chunk.num_tokens for chunk in batch.chunks) + batch.num_drafts
        assert [chunk.num_tokens == 1 for chunk in batch.chunks].count(True) == batch.num_decodes
        assert all(chunk.num_tokens == 1 for chunk in batch.chunks[: batch.num_decodes])
        written: set[int] = set()
        for chunk in batch.chunks:
            slots = [
                chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(chunk.start + chunk.num_tokens)
            ]
            last = self.slots[slots[chunk.start - 1]] if chunk.start else 0
            for position in range(chunk.start, len(slots)):
                assert slots[position] not in written, "two sequences write one slot"
                written.add(slots[position])
                self.slots[slots[position]] = last = link(last, self._token(chunk, position))
        samples = tuple(self._sample(batch, index) for index in range(len(batch.chunks)))
        verified = {}
        for index, (chunk, sample) in enumerate(zip(batch.chunks, samples, strict=True)):
            if chunk.num_drafts and sample is not None and sample.token_id is not None:
                verified[index] = self._verify(chunk, sample.token_id, written)
        return StepResult(samples, verified=verified)

    def _verify(self, chunk: Chunk, token_id: int, written: set[int]) -> Verified:
        """Guess tokens, of which some come true, and write what is computed for them."""
        start = chunk.start + chunk.num_tokens
        last = self.slots[self._slot(chunk, start - 1)]
        following: list[Sample] = []
        true_token, is_right = token_id, True
        num_drafted = chunk.num_drafts - (token_id % 3 == 0)
        for position in range(start, start + num_drafted):
            assert last is not None
            is_hit = zlib.crc32(f"{chunk.request_id}/{position}".encode()) % 4 > 0
            guess = true_token if is_hit and is_right else (true_token + 1) % VOCAB_SIZE
            slot = self._slot(chunk, position)
            assert slot not in written
            written.add(slot)
            is_right = is_right and guess == true_token
            self.slots[slot] = last = link(last, guess)
            if last is None:
                return Verified(num_drafted, tuple(following), is_finite=False)
            if is_right:
                true_token = next_token(last, chunk.sampling.seed)
                following.append(Sample(true_token))
        self.num_accepted += len(following)
        return Verified(num_drafted, tuple(following), is_finite=True)

    @staticmethod
    def _slot(chunk: Chunk, position: int) -> int:
        return chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def _sample(self, batch: Batch, index: int) -> Sample | None:
        chunk = batch.chunks[index]
        if not chunk.samples:
            return None
        end = chunk.start + chunk.num_tokens
        want: int | None = 0
        for position in range(-(-end // BLOCK_SIZE) * BLOCK_SIZE):
            block = chunk.block_table[position // BLOCK_SIZE]
            found = self.slots.get(block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
            if position < end:
                want = link(want, self._token(chunk, position))
                assert found == want, f"{chunk.request_id}: position {position} holds another one's KV"
            elif found is None:
                return Sample(None)
        return Sample(None) if want is None else Sample(next_token(want, chunk.sampling.seed))


@dataclass
class SlowDisk:
    """Stands in for a disk and its thread: each call that looks for results lets it do one thing.

    What is being read is garbage until it is done. Some files turn out to be damaged.
    """

    host: dict[int, list[int | None]]
    files: dict[bytes, list[int | None]] = field(default_factory=dict)
    writes: dict[int, bytes] = field(default_factory=dict)
    reads: list[tuple[bytes, int, bool]] = field(default_factory=list)
    num_read: int = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.files

    def write(self, key: bytes, slot: int) -> None:
        self.writes[slot] = key

    def read(self, key: bytes, slot: int) -> None:
        self.host[slot] = [None] * BLOCK_SIZE
        self.reads.append((key, slot, True))

    def let_go(self, slot: int) -> bool:
        if slot in self.writes and slot % 3 == 0:
            return False  # is being written
        self.writes.pop(slot, None)
        return True

    def work(self) -> None:
        for slot in [*self.writes][:2]:
            key = self.writes.pop(slot)
            self.files[key] = self.host[slot]

    def completed(self) -> list[Read]:
        if not self.reads:
            return []
        key, slot, is_good = self.reads.pop(0)
        contents = self.files.get(key)
        if key[0] % 8 == 0:
            contents = self.files.pop(key, None) and None
        if contents is None or not is_good:
            return [Read(key, slot, is_good=False)]
        self.host[slot] = contents
        self.num_read += 1
        return [Read(key, slot, is_good=True)]

    def wait(self, seconds: float) -> None:
        pass

    def seconds_to_read(self, count: int) -> float | None:
        return 0.1 * count

    def forget_slowness(self, share: float) -> None:
        pass

    def reset(self) -> None:
        self.files.clear()
        self.writes.clear()
        self.reads = [(key, slot, False) for key, slot, _ in self.reads]

    def close(self) -> None:
        pass

    def check_integrity(self, slot_of: Callable[[bytes], int | None]) -> None:
        for slot, key in self.writes.items():
            assert slot_of(key) == slot


def run_alone(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request gets when nothing else is there."""
    last: int | None = 0
    for token_id in request.prompt_token_ids:
        last = link(last, token_id)
    tokens: list[int] = []
    sampling = request.sampling
    while last is not None:
        tokens.append(next_token(last, sampling.seed))
        if tokens[-1] in sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == sampling.max_tokens or len(tokens) + len(request.prompt_token_ids) == max_model_len:
            return tokens, FinishReason.LENGTH
        last = link(last, tokens[-1])
    return tokens, FinishReason.ERROR
