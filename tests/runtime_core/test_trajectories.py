"""Random lives of the scheduler and the prefix cache, judged after every turn and against each request alone.

They go through the real loop of steps, plain and overlapping. The runner here keeps in each slot a checksum
of all tokens up to it, read from the slot before, as KV depends on all that came before: a block shared
wrongly, or too early, changes the tokens that follow. Token 7 makes its slot and all that depend on it "not a
number", which also spreads from the tail of a block. What it copies to host memory, and what a disk holds of
that, is judged likewise. Like a device it computes steps in the order of their launches, and knows what they
sample before it is read.

HEADWAY_TRAJECTORIES sets how many trajectories run; then they are drawn anew each time.
"""

import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_runtime import scheduler as scheduler_module
from headway_runtime.batch import UNREAD, Batch, Chunk, Sample, StepResult, Verified
from headway_runtime.commits import Committed
from headway_runtime.config import Limits
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.metrics import EngineMetrics
from headway_runtime.offload.counters import OffloadCounters
from headway_runtime.offload.disk_tier import Read
from headway_runtime.offload.tiers import KVOffload
from headway_runtime.prefix_cache import root_key
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams
from headway_runtime.scheduler import Progress, Schedule, Scheduler
from headway_runtime.sequence import Sequence
from headway_runtime.step_accounts import StepAccounts
from headway_runtime.step_loop import StepLoop

BLOCK_SIZE = 4
VOCAB_SIZE = 40
POISON = 7
STOP = 3
NUM_TRAJECTORIES = os.environ.get("HEADWAY_TRAJECTORIES")


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


@dataclass(frozen=True)
class Add:
    """prefix: which of few common beginnings, and how much of it."""

    prefix: tuple[int, int]
    suffix: tuple[int, ...]
    salt: str
    priority: int
    max_tokens: int
    seed: int
    wants_prompt_logprobs: bool


@dataclass(frozen=True)
class Step:
    """removed: which of its requests is aborted while it is under way, if it has as many."""

    removed: int | None = None


@dataclass(frozen=True)
class FailedStep:
    """The runner raises, having written what is not finite; or, once all was launched, when it is read."""

    where: Failure


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class SetLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int


@dataclass(frozen=True)
class Reset:
    """The prefix cache is emptied."""


Event = Add | Step | FailedStep | Abort | SetLimits | Reset


@dataclass(frozen=True)
class Shape:
    max_model_len: int
    num_spare_blocks: int
    long_prefill_share: float
    ageing_seconds: float
    enable_prefix_caching: bool
    num_speculative_tokens: int = 0
    num_slots: int = 0
    has_disk: bool = False
    overlaps: bool = False


PREFIXES = tuple(tuple((3 * start + 5 * index) % 6 for index in range(64)) for start in range(3))
ADDS = st.builds(
    Add,
    prefix=st.tuples(st.integers(0, 2), st.integers(0, 40)),
    suffix=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12).map(tuple),
    salt=st.sampled_from(["", "", "tenant"]),
    priority=st.sampled_from([0, 0, 0, 1, -3]),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 3),
    wants_prompt_logprobs=st.sampled_from([False] * 7 + [True]),
)
STEPS = st.builds(Step, st.sampled_from([None] * 9 + [0, 1]))
LIMITS = st.integers(1, 8).flatmap(
    lambda num_seqs: st.builds(
        SetLimits, st.just(num_seqs), st.integers(num_seqs, 32), st.sampled_from([0, 1, 3, 6])
    )
)
RARE = st.one_of(
    LIMITS,
    st.builds(Abort, st.integers(0, 30)),
    st.builds(FailedStep, st.sampled_from(["copying", "launching", "reading"])),
    st.just(Reset()),
)
EVENTS = st.lists(st.one_of(ADDS, ADDS, STEPS, STEPS, STEPS, STEPS, RARE), min_size=20, max_size=80)
SHAPES = st.builds(
    Shape,
    max_model_len=st.sampled_from([16, 40, 64]),
    num_spare_blocks=st.integers(0, 24),
    long_prefill_share=st.sampled_from([0.2, 0.5, 1.0]),
    ageing_seconds=st.sampled_from([0.0, 5.0, 60.0]),
    enable_prefix_caching=st.sampled_from([True] * 5 + [False]),
    num_speculative_tokens=st.sampled_from([0, 0, 1, 3, 6]),
    num_slots=st.sampled_from([0, 1, 4, 12, 40]),
    has_disk=st.booleans(),
    overlaps=st.sampled_from([True, True, False]),
)


class JudgedScheduler(Scheduler):
    """Each schedule is shown to `judge` before anything is made of it."""

    judge: Callable[[Schedule], None]

    def schedule(self, now: float) -> Schedule:
        first = min(self.running, key=lambda one: one.rank, default=None)
        schedule = super().schedule(now)
        assert first not in schedule.preempted, "the first in rank has lost its blocks"
        self.check_integrity()
        self.judge(schedule)
        return schedule


class JudgedAccounts(StepAccounts):
    """Each progress is shown to `judge`."""

    judge: Callable[[Progress], None]

    def outputs(self, committed: Committed, now: float) -> list[RequestOutput]:
        for one in committed.progress:
            self.judge(one)
        return super().outputs(committed, now)


class Trajectory:
    """A scheduler over a `ChainRunner`; keeps what came out and what must come out."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.runner = ChainRunner()
        self.counters = OffloadCounters()
        self.disk = SlowDisk(self.runner.host) if shape.has_disk else None
        self.offload: KVOffload | None = None
        if shape.num_slots and shape.enable_prefix_caching:
            self.offload = KVOffload(
                num_slots=shape.num_slots,
                slot_bytes=1,
                block_size=BLOCK_SIZE,
                counters=self.counters,
                disk=self.disk,
            )
            self.offload.observe_step(100, 50.0)
        self.scheduler = JudgedScheduler(
            num_blocks=-(-shape.max_model_len // BLOCK_SIZE) + shape.num_spare_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=shape.max_model_len,
            limits=Limits(8, 32, shape.num_speculative_tokens),
            long_prefill_share=shape.long_prefill_share,
            priority_ageing_seconds=shape.ageing_seconds,
            enable_prefix_caching=shape.enable_prefix_caching,
            draft_policy=DraftPolicy(is_adaptive=False),
            offload=self.offload,
        )
        self.scheduler.judge = self._judge
        self.metrics = EngineMetrics()
        policy = self.scheduler.draft_policy if shape.num_speculative_tokens else None
        accounts = JudgedAccounts(self.metrics, self.scheduler.cache, policy)
        accounts.judge = self._note
        self.loop = StepLoop(
            self.scheduler,
            self.runner,
            accounts,
            lambda: self.now,
            offload=self.offload,
            overlaps=shape.overlaps,
        )
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason | None] = {}  # None: taken out
        self.contents: dict[bytes, list[int | None]] = {}  # what a block of each key must hold
        self.num_preempted = self.num_cached = 0

    def apply(self, event: Event) -> None:
        match event:
            case Add():
                self.add(event)
            case Step():
                self.step(event.removed)
            case FailedStep():
                self.runner.fails = event.where
                self.step()
                self.runner.fails = None
            case Abort():
                live = [name for name in self.requests if name not in self.ended]
                if live:
                    self.take_out(live[event.which % len(live)])
            case SetLimits():
                self.scheduler.limits = Limits(
                    event.max_num_seqs, event.max_num_batched_tokens, event.num_speculative_tokens
                )
            case Reset():
                self.scheduler.reset_prefix_cache()
        self.check()

    def add(self, event: Add) -> None:
        which, length = event.prefix
        prompt = (*PREFIXES[which][:length], *event.suffix)[: self.shape.max_model_len - 1] or (0,)
        sampling = SamplingParams(
            max_tokens=event.max_tokens,
            seed=event.seed,
            stop_token_ids=frozenset({STOP}),
            num_prompt_logprobs=1 if event.wants_prompt_logprobs else None,
        )
        name = str(len(self.requests))
        request = Request(name, prompt, sampling, self.now, event.priority, event.salt)
        self.scheduler.add(request)
        self.requests[name] = request
        self.tokens[name] = []
        self._note_contents(request)

    def _note_contents(self, request: Request) -> None:
        tokens = [*request.prompt_token_ids, *run_alone(request, self.shape.max_model_len)[0]]
        sequence = Sequence(replace(request, prompt_token_ids=tuple(tokens)), 0)
        self.scheduler.cache.extend_keys(sequence, len(tokens) // BLOCK_SIZE)
        values: list[int | None] = []
        for token_id in tokens:
            values.append(link(values[-1] if values else 0, token_id))
        for index, key in enumerate(sequence.block_keys):
            self.contents[key] = values[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]

    def _judge(self, schedule: Schedule) -> None:
        assert schedule.batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        assert all(chunk.num_tokens > 0 for chunk in schedule.batch.chunks)
        assert not {block for block, _ in schedule.copies.stores}.intersection(schedule.blocks_to_clear)
        assert schedule.batch.chunks or not schedule.copies
        self.num_preempted += len(schedule.preempted)
        for sequence in schedule.admitted:
            assert sequence.num_cached % BLOCK_SIZE == 0
            assert sequence.num_cached < sequence.num_prompt, "nothing is left to compute"
            assert not sequence.num_cached or sequence.request.sampling.num_prompt_logprobs is None
            self.num_cached += sequence.num_cached

    def step(self, removed: int | None = None) -> bool:
        """One turn; whether there was anything to do. removed: of the step's chunks, whose request is aborted
        while it is under way."""
        self.now += 1.0
        if self.disk is not None:
            self.disk.work()

        def remove(batch: Batch) -> None:
            if removed is not None and removed < len(batch.chunks):
                self.take_out(batch.chunks[removed].request_id)

        self.runner.on_launch = remove
        done = self.loop.step(self.now)
        for output in [] if done is None else done.outputs:
            if output.error is not None and output.error.startswith("RuntimeError"):
                assert output.request_id not in self.ended, "a second end"
                self.ended[output.request_id] = None
        return done is not None

    def take_out(self, name: str) -> None:
        assert self.scheduler.remove(name) is not None
        assert name not in self.ended
        self.ended[name] = None

    def _note(self, one: Progress) -> None:
        name = one.sequence.request.request_id
        assert name not in self.ended, "output after the end"
        tokens = [one.token_id for one in (one.sample, *one.more) if one.token_id is not None]
        assert len(tokens) == 1 + len(one.more) or not one.more
        self.tokens[name] += tokens
        if one.finish_reason is not None:
            self.ended[name] = one.finish_reason
            assert one.sequence.num_prompt_counted == one.sequence.num_prompt

    def check(self) -> None:
        """What must hold between any two events."""
        self.scheduler.check_integrity()
        cache = self.scheduler.cache
        for key, block in cache._block_of.items():
            held = [self.runner.slots[block * BLOCK_SIZE + offset] for offset in range(BLOCK_SIZE)]
            assert held == self.contents[key], f"block {block} does not hold what its key says"
            assert None not in held or block in cache._unproven, f"block {block} is shared and not finite"
        if self.offload is not None:
            for key, slot in self.offload._index._slot_of.items():
                values = self.runner.host[slot]
                assert values == self.contents[key], f"slot {slot} does not hold what its key says"
                assert None not in values, f"slot {slot} holds what was never proven"

    def finish(self) -> None:
        """Run to the end, and compare with each request alone."""
        num_steps = 0
        while self.scheduler.num_running + self.scheduler.num_waiting or self.loop.is_under_way:
            is_waiting = self.offload is not None and self.offload.is_reading
            assert self.step() or is_waiting, "live requests, but a turn without work"
            self.check()
            num_steps += 1
            assert num_steps < 200 * (1 + len(self.requests)), "not finished in time"
        assert self.scheduler.pool.num_used == 0
        counters = self.metrics.snapshot().counters
        assert counters["generated_tokens"] == sum(map(len, self.tokens.values()))
        assert counters["preemptions"] == self.num_preempted
        for name, request in self.requests.items():
            want_tokens, want_reason = run_alone(request, self.shape.max_model_len)
            if self.ended[name] is None:
                assert self.tokens[name] == want_tokens[: len(self.tokens[name])]
            else:
                assert (self.tokens[name], self.ended[name]) == (want_tokens, want_reason)


@pytest.fixture(autouse=True, scope="module")
def _small_thresholds() -> Iterator[None]:
    """What is worth waiting for, at the size of these requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "LEAST_TOKENS_WORTH_WAITING", 2 * BLOCK_SIZE)
        patch.setattr(scheduler_module, "MAX_OVERTAKEN", 3)
        yield


@settings(
    max_examples=int(NUM_TRAJECTORIES or 200),
    derandomize=NUM_TRAJECTORIES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(SHAPES, EVENTS)
def test_any_trajectory_keeps_integrity_and_answers_each_request_as_if_it_were_alone(
    shape: Shape, events: list[Event]
) -> None:
    trajectory = Trajectory(shape)
    for event in events:
        trajectory.apply(event)
    trajectory.finish()


def busy(**changes: Any) -> Trajectory:
    shape = Shape(40, 4, 0.5, 5.0, enable_prefix_caching=True)
    return Trajectory(replace(shape, **changes))


def add_many(trajectory: Trajectory, count: int) -> None:
    for index in range(count):
        trajectory.apply(Add((index % 3, 10 + index % 17), (index % 5,), "", 0, 25, index % 2, False))


@pytest.mark.parametrize("overlaps", [False, True])
def test_trajectories_of_this_kind_do_preempt_and_hit(*, overlaps: bool) -> None:
    """The random ones would prove little if blocks never ran out in them, or were never found again."""
    trajectory = busy(overlaps=overlaps)
    for _ in range(6):
        add_many(trajectory, 6)
        for _ in range(8):
            trajectory.apply(Step())
    trajectory.finish()
    assert trajectory.num_preempted >= 5
    assert trajectory.num_cached >= 20 * BLOCK_SIZE
    assert (trajectory.runner.num_fed > 100) == overlaps


def test_trajectories_with_guesses_accept_and_preempt() -> None:
    trajectory = busy(num_speculative_tokens=3)
    for _ in range(6):
        add_many(trajectory, 6)
        for _ in range(8):
            trajectory.apply(Step())
    trajectory.finish()
    assert trajectory.num_preempted >= 5
    assert trajectory.runner.num_accepted >= 100


def run_tenants(trajectory: Trajectory) -> OffloadCounters:
    """Nine beginnings by turns, more than the blocks hold."""
    for turn in range(12):
        for prefix in range(3):
            tenant = f"tenant {turn % 3}"
            trajectory.apply(Add((prefix, 27), (turn % 5,), tenant, 0, 6, 0, wants_prompt_logprobs=False))
        for _ in range(8):
            trajectory.apply(Step())
    trajectory.finish()
    return trajectory.counters


def test_trajectories_with_host_memory_find_there_what_blocks_lost() -> None:
    counters = run_tenants(busy(num_slots=70))
    transfers = counters.snapshot().transfers
    assert transfers["device_to_host"].num_blocks >= 50
    assert transfers["host_to_device"].num_blocks >= 50
    assert counters.host.hit_tokens >= 100


def test_trajectories_with_a_disk_find_there_what_host_memory_lost() -> None:
    trajectory = busy(num_slots=16, has_disk=True)
    counters = run_tenants(trajectory)
    assert counters.host.evicted_blocks >= 50
    assert trajectory.disk is not None
    assert trajectory.disk.num_read >= 20
    assert counters.disk.hit_tokens >= 50


def test_wrong_sharing_would_show() -> None:
    """The runner above is a judge: a cache that mixes up two beginnings fails the trajectory."""
    trajectory = busy()
    trajectory.apply(Add((0, 20), (), "", 0, 4, 0, False))
    for _ in range(6):
        trajectory.apply(Step())
    cache = trajectory.scheduler.cache
    wrong = root_key("")
    block = next(iter(cache._block_of.values()))
    key = cache._key_of[block]
    assert key is not None
    cache._key_of[block] = wrong
    cache._block_of[wrong] = cache._block_of.pop(key)
    with pytest.raises((AssertionError, KeyError)):
        trajectory.check()
