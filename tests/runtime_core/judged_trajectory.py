"""A life of the scheduler, the prefix cache and the loop of steps, judged after every turn.

At its end each request must have been answered as if it had been alone.
"""

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tests.runtime_core.chain_runner import BLOCK_SIZE, STOP, ChainRunner, Failure, SlowDisk, link, run_alone

from headway_runtime.batch import Batch
from headway_runtime.commits import Committed
from headway_runtime.config import Limits, Targets
from headway_runtime.draft_policy import Acceptance, DraftPolicy
from headway_runtime.metrics import EngineMetrics
from headway_runtime.offload.counters import OffloadCounters
from headway_runtime.offload.tiers import KVOffload
from headway_runtime.prompt_cost import PromptCost
from headway_runtime.request import FinishReason, Request, RequestOutput, SamplingParams
from headway_runtime.scheduler import Progress, Schedule, Scheduler
from headway_runtime.sequence import Sequence
from headway_runtime.step_accounts import StepAccounts
from headway_runtime.step_loop import StepLoop


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
    late_yield_seconds: float
    enable_prefix_caching: bool
    num_speculative_tokens: int = 0
    num_slots: int = 0
    has_disk: bool = False
    overlaps: bool = False
    wavers: bool = False
    doubling_context: int = 0


PREFIXES = tuple(tuple((3 * start + 5 * index) % 6 for index in range(64)) for start in range(3))


class WaveringPolicy(DraftPolicy):
    """Guesses in some steps, and not in the next few, by no reason that could be foreseen."""

    num_asked = 0
    num_chosen = 0
    num_blind = 0

    def may_guess(self, acceptances: Collection[Acceptance], most: int) -> bool:
        self.num_asked += 1
        return bool(acceptances) and zlib.crc32(f"asked {self.num_asked}".encode()) % 4 == 0

    def lengths(
        self, acceptances: Collection[Acceptance], most: int, room: int, *, is_blind: bool = False
    ) -> list[int]:
        self.num_blind += is_blind
        self.num_chosen += 1
        if is_blind or zlib.crc32(f"chosen {self.num_chosen}".encode()) % 2 == 0:
            return [0] * len(acceptances)
        return [min(most, room // max(1, len(acceptances)))] * len(acceptances)


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
            prompt_cost=PromptCost(shape.doubling_context),
            priority_ageing_seconds=shape.ageing_seconds,
            late_yield_seconds=shape.late_yield_seconds,
            enable_prefix_caching=shape.enable_prefix_caching,
            draft_policy=WaveringPolicy() if shape.wavers else DraftPolicy(is_adaptive=False),
            offload=self.offload,
        )
        self.scheduler.promptness.aim_at(Targets(ttft_milliseconds=5000.0))
        self.scheduler.judge = self._judge
        self.metrics = EngineMetrics()
        policy = self.scheduler.draft_policy if shape.num_speculative_tokens else None
        accounts = JudgedAccounts(self.metrics, self.scheduler, policy)
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
