"""The other autoscalers' algorithms: each rule as its project documents it, and whole runs of all of them."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.samples import Limits, ReplicaSample, Sample, Targets
from headway_operator.slo import target_of
from headway_operator.state import Gateway, Observed, Replica, Revision
from headway_simulator.baselines import (
    BASELINES,
    MOST_CANDIDATES,
    Known,
    horizontal,
    knative,
    planner,
    saturation,
)
from headway_simulator.baselines.horizontal import Behavior
from headway_simulator.baselines.static import Static
from headway_simulator.cluster import BEGIN_SECONDS, Simulation
from headway_simulator.measures import measures
from headway_simulator.step_model import StepModel

MODEL = StepModel("m", 10.0, 0.1, 1.0, 64_000)
KNOWN = Known(MODEL, 2.4, 4.2)
LIMITS = Limits(32, 1024)


def sample_of(name: str, at: float, *, waiting: int = 0, running: int = 0, kv: int = 0) -> ReplicaSample:
    return ReplicaSample(
        instance=name,
        taken_at=at,
        limits=LIMITS,
        envelope=LIMITS,
        targets=Targets(),
        running=running,
        waiting=waiting,
        oldest_waiting_seconds=0.0,
        kv_blocks_used=kv,
        kv_blocks_total=100,
        draining=False,
        counters={},
        histograms={},
    )


def seen_by(at: float, replicas: int, *, pending: int = 0, **load: int) -> tuple[Sample, Observed]:
    """`replicas` ready ones, each with that load, and some that start."""
    names = [f"pod-{index}" for index in range(replicas)]
    living = [Replica(name, "r", "ready", None, 0.0, 0.0) for name in names]
    living += [Replica(f"new-{i}", "r", "starting", None, at, None) for i in range(pending)]
    sample = Sample(at, {name: sample_of(name, at, **load) for name in names})
    revision = Revision("r", "hash", replicas + pending, 0.0)
    return sample, Observed(
        revisions=(revision,), replicas=tuple(living), gateway=Gateway(ready=True, addresses=())
    )


def decided(controller: Any, target: Any, course: list[tuple[Sample, Observed]]) -> list[int]:
    memory = controller.begin(course[0][0], course[0][0].taken_at)
    wanted = []
    for sample, observed in course:
        decision, memory = controller.decide(target, memory, sample, observed, sample.taken_at)
        wanted.append(decision.replicas)
    return wanted


@pytest.fixture
def target(build: Any) -> Any:
    return replace(target_of(build.service().spec), max_replicas=100)


def test_static_numbers_are_what_the_load_needs_rounded_up(target: Any) -> None:
    assert decided(BASELINES["static-mean"].make(KNOWN, Static("mean")), target, [seen_by(0.0, 1)]) == [3]
    peak = BASELINES["static-peak"].make(KNOWN, Static("peak", 1.5))
    assert decided(peak, target, [seen_by(0.0, 1)]) == [7]


@pytest.mark.parametrize(
    ("shares", "num_pods", "replicas", "want"),
    [
        ([1.0, 1.0], 2, 2, 4),  # ceil(2 * 1.0 / 0.5)
        ([0.52, 0.52], 2, 2, 2),  # within a tenth of the target
        ([0.2, 0.2, 0.2], 3, 3, 2),  # ceil(3 * 0.4)
        ([1.0, 1.0], 4, 4, 4),  # two that start count as idle: 1.0 * 2 / 4 is on target
        ([0.2, 0.2], 3, 3, 2),  # one without a value counts as on target: ceil(0.6 * 3)
        ([], 2, 2, 2),
    ],
)
def test_a_mean_over_pods_asks_for_the_replicas_that_kubernetes_says(
    shares: list[float], num_pods: int, replicas: int, want: int
) -> None:
    values = {str(index): share for index, share in enumerate(shares)}
    assert horizontal.by_pods(values, num_pods, replicas, 0.5) == want


def test_waiting_requests_ask_for_one_replica_for_each_five(target: Any) -> None:
    controller = BASELINES["keda-waiting-5"].make(KNOWN, Behavior(5.0))
    assert decided(controller, target, [seen_by(0.0, 2, waiting=11)]) == [5]


def test_waiting_requests_are_read_anew_at_each_sync(target: Any) -> None:
    controller = BASELINES["keda-waiting-5"].make(KNOWN, Behavior(5.0))
    course = [seen_by(0.0, 2, waiting=5), seen_by(5.0, 2, waiting=50), seen_by(15.0, 2, waiting=8)]
    assert decided(controller, target, course) == [2, 2, 4]


def test_up_is_bounded_and_down_waits_for_the_highest_of_five_minutes(target: Any) -> None:
    controller = BASELINES["keda-waiting-1"].make(KNOWN, Behavior(1.0))
    up = decided(controller, target, [seen_by(0.0, 2, waiting=50)])
    assert up == [6]  # the greater of twice and four more
    quiet = [seen_by(float(at), 6) for at in range(300, 630, 15)]
    wanted = decided(controller, target, [seen_by(285.0, 6, waiting=1), *quiet])
    assert wanted[0] == 6
    assert wanted[:20] == [6] * 20  # 285 to 570 s: six were right at 285
    assert wanted[-1] == 1


def test_knative_panics_on_twice_the_load_and_holds_until_a_window_without_reason(target: Any) -> None:
    controller = BASELINES["knative-kpa"].make(KNOWN, knative.Concurrency(0.5))  # 16 a replica
    steady = [seen_by(5.0 * i, 2, running=16) for i in range(13)]
    burst = [seen_by(65.0, 2, running=64)]
    after = [seen_by(70.0 + 5 * i, 5, running=1) for i in range(25)]
    wanted = decided(controller, target, [*steady, *burst, *after])
    assert wanted[:13] == [2] * 13
    assert wanted[13] == 5  # (32 + 128) / 2 in flight, over 16
    assert wanted[14:26] == [5] * 12
    assert wanted[-1] == 2  # to half of the ready ones at most


@pytest.mark.parametrize(
    ("peaks", "replicas", "pending", "want"),
    [
        ([(0.3, 0), (0.3, 0)], 2, 0, 1),  # together 0.6: 0.2 is left below 0.8
        ([(0.4, 0), (0.4, 0)], 2, 0, 2),  # one would be at its threshold
        ([(0.75, 0), (0.75, 0)], 2, 0, 3),  # 0.05 of spare KV
        ([(0.1, 3), (0.1, 3)], 2, 0, 3),  # 2 of spare queue
        ([(0.1, 3), (0.1, 3)], 3, 1, 3),  # one is pending already
        ([(0.9, 9), (0.9, 9)], 2, 0, 3),  # all saturated
        ([(0.1, 0)], 1, 0, 1),
    ],
)
def test_saturation_adds_one_without_spare_and_removes_one_with_enough(
    peaks: list[tuple[float, int]], replicas: int, pending: int, want: int
) -> None:
    assert saturation.analysed(peaks, replicas, pending, saturation.Thresholds()) == want


def test_the_planner_adds_up_prefill_and_decode_of_its_profile() -> None:
    means = planner.Means(4.0, 500.0, 100.0, 60.0, 14.0, 4.0)
    # The prompt takes 60 ms alone. Up to 10 sequences decode within 20 ms each: 500 tokens/s.
    assert planner.needed(MODEL, means, 20.0, 32, 1024) == pytest.approx(4 * 0.06 + 4 * 100 / 500)
    # Twice the ITL of the profile at that concurrency: aim at half, below one sequence's 11 ms.
    slow = replace(means, itl_milliseconds=28.0)
    assert planner.needed(MODEL, slow, 20.0, 32, 1024) == pytest.approx(4 * 0.06 + 4 * 100 * 0.011)


def test_the_first_three_candidates_span_what_there_is() -> None:
    """What a run of the proof tries; the documented default comes first."""

    def first(name: str, value: str) -> list[float]:
        return [getattr(one, value) for one in BASELINES[name].candidates[:3]]

    assert first("knative-kpa", "target_share") == [0.7, 0.25, 0.1]
    assert first("hpa-utilisation", "target") == [0.8, 0.5, 0.3]
    assert first("keda-waiting-1", "stabilization_seconds") == [300.0, 0.0, 120.0]
    assert first("wva-saturation", "kv_cache_threshold") == [0.8, 0.3, 0.1]
    assert first("dynamo-planner", "seconds") == [180.0, 60.0, 30.0]
    assert first("static-mean", "factor") == [1.0, 2.0, 1.4]
    assert first("static-peak", "factor") == [1.0, 0.7, 1.6]


@pytest.mark.parametrize("name", BASELINES)
def test_each_baseline_serves_a_load_and_has_few_candidates(build: Any, name: str) -> None:
    baseline = BASELINES[name]
    assert 1 < len(baseline.candidates) <= MOST_CANDIDATES
    assert len(set(baseline.candidates)) == len(baseline.candidates)
    trace, setting = build.load("step", rate=2.0, seconds=75.0), build.setting(missing_samples=0.2)
    known = replace(KNOWN, limits=Limits(16, 512))
    # The planner's default interval is longer than this load.
    candidate = baseline.candidates[2 if name == "dynamo-planner" else 0]
    run = Simulation(trace, setting, baseline.make(known, candidate)).result()
    found = measures(run, target_of(setting.service.spec), 1)
    assert found.num_unfinished == 0
    assert {one.limits for one in run.passes} == {Limits(16, 512)}
    assert len(run.passes) >= 14  # one in 5.05 s
    if "static" in name:
        assert len({one.replicas for one in run.passes}) == 1
    elif name != "wva-saturation":  # these queues stay below its thresholds
        assert max(one.replicas for one in run.passes) > 1
    assert run.passes[0].at > BEGIN_SECONDS
