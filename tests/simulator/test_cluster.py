"""A whole service: every request ends once, pods live as they do on Kubernetes, the real controller acts."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from headway_operator.samples import Limits, Sample
from headway_operator.slo import Target, target_of
from headway_operator.spec.scaling import Scaling
from headway_operator.spec.waiting import Waiting
from headway_operator.state import Attainment, Decision, Observed, Start
from headway_simulator.cluster import BEGIN_SECONDS, Simulation
from headway_simulator.control import Controller, headway
from headway_simulator.measures import measures
from headway_simulator.records import Allowance, Run
from headway_simulator.trace import Arrival, Trace

UNKNOWN = Attainment(None, None, 0, 0, "unknown")


def scripted(course: dict[float, int], seen: list[Any] | None = None, limits: Limits | None = None) -> Any:
    """A controller that wants so many replicas from these times on; `seen` gets all that it is shown."""

    def decide(
        target: Target, memory: int, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, int]:
        if seen is not None:
            seen.append((now - BEGIN_SECONDS, sample, observed))
        replicas = [count for at, count in sorted(course.items()) if at <= now - BEGIN_SECONDS][-1]
        chosen = limits or target.initial
        return Decision(now, replicas, chosen, "Scripted", "", "", UNKNOWN, UNKNOWN, {}), memory + 1

    return Controller("scripted", lambda sample, now: 0, decide)


def fates(run: Run) -> Counter[str]:
    return Counter(one.fate for one in run.flights)


def even(count: int, seconds: float, prompt: int = 100, output: int = 20) -> Trace:
    return Trace("even", tuple(Arrival(i * seconds / count, prompt, output) for i in range(count)), seconds)


def test_every_request_ends_and_none_before_it_came(build: Any) -> None:
    run = Simulation(build.load(), build.setting(), headway()).result()
    assert fates(run) == {"finished": len(run.flights)}
    for one in run.flights:
        assert one.ttft_seconds is not None
        assert one.ttft_seconds > 0
        assert one.finished_at is not None
        assert one.finished_at >= one.arrived_at + one.ttft_seconds


@pytest.mark.parametrize(
    ("waiting", "num_finished"),
    [
        pytest.param({"timeoutSeconds": 5}, 0, id="not for as long as a start takes"),
        pytest.param({"timeoutSeconds": 120}, 10, id="until a replica is ready"),
        pytest.param({"timeoutSeconds": 120, "maxRequests": 4}, 4, id="no more than so many"),
        pytest.param({}, 10, id="a service that may sleep holds them for ten minutes"),
    ],
)
def test_requests_wait_for_a_replica_as_the_spec_says(
    build: Any, waiting: dict[str, int], num_finished: int
) -> None:
    """All replicas go at once; what comes then waits for the next, which takes 40 s."""
    service = build.service({"minReplicas": 0, "maxReplicas": 2})
    spec = service.spec.model_copy(update={"waiting": Waiting.model_validate(waiting)})
    setting = replace(build.setting(cold_start_seconds=40.0), service=replace(service, spec=spec))
    load = Trace("late", tuple(Arrival(40.0 + 0.1 * i, 100, 20) for i in range(10)), 100.0)
    run = Simulation(load, setting, scripted({0: 0, 45: 1})).result()
    assert fates(run)["finished"] == num_finished
    assert sum(fates(run).values()) == 10


def test_a_seed_gives_the_same_run_and_another_one_other_losses(build: Any) -> None:
    def decided(seed: int) -> Any:
        setting = build.setting(
            missing_samples=0.3, cold_start_spread=0.5, deaths_per_pod_hour=20.0, seed=seed
        )
        run = Simulation(build.load(rate=4.0), setting, headway()).result()
        return run.passes, run.pods, run.flights

    assert decided(1) == decided(1)
    assert decided(1) != decided(2)


def test_the_shipped_controller_adds_replicas_to_a_load_beyond_one(build: Any) -> None:
    trace = build.load("step", rate=2.0, seconds=600.0)
    run = Simulation(trace, build.setting(), headway()).result()
    found = measures(run, _target(build), 1, trace.step_at_seconds)
    assert max(one.replicas for one in run.passes) > 1
    assert any(one.cause == "AddedReplicas" for one in run.passes)
    assert found.recovery_seconds is not None
    # Passes are due each 5 s, whatever the delay of a sample.
    assert {round(b.at - a.at, 6) for a, b in pairwise(run.passes)} == {5.0}


def _target(build: Any) -> Target:
    return target_of(build.service().spec)


def test_a_replica_is_ready_after_its_cold_start_and_paid_from_its_beginning(build: Any) -> None:
    seen: list[Any] = []
    run = Simulation(
        even(60, 60.0), build.setting(scrape_delay_seconds=0.0), scripted({0: 1, 20: 2}, seen)
    ).result()
    # What the controller learns of starts is read from it.
    starts = {one.start for _, _, observed in seen for one in observed.replicas}
    assert starts >= {None, Start(0.0, 0.0, 0.0, 20.0)}
    second = run.pods[1]
    assert second.placed_at == BEGIN_SECONDS + 20
    assert second.ready_at == BEGIN_SECONDS + 40
    found = measures(run, _target(build), 8)
    assert found.replica_hours == pytest.approx((60 + 40) / 3600)
    assert found.gpu_hours == pytest.approx(8 * 100 / 3600)
    assert found.most_replicas == 2


def test_what_no_node_has_room_for_is_unschedulable_until_another_one_goes(build: Any) -> None:
    seen: list[Any] = []
    setting = build.setting(most_pods=2, cold_start_seconds=5.0, initial_replicas=2)
    run = Simulation(even(60, 120.0), setting, scripted({0: 2, 20: 3, 60: 1, 80: 2}, seen)).result()
    pending = [
        [(one.phase, one.reason) for one in observed.replicas if one.phase == "pending"]
        for at, _, observed in seen
        if 30 < at < 55
    ]
    assert pending
    assert all(one == [("pending", "Unschedulable")] for one in pending)
    # The one without a node went first, and was never paid for; another came later.
    assert len(run.pods) == 3
    assert measures(run, _target(build), 1).most_replicas == 2


def test_a_pod_that_is_removed_finishes_what_it_has(build: Any) -> None:
    """Answers of about 20 s; the replica goes in their middle, and no request is lost."""
    seen: list[Any] = []
    trace = even(20, 20.0, output=1500)
    setting = build.setting(initial_replicas=2)
    run = Simulation(replace(trace, duration_seconds=100.0), setting, scripted({0: 2, 20: 1}, seen)).result()
    assert fates(run) == {"finished": 20}
    phases = [sorted(one.phase for one in observed.replicas) for _, _, observed in seen]
    assert ["draining", "ready"] in phases
    draining = [
        sample for _, sample, observed in seen for one in sample.replicas.values() if one and one.draining
    ]
    assert draining
    gone = [pod.gone_at for pod in run.pods if pod.gone_at is not None]
    assert len(gone) == 1
    assert gone[0] > BEGIN_SECONDS + 30


def test_a_drain_ends_at_its_time_limit_and_what_is_left_is_lost(build: Any) -> None:
    setting = build.setting(initial_replicas=2)
    manifest_spec = setting.service.spec.model_copy(update={"drain_timeout_seconds": 2})
    setting = replace(setting, service=replace(setting.service, spec=manifest_spec))
    trace = replace(even(20, 10.0, output=3000), duration_seconds=60.0)
    run = Simulation(trace, setting, scripted({0: 2, 10: 1})).result()
    assert fates(run)["lost"] == 10
    assert fates(run)["finished"] == 10
    lost_at = next(pod.gone_at for pod in run.pods if pod.gone_at is not None)
    assert lost_at == pytest.approx(BEGIN_SECONDS + 10 + 2, abs=0.2)


def test_the_emptiest_replica_is_removed(build: Any) -> None:
    """Two long answers on one replica, short ones on the other: the plan's deletion costs say which goes."""
    arrivals = (Arrival(0.0, 10, 4000), *(Arrival(1.0 + i, 10, 5) for i in range(60)))
    trace = Trace("t", arrivals, 61.0)
    run = Simulation(trace, build.setting(initial_replicas=2), scripted({0: 2, 20: 1})).result()
    assert fates(run)["finished"] == len(arrivals)
    gone = next(pod for pod in run.pods if pod.gone_at is not None and pod.gone_at < run.ends_at)
    # The busy one would have drained for long.
    assert gone.gone_at is not None
    assert gone.gone_at < BEGIN_SECONDS + 25


def test_a_dead_pod_loses_what_it_had_and_is_replaced(build: Any) -> None:
    setting = build.setting(initial_replicas=2, deaths_per_pod_hour=60.0, cold_start_seconds=5.0)
    run = Simulation(even(600, 600.0, output=200), setting, scripted({0: 2})).result()
    deaths = [pod for pod in run.pods if pod.gone_at is not None]
    assert deaths
    assert len(run.pods) == 2 + len(deaths)
    assert 0 < fates(run)["lost"] < 100
    assert fates(run)["finished"] + fates(run)["lost"] + fates(run)["rejected"] == 600
    assert measures(run, _target(build), 1).num_lost == fates(run)["lost"]


def test_without_a_ready_replica_requests_are_held_and_then_refused(build: Any) -> None:
    """No node has room: the gateway holds each request for 30 s."""
    setting = build.setting(
        most_pods=1, initial_replicas=1, deaths_per_pod_hour=3600 * 10.0, cold_start_seconds=40.0
    )
    seen: list[Any] = []
    run = Simulation(even(30, 60.0), setting, scripted({0: 1}, seen)).result()
    assert fates(run)["rejected"] > 0
    held = [sample.gateways["http://gateway"] for _, sample, _ in seen]
    assert any(one.waiting > 0 and one.oldest_waiting_seconds > 5 for one in held)
    assert 0 < held[-1].counters["rejected"] <= fates(run)["rejected"] + fates(run)["lost"]


def test_held_requests_are_served_once_a_replica_is_ready(build: Any) -> None:
    """None is there at first; the one that the first pass asks for is ready 10 s later."""
    setting = build.setting(initial_replicas=0, cold_start_seconds=10.0)
    run = Simulation(even(10, 5.0), setting, scripted({0: 1})).result()
    assert fates(run) == {"finished": 10}
    served_at = [one.arrived_at + (one.ttft_seconds or 0.0) - BEGIN_SECONDS for one in run.flights]
    assert all(10 < at < 11 for at in served_at)


def test_missing_samples_are_none_with_their_reason_and_the_controller_holds(build: Any) -> None:
    seen: list[Any] = []
    Simulation(even(60, 60.0), build.setting(missing_samples=1.0), scripted({0: 1}, seen)).result()
    assert all(list(sample.replicas.values()) == [None] for _, sample, _ in seen)
    assert all("no answer" in sample.errors["pod-1"] for _, sample, _ in seen)
    run = Simulation(build.load("step", rate=3.0), build.setting(missing_samples=1.0), headway()).result()
    assert {one.replicas for one in run.passes} == {1}
    assert "HoldingWithoutSamples" in {one.cause for one in run.passes}


def test_samples_are_as_old_as_the_delay_says(build: Any) -> None:
    seen: list[Any] = []
    Simulation(even(60, 60.0), build.setting(scrape_delay_seconds=2.0), scripted({0: 1}, seen)).result()
    assert {round(BEGIN_SECONDS + at - sample.taken_at, 6) for at, sample, _ in seen} == {2.0}


def test_samples_add_up_to_what_happened(build: Any) -> None:
    """Counters, exact counts and buckets of the last sample against the requests themselves."""
    seen: list[Any] = []
    trace = replace(even(90, 60.0, prompt=300), duration_seconds=90.0)
    run = Simulation(trace, build.setting(initial_replicas=2), scripted({0: 2}, seen)).result()
    samples = list(seen[-1][1].replicas.values())
    assert sum(one.counters["received"] for one in samples) == 90
    assert sum(one.counters["finished"] for one in samples) == 90
    assert sum(one.counters["generated_tokens"] for one in samples) == 90 * 20
    assert sum(sum(one.histograms["ttft"].counts) for one in samples) == 90
    total = sum(one.histograms["ttft"].sum_milliseconds for one in samples)
    assert total == pytest.approx(1000 * sum(one.ttft_seconds or 0.0 for one in run.flights))
    # Targets came with the first pass; until then nothing was judged.
    judged = sum(one.counters["ttft_met"] + one.counters["ttft_missed"] for one in samples)
    assert 80 <= judged <= 90
    assert seen[-1][1].gateways["http://gateway"].counters["finished"] == 90


def test_the_least_loaded_replica_takes_the_next_request(build: Any) -> None:
    seen: list[Any] = []
    Simulation(even(90, 60.0), build.setting(initial_replicas=3), scripted({0: 3}, seen)).result()
    received = [one.counters["received"] for one in seen[-1][1].replicas.values()]
    assert max(received) - min(received) <= 1


def test_a_new_replica_is_not_given_prompts_faster_than_it_computes_them(build: Any) -> None:
    """Four answer some fifteen each when the fifth one is ready; one could not compute all prompts."""
    load = even(1350, 75.0, prompt=500, output=100)
    seen: list[Any] = []
    setting = build.setting(cold_start_seconds=10.0, initial_replicas=4)
    run = Simulation(load, setting, scripted({0: 4, 30: 5}, seen)).result()
    before, joining = (
        [one.ttft_seconds or inf for one in run.flights if 0.0 <= one.arrived_at - start < 5.0]
        for start in (BEGIN_SECONDS + 33.0, BEGIN_SECONDS + 40.0)
    )
    samples = [sample for at, sample, _ in seen if 35.0 <= at < 40.0]
    assert min(sum(one.running for one in sample.replicas.values()) for sample in samples) >= 50
    assert max(joining) < 1.3 * max(before)


def conversations(build: Any) -> Trace:
    """Five users, each with a long beginning of its own, who ask in turn."""
    arrivals = tuple(
        Arrival(2.0 * i, 2100, 5, tuple(range(100 * (i % 5), 100 * (i % 5) + 4)), 512) for i in range(60)
    )
    return Trace("conversations", arrivals, 120.0)


def test_prefix_aware_routing_computes_each_beginning_once(build: Any) -> None:
    def cached(routing: Any) -> float:
        setting = build.setting(initial_replicas=3, routing=routing)
        run = Simulation(conversations(build), setting, scripted({0: 3})).result()
        assert fates(run) == {"finished": 60}
        return measures(run, _target(build), 1).cached_share

    # Of each user's twelve prompts of 2100 tokens all but the first find their 2048.
    assert cached("prefix-aware") == pytest.approx(55 * 2048 / (60 * 2100), abs=0.01)
    # The three replicas take turns, so that each computes each user's beginning.
    assert cached("least-loaded") == pytest.approx(45 * 2048 / (60 * 2100), abs=0.01)


def test_prefix_aware_routing_leaves_a_replica_that_is_far_ahead(build: Any) -> None:
    """All share one beginning, and come at once."""
    seen: list[Any] = []
    arrivals = tuple(Arrival(0.01 * i, 2048, 200, (1, 2, 3, 4), 512) for i in range(12))
    setting = build.setting(initial_replicas=3, routing="prefix-aware")
    run = Simulation(Trace("t", arrivals, 60.0), setting, scripted({0: 3}, seen)).result()
    assert fates(run) == {"finished": 12}
    received = [one.counters["received"] for one in seen[-1][1].replicas.values()]
    assert sorted(received) == [0, 3, 9]


def test_step_times_may_be_told_wrong_and_nothing_else_changes(build: Any) -> None:
    def last_sample(error: float) -> Any:
        seen: list[Any] = []
        setting = build.setting(initial_replicas=2, step_time_error=error)
        Simulation(even(90, 60.0, prompt=300), setting, scripted({0: 2}, seen)).result()
        return list(seen[-1][1].replicas.values())

    for right, wrong in zip(last_sample(1.0), last_sample(2.0), strict=True):
        assert wrong.counters == right.counters
        told, true = wrong.histograms["step"], right.histograms["step"]
        assert told.sum_milliseconds == pytest.approx(2 * true.sum_milliseconds)
        assert sum(told.counts) == sum(true.counts)
        total = right.moments.decode_steps
        assert wrong.moments.decode_steps[:10] == total[:10]
        assert wrong.moments.decode_steps[10:14] == pytest.approx([2 * one for one in total[10:14]])
        assert wrong.moments.decode_steps[14] == pytest.approx(4 * total[14])
        assert wrong.histograms["tpot"] == right.histograms["tpot"]
        (num_told, told_milliseconds), (num_true, true_milliseconds) = wrong.moments.gaps, right.moments.gaps
        assert num_told == num_true > 0
        assert told_milliseconds == pytest.approx(2 * true_milliseconds)


def test_limits_are_patched_into_replicas_and_into_those_that_come_later(build: Any) -> None:
    seen: list[Any] = []
    wanted = Limits(4, 256)
    Simulation(even(60, 80.0), build.setting(), scripted({0: 1, 20: 2}, seen, wanted)).result()
    last = seen[-1][1].replicas
    assert len(last) == 2
    assert {one.limits for one in last.values()} == {wanted}
    assert {one.targets.ttft_milliseconds for one in last.values()} == {1000.0}
    assert next(iter(seen[0][1].replicas.values())).limits == Limits(32, 1024)


def test_the_load_may_end_before_the_last_answer(build: Any) -> None:
    trace = Trace("t", (Arrival(0.0, 10, 3000),), 1.0)
    run = Simulation(trace, build.setting(), None).result()
    assert fates(run) == {"finished": 1}
    assert measures(run, _target(build), 1).replica_hours == pytest.approx(1 / 3600)


def test_what_does_not_end_in_the_time_of_grace_is_unfinished(build: Any) -> None:
    trace = Trace("t", tuple(Arrival(0.0, 10, 12_000) for _ in range(90)), 1.0)
    run = Simulation(trace, build.setting(), None).result()
    assert fates(run)["unfinished"] > 0


def test_replicas_of_a_schedule_are_ready_as_it_begins_and_leave_one_by_one_after_it(build: Any) -> None:
    """The load begins at midnight of a day in UTC; one replica carries it."""
    schedule = [{"start": "5 0 * * *", "end": "10 0 * * *", "minReplicas": 4}]
    setting = build.setting(cold_start_seconds=40.0, initial_replicas=1)
    scaling = {"minReplicas": 1, "maxReplicas": 6, "stabilizationSeconds": 60, "schedule": schedule}
    spec = setting.service.spec.model_copy(update={"scaling": Scaling.model_validate(scaling)})
    setting = replace(setting, service=replace(setting.service, spec=spec))
    run = Simulation(build.load(rate=0.5, seconds=1500.0), setting, headway()).result()
    wanted = [(one.at - BEGIN_SECONDS, one.replicas) for one in run.passes]
    ready = [(one.at - BEGIN_SECONDS, one.num_ready) for one in run.passes]
    assert {count for at, count in wanted if at < 255} == {1}
    assert {count for at, count in wanted if 266 <= at < 600} == {4}
    assert min(count for at, count in ready if 311 <= at < 600) == 4
    assert wanted[-1][1] == 1
    assert all(before - after <= 1 for (_, before), (_, after) in pairwise(wanted))


def test_a_run_ends_with_the_miss_that_is_one_too_many(build: Any) -> None:
    """Thirty requests a second are far more than one replica serves. The first 20 do not count."""
    trace = build.load("poisson", rate=30.0, seconds=60.0)
    setting = build.setting(initial_replicas=1)
    whole = Simulation(trace, setting, None).result()
    missed = [number for number, one in enumerate(whole.flights) if not one.meets(1000.0, None)]
    assert len(missed) > 40
    allowance = Allowance(20, 1000.0, None, 10)
    run = Simulation(trace, setting, None).result(allowance=allowance)
    assert allowance.is_spent
    ended = [one for one in run.flights[20:] if one.fate == "finished" and not one.meets(1000.0, None)]
    assert len(ended) == 11
    assert sum(one.fate == "unfinished" for one in run.flights) > len(trace.arrivals) / 4
    enough = Allowance(20, 1000.0, None, len(missed))
    assert Simulation(trace, setting, None).result(allowance=enough).flights == whole.flights
    assert not enough.is_spent
