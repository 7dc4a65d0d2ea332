"""Long prompts that wait for the share of long ones: passed over without looking up all of their blocks."""

import random

import pytest

from headway_runtime.batch import Batch, Sample, StepResult
from headway_runtime.config import Limits
from headway_runtime.overtaking import has_no_part
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.request import Request, SamplingParams
from headway_runtime.scheduler import Scheduler
from headway_runtime.sequence import Sequence
from headway_runtime.step_draft import StepDraft

BLOCK_SIZE = 4


class World:
    """A scheduler whose steps take a second and whose model always says 1."""

    def __init__(self, limits: Limits, *, num_blocks: int, share: float) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=400,
            limits=limits,
            long_prefill_share=share,
        )
        self.now = 0.0

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int = 1) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add(Request(name, prompt, sampling, self.now))

    def step(self) -> Batch:
        batch = self.scheduler.schedule(self.now).batch
        self.now += 1.0
        result = StepResult(tuple(Sample(1) if chunk.samples else None for chunk in batch.chunks))
        self.scheduler.commit(batch, result, self.now)
        self.scheduler.check_integrity()
        return batch


def given(batch: Batch) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks]


def test_who_waits_for_the_share_of_long_prompts_is_not_looked_up_anew_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(Limits(8, 16), num_blocks=200, share=0.5)
    known = tuple(range(160))
    world.add("known", known)
    while world.scheduler.num_running + world.scheduler.num_waiting:
        world.step()
    looked_up: list[str] = []
    find = PrefixCache.find

    def counted(self: PrefixCache, sequence: Sequence) -> list[int]:
        looked_up.append(sequence.request.request_id)
        return find(self, sequence)

    monkeypatch.setattr(PrefixCache, "find", counted)
    world.add("long", tuple(range(1000, 1200)))
    world.step()
    world.add("waits", (*known, *range(2000, 2100)))
    num_steps = 0
    while world.scheduler.num_waiting:
        world.step()
        num_steps += 1
    assert num_steps > 10
    assert looked_up.count("waits") == 1
    waits = next(chunk for chunk in world.step().chunks if chunk.request_id == "waits")
    assert waits.start >= len(known)


@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_served_otherwise_for_that(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same load without the shortcut, step by step."""
    rng = random.Random(seed)
    limits, share = Limits(rng.randint(4, 8), rng.choice([12, 20])), rng.choice([0.2, 0.5])
    quick, plain = (World(limits, num_blocks=110, share=share) for _ in range(2))
    num_passed_over = 0

    def counted(sequence: Sequence, cache: PrefixCache, draft: StepDraft) -> bool:
        nonlocal num_passed_over
        is_passed_over = has_no_part(sequence, cache, draft)
        num_passed_over += is_passed_over
        return is_passed_over

    beginnings = [tuple(range(1000 * index, 1000 * index + 80)) for index in range(3)]
    for step in range(300):
        if rng.random() < 0.25:
            beginning = rng.choice(beginnings)[: rng.randint(1, 80)]
            prompt = (*beginning, *rng.choices(range(9), k=rng.randint(1, 40)))
            for world in (quick, plain):
                world.add(str(step), prompt, 1 + step % 7)
        with monkeypatch.context() as patch:
            patch.setattr("headway_runtime.scheduler.has_no_part", lambda *_: False)
            want = given(plain.step())
        with monkeypatch.context() as patch:
            patch.setattr("headway_runtime.scheduler.has_no_part", counted)
            assert given(quick.step()) == want
    assert num_passed_over > 0
