"""Long rows end when the time does, and say how far they came."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import engine_stage, engines, peers
from benchmarks.gpu.cases.case import Case, Work
from benchmarks.gpu.costs import Cost
from benchmarks.gpu.engine_plan import SMOKE
from benchmarks.gpu.kernels_stage import checked_row
from benchmarks.gpu.report import Report, TimeUp


class Clock:
    """Goes on by what is done; `check` raises from `until` on."""

    def __init__(self, until: float = 1e9) -> None:
        self.now, self.until = 0.0, until

    def __call__(self) -> float:
        return self.now

    def check(self) -> None:
        if self.now >= self.until:
            raise TimeUp


def make_case(name: str, clock: Clock, error: float) -> Case:
    """Whose check takes 10 seconds."""

    def run() -> torch.Tensor:
        clock.now += 10
        return torch.tensor([1.0 + error])

    return Case(name, "norm", None, lambda _: Work(run, lambda: torch.ones(1)), Cost(1.0), tolerance=0.1)


def test_checks_of_a_kernel_end_between_two_and_say_how_many_are_left(tmp_path: Path) -> None:
    clock = Clock()
    report = Report(tmp_path / "results.json", {}, 25.0, clock)
    cases = [make_case(name, clock, error) for name, error in (("a", 0.01), ("b", 0.5), ("c", 0), ("d", 0))]

    row = report.row("checks", "kernel norm", lambda: checked_row(cases, "cpu", report.check_time))

    assert row is not None
    assert (row["num_checks"], row["num_left"], row["is_unfinished"]) == (3, 1, True)
    assert set(row["wrong"]) == {"b"}
    assert row["worst"] == "b"
    assert not report.is_right


def test_each_check_is_told_as_it_is_made() -> None:
    clock = Clock()

    def fail(_: torch.Generator) -> Work:
        raise RuntimeError("out of resources")

    cases = [make_case("a", clock, 0.05), Case("b", "norm", None, fail, Cost(1.0)), make_case("c", clock, 0)]

    parts = list(checked_row(cases, "cpu", clock.check))

    assert [(part["num_checks"], part["num_left"], part["is_right"]) for part in parts] == [
        (1, 2, True),
        (2, 1, False),
        (3, 0, False),
    ]
    assert parts[-1]["worst_share_of_tolerance"] == pytest.approx(0.5, rel=1e-4)
    assert parts[-1]["wrong"] == {"b": "RuntimeError: out of resources"}


class FakeEngine:
    """Each step takes a second and gives every request a token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.left: dict[str, int] = {}
        self.closed = False
        self.idle_work = 0

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    @property
    def has_idle_work(self) -> bool:
        return self.idle_work > 0

    def work_idly(self) -> None:
        self._clock.now += 1
        self.idle_work -= 1

    def add_request(self, request: Any, now: float) -> None:
        self.left[request.request_id] = request.sampling.max_tokens

    def step(self, now: float) -> Any:
        self._clock.now += 1
        outputs = [SimpleNamespace(request_id=name, token_ids=(1,)) for name in self.left]
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return SimpleNamespace(outputs=outputs, num_decodes=len(outputs))

    def abort(self, request_id: str, now: float) -> bool:
        return self.left.pop(request_id, None) is not None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Any]:
    def make(clock: Clock) -> Any:
        times = SimpleNamespace(perf_counter=clock, monotonic=clock)
        monkeypatch.setattr("benchmarks.gpu.engine_stage.time", times)
        return FakeEngine(clock)

    return make


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        pytest.param(1000.0, (20.0, True), id="to the end"),
        pytest.param(12.0, (12.0, False), id="cut"),
    ],
)
def test_a_load_ends_with_the_time_and_is_told_of_meanwhile(
    seconds: float, want: tuple[float, bool], make_engine: Callable[[Clock], Any]
) -> None:
    engine = make_engine(Clock())
    plan = replace(SMOKE, load=(3, 8, 20), load_seconds=90.0)

    parts = list(engine_stage.serve_load(engine, plan, lambda: seconds))

    assert (parts[-1]["seconds_run"], parts[-1]["is_whole"]) == want
    assert parts[-1]["output_tokens_per_second"] == pytest.approx(3.0)
    assert [part["seconds_run"] for part in parts[:2]] == [6.0, 11.0]
    assert not engine.has_work


def test_what_steps_to_the_end_stops_when_the_time_is_up(make_engine: Callable[[Clock], Any]) -> None:
    clock = Clock(until=5.0)
    engine = make_engine(clock)
    engines.add(engine, "a", [1, 2], 100)

    with pytest.raises(TimeUp):
        engines.drain(engine, clock.check)
    assert clock.now == 5.0


def test_recording_at_the_start_stops_when_the_time_is_up(
    make_engine: Callable[[Clock], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(until=3.0)
    engine = make_engine(clock)
    engine.idle_work = 10
    monkeypatch.setattr(engines, "EngineCore", lambda config, metrics: engine)

    with pytest.raises(TimeUp):
        engines.make_engine(
            tmp_path, "cpu", max_model_len=64, max_num_seqs=2, max_batched_tokens=32, check_time=clock.check
        )
    assert (clock.now, engine.closed) == (3.0, True)


def test_generate_is_not_called_again_when_the_time_is_up() -> None:
    clock = Clock(until=10.0)
    calls = []

    def generate(*_: object, max_new_tokens: int, **options: object) -> None:
        calls.append(max_new_tokens)
        clock.now += 6

    model = SimpleNamespace(generate=generate)
    with pytest.raises(TimeUp):
        peers._generate(model, SMOKE, 1, "cpu", clock.check)
    assert calls == [1, SMOKE.steps + 1]
