"""Random lives of the scheduler and the prefix cache, judged after every turn and against each request alone.

They go through the real loop of steps, plain and overlapping.

HEADWAY_TRAJECTORIES sets how many trajectories run; then they are drawn anew each time.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runtime_core.chain_runner import BLOCK_SIZE, VOCAB_SIZE
from tests.runtime_core.judged_trajectory import (
    Abort,
    Add,
    Event,
    FailedStep,
    Reset,
    SetLimits,
    Shape,
    Step,
    Trajectory,
    WaveringPolicy,
)

from headway_runtime import overtaking
from headway_runtime import scheduler as scheduler_module
from headway_runtime.offload.counters import OffloadCounters
from headway_runtime.prefix_cache import root_key

NUM_TRAJECTORIES = os.environ.get("HEADWAY_TRAJECTORIES")

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
    late_yield_seconds=st.sampled_from([0.0, 5.0, 60.0]),
    enable_prefix_caching=st.sampled_from([True] * 5 + [False]),
    num_speculative_tokens=st.sampled_from([0, 0, 1, 3, 6]),
    num_slots=st.sampled_from([0, 1, 4, 12, 40]),
    has_disk=st.booleans(),
    overlaps=st.sampled_from([True, True, False]),
    wavers=st.booleans(),
    doubling_context=st.sampled_from([0, 0, 1, 5, 30]),
)


@pytest.fixture(autouse=True, scope="module")
def _small_thresholds() -> Iterator[None]:
    """What is worth waiting for, at the size of these requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overtaking, "LEAST_TOKENS_WORTH_WAITING", 2 * BLOCK_SIZE)
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
    shape = Shape(40, 4, 0.5, 5.0, 5.0, enable_prefix_caching=True)
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


def test_trajectories_in_which_guessing_comes_and_goes_overlap_and_accept() -> None:
    trajectory = busy(num_speculative_tokens=3, overlaps=True, wavers=True)
    for _ in range(6):
        add_many(trajectory, 6)
        for _ in range(8):
            trajectory.apply(Step())
    trajectory.finish()
    policy = trajectory.scheduler.draft_policy
    assert isinstance(policy, WaveringPolicy)
    assert policy.num_blind >= 50
    assert trajectory.runner.num_fed >= 100, "steps go on from tokens that are not read yet"
    assert trajectory.runner.num_accepted >= 50
    assert trajectory.num_preempted >= 5


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
