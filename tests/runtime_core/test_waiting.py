"""How long anybody waits: simulated trajectories against the bounds that the scheduler's header states."""

import inspect
import zlib
from pathlib import Path

import pytest

from headway_runtime.batch import Batch, Sample, StepResult
from headway_runtime.config import EngineConfig, Limits, Targets
from headway_runtime.request import MAX_PRIORITY, Request, SamplingParams
from headway_runtime.scheduler import Scheduler

DOCS = Path(__file__).parents[2] / "docs"
AGEING_SECONDS = 10.0
LATE_YIELD_SECONDS = 20.0
BLOCK_SIZE = 4


class World:
    """A scheduler whose steps take a second and whose model always says 1."""

    def __init__(
        self,
        limits: Limits,
        *,
        num_blocks: int = 400,
        max_model_len: int = 400,
        long_prefill_share: float = 0.5,
        ttft_target_seconds: float | None = None,
        late_yield_seconds: float = LATE_YIELD_SECONDS,
    ) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            limits=limits,
            long_prefill_share=long_prefill_share,
            priority_ageing_seconds=AGEING_SECONDS,
            late_yield_seconds=late_yield_seconds,
        )
        if ttft_target_seconds is not None:
            self.scheduler.promptness.aim_at(Targets(ttft_milliseconds=1000.0 * ttft_target_seconds))
        self.now = 0.0
        self.num_preempted = 0
        self.first_token_at: dict[str, float] = {}

    def add(
        self, name: str, num_prompt: int, max_tokens: int = 1, *, priority: int = 0, salt: str = ""
    ) -> None:
        # Every prompt begins differently, so that no cache spares it anything.
        prompt = (zlib.crc32(name.encode()), *range(num_prompt - 1))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add(Request(name, prompt, sampling, self.now, priority=priority, cache_salt=salt))

    def step(self) -> Batch:
        schedule = self.scheduler.schedule(self.now)
        batch = schedule.batch
        self.num_preempted += len(schedule.preempted)
        self.scheduler.check_integrity()
        self.now += 1.0
        result = StepResult(tuple(Sample(1) if chunk.samples else None for chunk in batch.chunks))
        for one in self.scheduler.commit(batch, result, self.now).progress:
            name, scheduled_at = one.sequence.request.request_id, one.sequence.scheduled_at
            if name not in self.first_token_at and scheduled_at is not None:
                self.first_token_at[name] = self.now
                self.scheduler.promptness.observe(one.sequence, self.now - scheduled_at)
        return batch


@pytest.mark.parametrize("priority", [0, 1, 3])
def test_a_stream_of_better_priority_delays_the_worse_by_its_age_only(priority: int) -> None:
    """Two come each second where one can be served: without ageing, whoever is worse would never run."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16))
    world.add("patient", 8, priority=priority)
    for second in range(100):
        for index in range(2):
            world.add(f"{second}-{index}", 8)
        world.step()
    # Those rank before it that come within ten seconds per unit, two a second; one is served a second.
    bound = 2 * (priority * AGEING_SECONDS + 1) + 1
    assert world.first_token_at["patient"] <= bound
    if priority:
        assert world.first_token_at["patient"] > priority * AGEING_SECONDS, "it went as if priority were none"


def test_the_worst_priority_behind_an_endless_stream_of_the_best_waits_as_long_as_documented() -> None:
    """As many come as can be served, all as good as a client may call itself."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16))
    world.add("patient", 8, priority=MAX_PRIORITY)
    longest_wait = 2 * MAX_PRIORITY * AGEING_SECONDS
    while "patient" not in world.first_token_at:
        assert world.now <= longest_wait + 1, "it is overtaken for longer than its age allows"
        world.add(f"eager-{world.now}", 8, priority=-MAX_PRIORITY)
        world.step()
    assert world.now >= longest_wait, "the best priority is worth less than it is said to be"
    # What the guides promise with the default of the flag.
    default_ageing_seconds = inspect.signature(EngineConfig).parameters["priority_ageing_seconds"].default
    seconds = 2 * MAX_PRIORITY * default_ageing_seconds
    assert f"{seconds:,.0f} s" in (DOCS / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target_seconds", "yield_seconds", "least", "most"),
    [(10.0, 100.0, 90, 100), (10.0, 0.0, 0, 20), (None, 100.0, 0, 20)],
)
def test_under_twice_the_load_as_many_are_in_time_as_can_be_served(
    target_seconds: float | None, yield_seconds: float, least: int, most: int
) -> None:
    """In the order of arrival each would wait a second more than the one before it."""
    world = World(
        Limits(max_num_seqs=1, max_num_batched_tokens=16),
        ttft_target_seconds=target_seconds,
        late_yield_seconds=yield_seconds,
    )
    came_at = {}
    for second in range(100):
        for index in range(2):
            came_at[f"{second}-{index}"] = world.now
            world.add(f"{second}-{index}", 8)
        world.step()
    num_in_time = sum(1 for name, at in world.first_token_at.items() if at - came_at[name] <= 10.0)
    assert least <= num_in_time <= most
    for _ in range(100):
        world.step()
    assert world.first_token_at.keys() == came_at.keys(), "somebody who was late has been forgotten"


def test_the_late_wait_no_longer_than_they_are_put_back_once() -> None:
    """From when it is late, as many come as can be served, all in time."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16), ttft_target_seconds=4.0)
    for index in range(12):
        world.add(f"crowd-{index}", 8)
    while len(world.first_token_at) < 12 or world.now < 200.0:
        world.add(f"stream-{world.now}", 8)
        world.step()
    last = max(world.first_token_at[f"crowd-{index}"] for index in range(12))
    # It is served as one that came LATE_YIELD_SECONDS later, behind those that came before that.
    assert LATE_YIELD_SECONDS < last <= LATE_YIELD_SECONDS + 12 + 1


def test_the_late_leave_the_last_places_to_who_may_be_in_time() -> None:
    """Ten answer for fifty seconds, and twenty wait that are late by then."""
    world = World(
        Limits(max_num_seqs=10, max_num_batched_tokens=200),
        ttft_target_seconds=4.0,
        late_yield_seconds=1000.0,
    )
    for index in range(30):
        world.add(f"crowd-{index}", 8, 50)
    for _ in range(52):
        world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (7, 13)
    came_at = world.now
    for index in range(3):
        world.add(f"in time-{index}", 8, 50)
    world.step()
    assert all(world.first_token_at[f"in time-{index}"] == came_at + 1.0 for index in range(3))
    # A fourth one has no place: those of the late are taken, and are not left.
    world.add("another", 8, 50)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (10, 14)
    for _ in range(250):
        world.step()
    assert len(world.first_token_at) == 34, "somebody who was late has been forgotten"


@pytest.mark.parametrize(("places", "taken"), [(1, 1), (2, 1), (4, 2), (9, 6), (20, 16)])
def test_of_few_places_the_late_leave_some_but_none_of_the_only_one(places: int, taken: int) -> None:
    """Else, on a replica with a few, whoever comes finds all of them held by answers that nobody counts."""
    world = World(
        Limits(max_num_seqs=places, max_num_batched_tokens=400),
        ttft_target_seconds=4.0,
        late_yield_seconds=1000.0,
    )
    for index in range(3 * places):
        world.add(f"crowd-{index}", 8, 50)
    for _ in range(52):
        world.step()
    assert world.scheduler.num_running == taken
    if taken < places:
        world.add("in time", 8, 50)
        came_at = world.now
        world.step()
        assert world.first_token_at["in time"] == came_at + 1.0
    while world.now < 1000.0:
        world.step()
    assert len(world.first_token_at) == 3 * places + (taken < places), "somebody has been forgotten"


def test_who_is_late_hangs_on_ones_own_prompt() -> None:
    """Three steps are left of the target: enough for one chunk, not for three."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16), ttft_target_seconds=4.0)
    for number in range(40):
        # What prompts take by their length is learnt from these; the spread is none.
        world.add(f"before-{number}", (16, 48)[number % 2])
        while world.scheduler.num_running or world.scheduler.num_waiting:
            world.step()
    came_at = world.now
    world.add("first", 16)
    world.add("long", 48)
    world.add("short", 16)
    for _ in range(8):
        world.step()
    ended = {name: world.first_token_at[name] - came_at for name in ("first", "long", "short")}
    assert ended["first"] == 1.0
    # The long one could begin after a second at the latest, when the first step ended.
    assert ended["long"] == 4.0
    assert ended["short"] == 5.0
    came_at = world.now
    world.add("first again", 32)
    world.add("long again", 48)
    world.add("short again", 16)
    for _ in range(8):
        world.step()
    assert world.first_token_at["short again"] - came_at == 3.0, "the long one, late by then, has yielded"
    assert world.first_token_at["long again"] - came_at == 6.0


def test_those_who_wait_are_looked_at_anew_when_prompts_take_longer() -> None:
    """What they take is known only once the first ones have ended."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=4), ttft_target_seconds=20.0)
    for index in range(8):
        world.add(f"crowd-{index}", 32)
    for _ in range(7):
        world.step()
    assert world.scheduler.late_share == 0.0, "nobody has waited for twenty seconds"
    for _ in range(8):
        world.step()
    # A prompt takes eight seconds, so that who has not begun after twelve is late.
    assert world.scheduler.late_share > 0.0


def test_a_stream_that_is_in_time_keeps_the_late_out_of_no_place_for_longer_than_they_yield() -> None:
    """As many come as leave their places: the late find none of theirs free until it is their turn."""
    world = World(Limits(max_num_seqs=20, max_num_batched_tokens=400), ttft_target_seconds=4.0)
    for index in range(40):
        world.add(f"crowd-{index}", 8, 20)
    while world.now < 300.0:
        world.add(f"stream-{world.now}", 8, 20)
        world.step()
    last = max(world.first_token_at[f"crowd-{index}"] for index in range(40))
    # Behind those that come within LATE_YIELD_SECONDS, of whom one gets a place each second; until two of
    # twenty that these have taken are left, and then one by one.
    assert LATE_YIELD_SECONDS < last <= 2 * LATE_YIELD_SECONDS + 40 + 2


def test_of_all_that_are_here_the_share_that_waits_too_late_is_known() -> None:
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16), ttft_target_seconds=4.0)
    for index in range(8):
        world.add(f"crowd-{index}", 8)
    shares = []
    while world.scheduler.num_waiting:
        world.step()
        shares.append(world.scheduler.late_share)
    # One is served each second, four in time; each of the others is late until it is its turn.
    assert shares == pytest.approx([0.0, 0.0, 0.0, 0.0, 3 / 4, 2 / 3, 1 / 2, 0.0])


def test_who_is_late_and_leaves_is_late_no_more() -> None:
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16), ttft_target_seconds=4.0)
    for index in range(8):
        world.add(f"crowd-{index}", 8)
    for _ in range(5):
        world.step()
    world.scheduler.remove("crowd-7")
    assert world.scheduler.late_share == pytest.approx(2 / 3)


def test_priority_is_worth_more_than_being_in_time() -> None:
    """One that is late goes behind its equals, not behind those that its priority puts it far before."""
    world = World(Limits(max_num_seqs=1, max_num_batched_tokens=16), ttft_target_seconds=4.0)
    for index in range(12):
        world.add(f"urgent-{index}", 8, priority=-5)
    world.add("patient", 8)
    for _ in range(13):
        world.step()
    assert world.first_token_at["patient"] == max(world.first_token_at.values())


def test_short_prompts_wait_no_longer_for_long_ones_than_their_share_of_a_step() -> None:
    """Long prompts without end leave half of every step to others."""
    world = World(Limits(max_num_seqs=8, max_num_batched_tokens=32))
    waits = []
    for second in range(120):
        if second % 6 == 0:
            world.add(f"long-{second}", 300)
        if second % 3 == 1:
            world.add(f"short-{second}", 10)
            waits.append((f"short-{second}", world.now))
        world.step()
    seconds = [world.first_token_at[name] - since for name, since in waits[:-4]]
    assert max(seconds) <= 3.0, seconds


def test_a_long_prompt_ends_though_short_ones_never_stop() -> None:
    world = World(Limits(max_num_seqs=8, max_num_batched_tokens=32))
    world.add("long", 300)
    for second in range(60):
        for index in range(3):
            world.add(f"{second}-{index}", 10)
        world.step()
    assert world.first_token_at["long"] <= 300 / (0.5 * 32) + 2


def test_a_large_one_is_not_overtaken_for_ever_where_blocks_are_short() -> None:
    """It needs nearly all blocks; small ones would always fit into what is left."""
    world = World(Limits(max_num_seqs=8, max_num_batched_tokens=512), num_blocks=100, long_prefill_share=1.0)
    for index in range(6):
        world.add(f"early-{index}", 40, max_tokens=12)
    world.step()
    world.add("large", 380)
    for second in range(60):
        world.add(f"small-{second}", 8, max_tokens=6)
        world.step()
    assert world.first_token_at["large"] <= 20


def test_lower_limits_drain_and_nobody_is_lost() -> None:
    world = World(Limits(max_num_seqs=8, max_num_batched_tokens=64))
    for index in range(16):
        world.add(str(index), 12, max_tokens=10)
    world.step()
    world.scheduler.limits = Limits(max_num_seqs=2, max_num_batched_tokens=2)
    num_running = [world.scheduler.num_running]
    for _ in range(600):
        assert world.step().num_tokens <= 2
        num_running.append(world.scheduler.num_running)
    assert num_running[0] > 2
    assert len(world.first_token_at) == 16
    assert world.scheduler.num_running == world.scheduler.pool.num_used == 0


def test_nobody_waits_for_ever_where_blocks_run_out_all_the_time() -> None:
    """Answers outgrow the blocks, so that somebody loses them in most steps; each ends in its turn.

    The first in rank goes on in every step. So each waits no longer than all before it take one by one: here
    16 tokens each, one of them with the prompt, of which the whole cache holds two and a half at a time.
    """
    world = World(Limits(max_num_seqs=8, max_num_batched_tokens=64), num_blocks=15, max_model_len=24)
    names = [str(number) for number in range(40)]
    for name in names:
        world.add(name, 8, max_tokens=16)
    ended_at: dict[str, float] = {}
    while len(ended_at) < len(names):
        world.step()
        live = {name for name in names if name in world.scheduler}
        for name in names:
            if name not in live:
                ended_at.setdefault(name, world.now)
        assert world.now < 16 * len(names)
    assert world.num_preempted > 20
    for position, name in enumerate(names):
        assert ended_at[name] <= 16 * (position + 1), name
