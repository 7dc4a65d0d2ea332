"""How many adapters a step may have, and that nobody waits for ever because of it. No model."""

from __future__ import annotations

import random

import pytest

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter
from headway_runtime.adapters.admission import MOST_OVERTAKING
from headway_runtime.batch import Sample, StepResult
from headway_runtime.config import Limits
from headway_runtime.request import Request, SamplingParams
from headway_runtime.scheduler import Scheduler

ADAPTERS = [NO_ADAPTER, *(Adapter(slot, bytes([slot]) * 32, f"adapter {slot}") for slot in range(1, 9))]


class Trajectory:
    """A scheduler, stepped with made-up samples; each step is held to its bounds."""

    def __init__(self, max_adapters: int, max_num_seqs: int = 8, num_blocks: int = 64) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=64,
            limits=Limits(max_num_seqs, 32),
            long_prefill_share=0.5,
            max_adapters=max_adapters,
        )
        self.max_adapters = max_adapters
        self.now = 0.0
        self.num_steps = 0
        self.started_at: dict[str, int] = {}
        self.ended_at: dict[str, int] = {}

    def add(self, request_id: str, adapter: int, num_prompt: int = 6, num_tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        self.now += 0.001
        prompt = tuple(random.Random(request_id).choices(range(50), k=num_prompt))
        request = Request(request_id, prompt, sampling, self.now, adapter=ADAPTERS[adapter].name)
        self.scheduler.add(request, adapter=ADAPTERS[adapter])

    def step(self) -> None:
        schedule = self.scheduler.schedule(self.now)
        slots = {chunk.adapter for chunk in schedule.batch.chunks} - {0}
        assert len(slots) <= self.max_adapters
        for one in schedule.admitted:
            self.started_at[one.request.request_id] = self.num_steps
        samples = tuple(Sample(7) if chunk.samples else None for chunk in schedule.batch.chunks)
        done = self.scheduler.commit(schedule.batch, StepResult(samples), self.now)
        self.scheduler.check_integrity()
        for progress in done.progress:
            if progress.finish_reason is not None:
                self.ended_at[progress.sequence.request.request_id] = self.num_steps
        self.num_steps += 1

    def run(self) -> None:
        while self.scheduler.num_running + self.scheduler.num_waiting:
            assert self.num_steps < 5000, "somebody waits for ever"
            self.step()


def test_no_step_has_more_adapters_than_it_may() -> None:
    one = Trajectory(max_adapters=2)
    for number in range(40):
        one.add(str(number), number % 9)
    one.run()
    assert len(one.ended_at) == 40


def test_requests_without_an_adapter_pass_those_that_wait_for_one() -> None:
    one = Trajectory(max_adapters=1)
    one.add("first", 1, num_tokens=40)
    one.add("waits", 2)
    one.add("passes", 0)
    one.add("passes, too", 1)
    one.step()
    assert one.started_at.keys() == {"first", "passes", "passes, too"}
    one.run()
    assert one.started_at["waits"] > one.ended_at["first"]


def test_a_stream_of_requests_for_one_adapter_keeps_nobody_else_waiting_for_ever() -> None:
    one = Trajectory(max_adapters=1, max_num_seqs=4)
    for number in range(4):
        one.add(f"before {number}", 1, num_tokens=3 + 2 * number)
    one.step()
    one.add("waits", 2)
    num_added = 0
    while "waits" not in one.started_at:
        assert one.num_steps < 500, "it is overtaken for ever"
        while one.scheduler.num_waiting < 6:
            one.add(f"after {num_added}", 1, num_tokens=4 + num_added % 5)
            num_added += 1
        one.step()
    overtook = [name for name in one.started_at if name.startswith("after")]
    assert len(overtook) == MOST_OVERTAKING


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_all_end(seed: int) -> None:
    draw = random.Random(seed)
    one = Trajectory(draw.randint(1, 4), draw.randint(1, 8), num_blocks=draw.randint(16, 40))
    for number in range(80):
        one.add(str(number), draw.randint(0, 8), draw.randint(1, 30), draw.randint(1, 20))
        for _ in range(draw.randint(0, 3)):
            one.step()
    one.run()
    assert len(one.ended_at) == 80
