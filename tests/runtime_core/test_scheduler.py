"""The scheduler alone: whole trajectories over a runner that checks what every block holds."""

import random
import zlib
from dataclasses import dataclass, field

import pytest

from headway_runtime.batch import Batch, Sample, StepResult
from headway_runtime.config import Limits
from headway_runtime.prompt_cost import EVEN, PromptCost
from headway_runtime.request import FinishReason, Request, SamplingParams
from headway_runtime.scheduler import Progress, Schedule, Scheduler
from headway_runtime.sequence import Sequence

BLOCK_SIZE = 4


def token_of(request_id: str, position: int) -> int:
    """What the checking runner generates: known in advance, so that a sequence's tokens can be judged."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % 1000


@dataclass
class CheckingRunner:
    """Stands in for the model: keeps which token of which request each slot holds, and reads all of them."""

    slots: dict[int, tuple[str, int, int]] = field(default_factory=dict)

    def execute(self, batch: Batch) -> StepResult:
        assert batch.num_tokens == sum(chunk.num_tokens for chunk in batch.chunks)
        assert [chunk.num_tokens == 1 for chunk in batch.chunks] == sorted(
            (chunk.num_tokens == 1 for chunk in batch.chunks), reverse=True
        )
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                slot = chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                self.slots[slot] = (chunk.request_id, position, chunk.token_ids[position])
        for chunk in batch.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                slot = chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                want = (chunk.request_id, position, chunk.token_ids[position])
                assert self.slots[slot] == want, "a block was overwritten while it was in use"
        return StepResult(
            tuple(
                Sample(token_of(chunk.request_id, len(chunk.token_ids))) if chunk.samples else None
                for chunk in batch.chunks
            )
        )


class Driver:
    """Steps a scheduler, checks what must hold after every step, and keeps what came out."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 64,
        limits: Limits | None = None,
        long_prefill_share: float = 1.0,
        prompt_cost: PromptCost = EVEN,
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            limits=limits or Limits(8, 32),
            long_prefill_share=long_prefill_share,
            prompt_cost=prompt_cost,
        )
        self.runner = CheckingRunner()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.num_preemptions = 0
        self.now = 0.0

    def add(self, request_id: str, num_prompt: int, max_tokens: int, priority: int = 0) -> None:
        prompt = tuple(range(num_prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        # A salt of its own: the runner knows whose each slot is, so nothing may be shared here.
        self.scheduler.add(
            Request(request_id, prompt, sampling, self.now, priority=priority, cache_salt=request_id)
        )
        self.tokens[request_id] = []

    def step(self) -> Schedule:
        self.now += 1.0
        schedule = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        assert schedule.batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        self.num_preemptions += len(schedule.preempted)
        result = self.runner.execute(schedule.batch)
        for one in self.scheduler.commit(schedule.batch, result, self.now).progress:
            self._note(one)
        self.scheduler.check_integrity()
        return schedule

    def run(self, max_steps: int = 5000) -> None:
        while self.scheduler.num_running + self.scheduler.num_waiting:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            schedule = self.step()
            assert schedule.batch.chunks, "live requests, but a step without work"

    def _note(self, one: Progress) -> None:
        request_id = one.sequence.request.request_id
        assert request_id not in self.finished, "output after the end"
        assert one.sample.token_id is not None
        self.tokens[request_id].append(one.sample.token_id)
        if one.finish_reason is not None:
            self.finished[request_id] = one.finish_reason


def want_tokens(request_id: str, num_prompt: int, count: int) -> list[int]:
    return [token_of(request_id, num_prompt + index) for index in range(count)]


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    driver = Driver(limits=Limits(8, 8))
    driver.add("a", 20, 2)
    shares = [[(chunk.start, chunk.num_tokens) for chunk in driver.step().batch.chunks] for _ in range(4)]
    assert shares == [[(0, 8)], [(8, 8)], [(16, 4)], [(20, 1)]]
    assert driver.tokens["a"] == want_tokens("a", 20, 2)
    assert driver.finished == {"a": FinishReason.LENGTH}


def test_decodes_come_before_prompts_and_share_a_step_with_them() -> None:
    driver = Driver(limits=Limits(8, 8))
    driver.add("a", 4, 10)
    driver.step()
    driver.add("b", 20, 1)
    batch = driver.step().batch
    assert [(chunk.request_id, chunk.num_tokens) for chunk in batch.chunks] == [("a", 1), ("b", 7)]
    assert (batch.num_decodes, batch.num_tokens) == (1, 8)


def test_requests_join_and_leave_between_steps() -> None:
    driver = Driver()
    driver.add("a", 4, 3)
    driver.step()
    driver.add("b", 4, 1)
    assert len(driver.step().batch.chunks) == 2
    assert driver.finished == {"b": FinishReason.LENGTH}
    assert len(driver.step().batch.chunks) == 1
    assert driver.finished.keys() == {"a", "b"}


def test_requests_are_admitted_in_order_of_arrival_and_none_overtakes() -> None:
    driver = Driver(num_blocks=16, limits=Limits(8, 64))
    driver.add("a", 40, 4)
    driver.add("big", 60, 1)
    driver.add("small", 1, 1)
    # `big` finds too few blocks, and `small`, which would fit, stays behind it.
    assert [one.request.request_id for one in driver.step().admitted] == ["a"]
    driver.run()
    order = list(driver.finished)
    assert order == ["a", "big", "small"]


def test_long_prompt_takes_its_share_only_while_others_want_some() -> None:
    driver = Driver(limits=Limits(8, 20), long_prefill_share=0.5)
    driver.add("long", 60, 1)
    assert [chunk.num_tokens for chunk in driver.step().batch.chunks] == [20]
    driver.add("short", 8, 1)
    shares = {chunk.request_id: chunk.num_tokens for chunk in driver.step().batch.chunks}
    assert shares == {"long": 12, "short": 8}
    assert "short" in driver.finished


def test_preemption_takes_the_sequence_with_least_computed_tokens() -> None:
    driver = Driver(num_blocks=16, max_model_len=40)
    driver.add("long", 16, 20)
    driver.add("short", 8, 20)
    driver.add("middle", 12, 20)
    preempted: list[Sequence] = []
    while not preempted:
        preempted = driver.step().preempted
    assert [one.request.request_id for one in preempted] == ["short"]
    assert preempted[0].num_computed == 0
    driver.run()
    assert driver.tokens["short"] == want_tokens("short", 8, 20)


@pytest.mark.parametrize(
    ("first", "second", "third", "victim"),
    [
        # Prompt tokens and priority. On the first in rank rests that nothing waits for ever.
        ((4, 0), (12, 0), (16, 0), "second"),
        ((4, 0), (12, 0), (16, 1), "third"),
        ((4, 0), (16, 2), (12, 1), "second"),
        ((16, 0), (12, 0), (12, 0), "third"),
    ],
    ids=["first in rank", "worse priority", "worst priority", "equal but later"],
)
def test_preemption_spares_the_first_in_rank_and_goes_by_priority_before_tokens(
    first: tuple[int, int], second: tuple[int, int], third: tuple[int, int], victim: str
) -> None:
    driver = Driver(num_blocks=14, max_model_len=40)
    sizes = {"first": first, "second": second, "third": third}
    for name, (num_prompt, priority) in sizes.items():
        driver.add(name, num_prompt, 20, priority)
    driver.step()
    driver.step()
    assert driver.scheduler.num_running == 3
    preempted: list[Sequence] = []
    while not preempted:
        preempted = driver.step().preempted
    assert [one.request.request_id for one in preempted] == [victim]
    driver.run()
    assert all(driver.tokens[name] == want_tokens(name, size, 20) for name, (size, _) in sizes.items())


def test_preempted_sequence_resumes_before_the_waiting() -> None:
    driver = Driver(num_blocks=12, max_model_len=40, limits=Limits(2, 64))
    driver.add("a", 20, 16)
    driver.add("b", 20, 16)
    driver.add("waits", 4, 1)
    while not driver.num_preemptions:
        driver.step()
    assert driver.scheduler.num_waiting == 2
    admitted: list[str] = []
    while not admitted:
        schedule = driver.step()
        admitted = [one.request.request_id for one in schedule.admitted]
    assert admitted == ["waits"]
    assert [chunk.request_id for chunk in schedule.batch.chunks] == ["b", "waits"]
    driver.run()
    assert driver.tokens["b"] == want_tokens("b", 20, 16)


def test_what_a_preempted_sequence_finds_of_its_own_is_no_hit_of_the_cache() -> None:
    driver = Driver(num_blocks=12, max_model_len=40, limits=Limits(2, 64))
    driver.add("a", 20, 16)
    driver.add("b", 20, 16)
    preempted: list[Sequence] = []
    while not preempted:
        preempted = driver.step().preempted
    (sequence,) = preempted
    starts: list[int] = []
    while not starts:
        chunks = driver.step().batch.chunks
        starts = [chunk.start for chunk in chunks if chunk.request_id == sequence.request.request_id]
    # It goes on behind blocks that it computed before, and they are not counted as found.
    assert starts[0] > 0
    assert sequence.num_cached == 0
    driver.run()
    assert sequence.num_cached == 0


def test_lowering_max_num_seqs_drains_without_preempting() -> None:
    driver = Driver(limits=Limits(4, 32))
    for index in range(8):
        driver.add(str(index), 4, 5 + index)
    driver.step()
    assert driver.scheduler.num_running == 4
    driver.scheduler.limits = Limits(1, 32)
    running = [driver.scheduler.num_running]
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        before = {request_id: len(tokens) for request_id, tokens in driver.tokens.items()}
        schedule = driver.step()
        # Those that ran go on in every step; nobody joins until one is left.
        for chunk in schedule.batch.chunks:
            assert len(driver.tokens[chunk.request_id]) == before[chunk.request_id] + 1
        running.append(driver.scheduler.num_running)
    assert driver.num_preemptions == 0
    assert running[:9] == [4, 4, 4, 4, 3, 2, 1, 0, 1]
    assert len(driver.finished) == 8


def test_lower_token_budget_holds_at_the_next_step_and_pauses_the_youngest() -> None:
    driver = Driver(limits=Limits(8, 32))
    for index in range(6):
        driver.add(str(index), 4, 6)
    driver.step()
    driver.scheduler.limits = Limits(2, 2)
    blocks_used = driver.scheduler.pool.num_used
    assert [chunk.request_id for chunk in driver.step().batch.chunks] == ["0", "1"]
    assert driver.scheduler.pool.num_used == blocks_used + 2
    driver.run()
    assert driver.num_preemptions == 0
    assert list(driver.finished) == [str(index) for index in range(6)]


def test_raised_limit_admits_at_the_next_step() -> None:
    driver = Driver(limits=Limits(1, 32))
    for index in range(3):
        driver.add(str(index), 4, 5)
    driver.step()
    driver.scheduler.limits = Limits(3, 32)
    assert [one.request.request_id for one in driver.step().admitted] == ["1", "2"]


def test_removed_sequence_frees_its_blocks_at_once_wherever_it_is() -> None:
    driver = Driver(num_blocks=12, max_model_len=40, limits=Limits(2, 64))
    for name in ("a", "b", "waits"):
        driver.add(name, 20, 16)
    while not driver.num_preemptions:
        driver.step()
    assert driver.scheduler.remove("b") is not None  # preempted
    assert driver.scheduler.remove("waits") is not None
    used = driver.scheduler.pool.num_used
    assert used > 0
    assert driver.scheduler.remove("a") is not None  # running
    assert driver.scheduler.pool.num_used == 0
    assert driver.scheduler.remove("a") is None
    driver.scheduler.check_integrity()
    assert driver.scheduler.num_running + driver.scheduler.num_waiting == 0


def test_sequence_removed_during_a_step_is_passed_over_at_its_commit() -> None:
    driver = Driver()
    driver.add("a", 4, 3)
    driver.add("b", 4, 3)
    schedule = driver.scheduler.schedule(1.0)
    result = driver.runner.execute(schedule.batch)
    driver.scheduler.remove("a")
    committed = driver.scheduler.commit(schedule.batch, result, 2.0)
    assert [one.sequence.request.request_id for one in committed.progress] == ["b"]
    assert committed.num_prompt_tokens == 4


def test_oldest_unanswered_is_the_first_without_a_token() -> None:
    driver = Driver(limits=Limits(1, 32))
    assert driver.scheduler.oldest_unanswered_at() is None
    driver.add("a", 4, 3)
    driver.now = 5.0
    driver.add("b", 4, 3)
    assert driver.scheduler.oldest_unanswered_at() == 0.0
    driver.step()
    assert driver.scheduler.oldest_unanswered_at() == 5.0


@pytest.mark.parametrize("seed", range(40))
def test_random_trajectory_ends_every_request_with_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    max_model_len = rng.choice([16, 40, 64])
    least_blocks = -(-max_model_len // BLOCK_SIZE)
    driver = Driver(
        num_blocks=rng.randint(least_blocks, 3 * least_blocks),
        max_model_len=max_model_len,
        limits=Limits(8, 32),
        long_prefill_share=rng.choice([0.2, 0.5, 1.0]),
    )
    shapes: dict[str, tuple[int, int]] = {}
    aborted: set[str] = set()
    for index in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            num_prompt = rng.randint(1, max_model_len - 1)
            request_id = f"{index}-{len(shapes)}"
            shapes[request_id] = (num_prompt, rng.randint(1, max_model_len - num_prompt))
            driver.add(request_id, *shapes[request_id])
        if rng.random() < 0.1:
            num_seqs = rng.randint(1, 8)
            driver.scheduler.limits = Limits(num_seqs, rng.randint(num_seqs, 32))
        live = [one for one in shapes if one not in driver.finished and one not in aborted]
        if live and rng.random() < 0.1:
            victim = rng.choice(live)
            aborted.add(victim)
            assert driver.scheduler.remove(victim) is not None
        driver.step()
    driver.run()
    assert driver.scheduler.pool.num_used == 0
    for request_id, (num_prompt, max_tokens) in shapes.items():
        if request_id in aborted:
            assert request_id not in driver.finished
        else:
            assert driver.tokens[request_id] == want_tokens(request_id, num_prompt, max_tokens)
            assert driver.finished[request_id] is FinishReason.LENGTH


def test_random_trajectories_do_preempt() -> None:
    """The trajectories above would prove little if blocks never ran out in them."""
    driver = Driver(num_blocks=20, max_model_len=64, limits=Limits(8, 32))
    for index in range(12):
        driver.add(str(index), 10, 40)
    driver.run()
    assert driver.num_preemptions >= 3
    assert all(driver.tokens[str(index)] == want_tokens(str(index), 10, 40) for index in range(12))


def test_nobody_starves_under_a_steady_stream_of_short_requests() -> None:
    driver = Driver(num_blocks=20, max_model_len=64, limits=Limits(4, 16), long_prefill_share=0.5)
    driver.add("long", 50, 10)
    for index in range(100):
        driver.add(f"short-{index}", 6, 3)
        driver.step()
        if "long" in driver.finished:
            break
    assert driver.finished["long"] is FinishReason.LENGTH
    assert len(driver.finished) > 5, "the long prompt kept the short ones out"
