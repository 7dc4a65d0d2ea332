"""What `make bench-live` computes beside its cluster: the load, the verdict, the formula, the page."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.live import page, run
from benchmarks.live.excerpt import Shape, excerpt, write
from benchmarks.live.outcome import outcome_of
from benchmarks.live.policies import FIXED, HEADWAY, WAITING, WaitingScaler, manifest, rounded_mean, scaling
from benchmarks.live.watch import Moment, Watch

from headway_bench import report as bench_report
from headway_bench.record import Record
from headway_bench.traces import read_trace
from headway_operator.errors import UnavailableError
from headway_operator.plan import plan
from headway_operator.samples import Limits, Sample, Targets
from headway_operator.slo import Memory, Target, decide, resume, target_of
from headway_operator.spec import parse
from headway_operator.state import Decision, Observed
from headway_runtime.config import Limits as EngineLimits
from headway_simulator.baselines.horizontal import SYNC_SECONDS
from headway_simulator.cluster import BEGIN_SECONDS, Conditions, Setting, Simulation
from headway_simulator.control import Controller, rendered
from headway_simulator.engine import EngineSettings
from headway_simulator.step_model import PROFILES
from headway_simulator.trace import Arrival, Trace

SHAPE = Shape(None, 0.0, 600.0, 4.0, 0.2, 500, 1)
OPTIONS = run.parser().parse_args([])


def test_the_wave_is_what_it_says() -> None:
    trace = excerpt(SHAPE)
    assert trace.duration_seconds == 150
    middle = sum(50 <= one.at_seconds < 100 for one in trace.arrivals)
    assert middle > 1.3 * (len(trace.arrivals) - middle) / 2
    assert max(one.prompt_tokens for one in trace.arrivals) <= 500
    again = excerpt(SHAPE, 2.5)
    assert len(again.arrivals) == pytest.approx(2.5 * len(trace.arrivals), rel=0.02)
    middle = sum(50 <= one.at_seconds < 100 for one in again.arrivals)
    assert middle > 1.3 * (len(again.arrivals) - middle) / 2, "copies stay near, in time of the trace"


def test_an_excerpt_of_a_trace_is_cut_sped_up_and_shortened(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:{second:02},{100 * second},{10 * second}" for second in range(1, 60)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    trace = excerpt(replace(SHAPE, trace=file, start_seconds=10.0, seconds=20.0, speed=2.0))
    assert trace.duration_seconds == 10
    # Times of a trace begin with its first row, here at second 1.
    assert [one.prompt_tokens for one in trace.arrivals] == [
        min(500, 20 * second) for second in range(11, 31)
    ]
    assert trace.arrivals[4].at_seconds == pytest.approx(2.0)
    out = tmp_path / "trace.jsonl"
    write(trace, out)
    read = read_trace(out)
    assert [one.output_tokens for one in read.requests] == [one.output_tokens for one in trace.arrivals]
    assert read.requests[4].at_seconds - read.requests[0].at_seconds == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [(700.0, 100.0)])
def test_an_excerpt_without_requests_is_refused(tmp_path: Path, seconds: tuple[float, float]) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,5\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no request arrives in the 100 s from 700 on"):
        excerpt(replace(SHAPE, trace=file, start_seconds=seconds[0], seconds=seconds[1]))


def request(due: float, first: float | None, per_token: float = 10.0, tokens: int = 11) -> dict[str, Any]:
    """As `headway bench` writes it; times in milliseconds, `first` None for one that fails."""
    times = [] if first is None else [due + first, due + first + per_token * (tokens - 1)]
    record = Record(
        0, 0, is_warmup=False, due_at=due / 1000, input_tokens_wanted=9, output_tokens_wanted=tokens
    )
    record.token_times.extend(one / 1000 for one in times)
    record.token_counts.extend([1, tokens - 1] if times else [])
    record.failure = "" if times else "status"
    return bench_report._request(record, 0.0)


def test_who_fails_or_is_late_has_missed() -> None:
    requests = [
        *(request(100.0 * number, 50.0) for number in range(6)),
        request(20_000, 600.0),
        request(20_100, 50.0, per_token=70.0),
        request(20_200, None),
        {**request(20_300, 50.0), "event_times": [20_350.0], "event_tokens": [1]},
        {**request(0, 5000.0), "is_warmup": True},
    ]
    found = outcome_of({"requests": requests}, 500.0, 60.0)
    assert (found.num_requests, found.num_failed) == (10, 1)
    assert (found.joint, found.ttft, found.tpot) == (0.7, 0.8, 0.8)
    assert found.worst == 0.25
    assert (found.p95_ttft, found.p95_tpot) == (600.0, 70.0)


def test_the_formula_goes_up_at_once_and_down_after_its_time() -> None:
    scaler = WaitingScaler(waiting=2.0, most_replicas=6)
    assert scaler.decide(9, 1, 0.0) == 5
    assert scaler.decide(40, 5, 15.0) == 6, "no more than there may be"
    assert scaler.decide(0, 6, 30.0) == 6
    assert scaler.decide(0, 6, 314.0) == 6
    assert scaler.decide(0, 6, 316.0) == 1, "what was wanted 300 s ago counts no more"


async def test_the_loop_reads_decides_and_writes() -> None:
    replicas, written = 1, []

    async def read() -> tuple[int, int]:
        return 3 * replicas, replicas

    async def write_scale(number: int) -> None:
        nonlocal replicas
        replicas = number
        written.append(number)

    async with scaling(WaitingScaler(1.0, 8), SYNC_SECONDS / 0.01, read, write_scale):
        async with asyncio.timeout(10):
            while replicas < 8:  # noqa: ASYNC110 - what it does is what is looked at
                await asyncio.sleep(0.005)
    assert written == sorted({*written})
    assert written[0] == 3


async def test_a_loop_that_fails_says_so() -> None:
    async def read() -> tuple[int, int]:
        raise ValueError("no such service")

    async def write_scale(number: int) -> None:
        raise AssertionError(number)

    with pytest.raises(ValueError, match="no such service"):
        async with scaling(WaitingScaler(1.0, 8), 1000.0, read, write_scale):
            await asyncio.sleep(0.05)


def test_waiting_requests_of_both_kinds_of_pages_are_added_up() -> None:
    text = (
        "# HELP headway_requests_waiting x\nheadway_requests_waiting 3.0\nheadway_requests_waiting_total 9\n"
        'headway_gateway_waiting{pool="a"} 2.0\n'
    )
    assert run.waiting_on(text) == 5


@pytest.mark.parametrize("policy", [HEADWAY, FIXED, WAITING])
def test_each_service_is_one_that_the_operator_takes(policy: str) -> None:
    wanted = manifest(policy, run.setting_of(OPTIONS), 3, on_this_machine=False)
    service = parse(wanted)
    assert service.spec.replicas == (None if policy == HEADWAY else 3)
    assert service.spec.batching.max_num_seqs.initial == OPTIONS.max_num_seqs


def test_services_differ_in_what_their_scaler_moves_alone() -> None:
    setting = run.setting_of(OPTIONS)
    headway, fixed, waiting = (
        manifest(policy, setting, 3, on_this_machine=False) for policy in (HEADWAY, FIXED, WAITING)
    )
    assert fixed == waiting
    assert headway["spec"]["slo"]["ttftMilliseconds"] == OPTIONS.ttft
    del headway["spec"]["scaling"], fixed["spec"]["replicas"]
    for one in (headway, fixed):
        for limits in one["spec"]["batching"].values():
            del limits["min"]
    assert headway == fixed


def test_the_operator_leaves_a_service_with_another_scaler_alone() -> None:
    """Far too many requests, with the operator's own decisions and plans; what is written later is obeyed."""
    setting = run.setting_of(OPTIONS)
    service = parse(manifest(WAITING, setting, 2, on_this_machine=False))
    written, limits = 2, Limits(setting.max_num_seqs, setting.max_num_batched_tokens)
    told: set[Targets] = set()
    decided: list[Decision] = []

    def watched(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        nonlocal written
        told.update(one.targets for one in sample.replicas.values() if one is not None)
        # As `/scale` would, in the middle.
        written = 2 if now < BEGIN_SECONDS + 60 else 4
        spec = service.spec.model_copy(update={"replicas": written})
        decision, memory = decide(target_of(spec), memory, sample, observed, now)
        decided.append(decision)
        wanted = plan(replace(service, spec=spec), rendered(service), observed, sample, decision)
        assert set(wanted.scale.values()) <= {written}
        assert decision.replicas == written
        return decision, memory

    trace = Trace("crowd", tuple(Arrival(index / 20, 400, 40) for index in range(2400)), 120.0)
    engine = EngineSettings(
        PROFILES["llama-2-70b-h100-tp8"], 1536, EngineLimits(*service.spec.initial_limits)
    )
    conditions = Conditions(initial_replicas=2)
    controller = Controller(WAITING, lambda sample, now: resume(None, sample, now), watched)
    Simulation(trace, Setting(service, engine, conditions), controller).result()
    assert {one.limits for one in decided} == {limits}
    assert any(one.ttft.verdict == "violated" for one in decided)
    assert Targets(float(setting.ttft), float(setting.tpot)) in told, "replicas know what is late"


def moment(at: float, pods: int, wanted: int, seqs: int = 8) -> Moment:
    return Moment(at, pods, pods, wanted, seqs, 512, "", "")


def test_pods_cost_while_they_are_there() -> None:
    watch = Watch([moment(0, 1, 1), moment(10, 2, 3), moment(20, 3, 3), moment(30, 3, 2), moment(40, 2, 3)])
    assert watch.pod_seconds(0, 50) == 10 + 20 + 30 + 30 + 20
    assert watch.pod_seconds(5, 15) == 5 + 10
    assert [one.at_seconds for one in watch.changes()] == [0, 10, 30, 40]
    assert watch.reversals() == 2


def test_a_fixed_number_costs_about_as_much() -> None:
    assert [rounded_mean(seconds, 100, 4) for seconds in (40, 149, 150, 900)] == [1, 1, 2, 4]


async def test_a_sync_that_nothing_can_be_read_in_changes_nothing_and_the_next_one_comes() -> None:
    written, num_reads = [], 0

    async def read() -> tuple[int, int]:
        nonlocal num_reads
        num_reads += 1
        if num_reads < 3:
            raise UnavailableError("GET pods: no answer") if num_reads == 1 else TimeoutError
        return 4, 1

    async def write_scale(number: int) -> None:
        written.append(number)

    async with scaling(WaitingScaler(1.0, 8), SYNC_SECONDS / 0.01, read, write_scale):
        async with asyncio.timeout(10):
            while not written:  # noqa: ASYNC110 - what it does is what is looked at
                await asyncio.sleep(0.005)
    assert written[0] == 4


def test_each_round_begins_with_another() -> None:
    found = run.turns(3)
    assert found[:3] == [(HEADWAY, 1), (FIXED, 1), (WAITING, 1)]
    assert [policy for policy, _ in found[::3]] == [HEADWAY, FIXED, WAITING]
    assert all(
        sorted(policy for policy, one in found if one == number) == sorted([HEADWAY, FIXED, WAITING])
        for number in (1, 2, 3)
    )


def test_the_page_names_every_run() -> None:
    outcome = outcome_of({"requests": [request(0, 50.0), request(1, 900.0)]}, 500, 60)
    runs = [
        run.Run(policy, 1, 2, outcome, 151.0, 300.0, 2.0, 3, 1, ["    0 s: 1 wanted"])
        for policy in (HEADWAY, FIXED, WAITING)
    ]
    results = {
        "trace": "azure.csv",
        "shape": asdict(SHAPE),
        "setting": asdict(run.setting_of(OPTIONS)),
        "capacity": 10.0,
        "requests_per_second": 18.0,
        "load": 0.45,
        "interval_seconds": 1.25,
        "runs": [asdict(one) for one in runs],
        "conditions": page.conditions(0.5),
    }
    text = page.render(json.loads(json.dumps(results)))
    assert "| fixed, 2 | 1 | 2 | 0 | 50.0% |" in text
    assert text.count("\n| ") == 10, "two heads with their rules, three runs, three medians"
    assert "    0 s: 1 wanted" in text


def test_it_wants_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_E2E_OPERATOR_IMAGE", raising=False)
    with pytest.raises(SystemExit, match="make bench-live"):
        run.main([])
