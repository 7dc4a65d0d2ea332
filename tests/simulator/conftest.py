"""Builders: a small replica, a service, loads, and the shipped controller watched while it acts."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from headway_operator.samples import Sample
from headway_operator.slo import Memory, Target, decide, resume, sizing
from headway_operator.slo.pace import AS_TOLD
from headway_operator.spec import Service, parse
from headway_operator.state import Decision, Observed
from headway_runtime.config import Limits
from headway_runtime.fit.plan_command import main as plan_main
from headway_simulator import generators
from headway_simulator.cluster import BEGIN_SECONDS, Conditions, Setting, Simulation
from headway_simulator.control import Controller
from headway_simulator.engine import EngineSettings
from headway_simulator.rates import Lengths, RateWindow, arrivals_of
from headway_simulator.records import Run
from headway_simulator.simulate_command import main
from headway_simulator.step_model import StepModel, slower
from headway_simulator.trace import Arrival, Trace

SMALL = StepModel(
    name="small",
    base_milliseconds=10.0,
    prefill_token_milliseconds=0.1,
    prefill_context_milliseconds=1e-5,
    decode_milliseconds=1.0,
    decode_context_milliseconds=1e-4,
    kv_cache_tokens=64_000,
)
# Keeps a quarter of its requests per second, at four times its latencies: long courses of few requests.
SLOW = slower(SMALL, 4.0)


def build_service(
    scaling: dict[str, Any] | None = None, batching: dict[str, Any] | None = None, **slo: Any
) -> Service:
    """TTFT 1 s and TPOT 60 ms at P95, one to six replicas, soon let go."""
    return parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"source": "/model"},
                "slo": {"ttftMilliseconds": 1000, "tpotMilliseconds": 60, "percentile": 95, **slo},
                "scaling": {
                    "minReplicas": 1,
                    "maxReplicas": 6,
                    "stabilizationSeconds": 60,
                    **(scaling or {}),
                },
                "batching": {
                    "maxNumSeqs": {"max": 32},
                    "maxNumBatchedTokens": {"max": 1024},
                    **(batching or {}),
                },
            },
        }
    )


def build_engine(**changes: Any) -> EngineSettings:
    settings = EngineSettings(model=SMALL, max_model_len=16_384, limits=Limits(32, 1024))
    return replace(settings, **changes)


def build_setting(*, engine: dict[str, Any] | None = None, **conditions: Any) -> Setting:
    """A cold start of 20 s; `conditions` change the rest."""
    return Setting(
        build_service(),
        build_engine(**(engine or {})),
        Conditions(**{"cold_start_seconds": 20.0, **conditions}),
    )


def build_slow(
    *,
    scaling: dict[str, Any] | None = None,
    batching: dict[str, Any] | None = None,
    slo: dict[str, int] | None = None,
    model: StepModel = SLOW,
    **conditions: Any,
) -> Setting:
    """A SLOW replica that is promised four times the latencies, up to sixteen of it, and ready after 20 s."""
    service = build_service(
        {"maxReplicas": 16, **(scaling or {})},
        batching,
        **{"ttftMilliseconds": 4000, "tpotMilliseconds": 240, **(slo or {})},
    )
    limits = Limits(*service.spec.initial_limits)
    engine = EngineSettings(model=model, max_model_len=3072, limits=limits)
    return Setting(service, engine, Conditions(**{"cold_start_seconds": 20.0, **conditions}))


def build_steps(*parts: tuple[float, float], prompt: int = 400, output: int = 50, seed: int = 1) -> Trace:
    """Poisson arrivals of requests of one size. parts: (seconds, requests per second), one after another."""
    ends = [*accumulate(seconds for seconds, _ in parts)]
    windows = [RateWindow(end - seconds, end, rate) for end, (seconds, rate) in zip(ends, parts, strict=True)]
    sizes = Trace("sizes", (Arrival(0.0, prompt, output),), 1.0)
    return arrivals_of("course", windows, Lengths(sizes), seed)


class Shown(NamedTuple):
    """What the controller is given in one pass; `at`: seconds since the load began."""

    at: float
    target: Target
    memory: Memory
    sample: Sample
    observed: Observed


def unchanged(shown: Shown) -> Shown:
    return shown


def telling_steps(factor: float) -> Callable[[Shown], Shown]:
    """Replicas whose steps are told so many times as long as they are, and the rest as it is."""

    def told(sums: tuple[float, ...]) -> tuple[float, ...]:
        return (*sums[:10], *(factor * one for one in sums[10:14]), factor**2 * sums[14])

    def change(shown: Shown) -> Shown:
        replicas = {
            name: one
            and replace(
                one,
                moments=one.moments
                and replace(
                    one.moments,
                    decode_steps=told(one.moments.decode_steps),
                    prompt_steps=told(one.moments.prompt_steps),
                ),
            )
            for name, one in shown.sample.replicas.items()
        }
        return shown._replace(sample=replace(shown.sample, replicas=replicas))

    return change


@dataclass
class Course:
    """One simulation of the shipped controller, with everything that it decided and remembered.

    change: what the controller is shown instead of what there is; a fault, or another writer.
    """

    trace: Trace
    setting: Setting
    change: Callable[[Shown], Shown] = unchanged
    decisions: list[Decision] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def __post_init__(self) -> None:
        controller = Controller("headway", lambda sample, now: resume(None, sample, now), self._decide)
        self.simulation = Simulation(self.trace, self.setting, controller)

    def run(self) -> Run:
        return self.simulation.result()

    def _decide(
        self, target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        shown = self.change(Shown(now - BEGIN_SECONDS, target, memory, sample, observed))
        decision, memory = decide(shown.target, shown.memory, shown.sample, shown.observed, now)
        self.decisions.append(decision)
        self.memories.append(memory)
        return decision, memory

    def moves(self) -> list[tuple[int, int, int]]:
        """(seconds since the load began, replicas before, replicas after) of each change of their number."""
        return [
            (round(after.at - BEGIN_SECONDS), before.replicas, after.replicas)
            for before, after in pairwise(self.decisions)
            if after.replicas != before.replicas
        ]

    def between(self, start: float, end: float) -> list[Decision]:
        """What was decided in [start, end) of the load."""
        return [one for one in self.decisions if start <= one.at - BEGIN_SECONDS < end]


def build_load(kind: Any = "poisson", rate: float = 2.0, seconds: float = 300.0, seed: int = 1) -> Trace:
    return generators.generated(generators.Course(kind, rate, seconds, factor=5.0), Lengths(SHORT), seed)


SHORT = Trace(
    "short",
    tuple(Arrival(float(i), 50 + 37 * i % 900, 5 + 13 * i % 120) for i in range(50)),
    50.0,
)


@pytest.fixture
def build() -> SimpleNamespace:
    return SimpleNamespace(
        model=SMALL,
        service=build_service,
        engine=build_engine,
        setting=build_setting,
        load=build_load,
        slow_model=SLOW,
        slow=build_slow,
        steps=build_steps,
        course=Course,
        telling_steps=telling_steps,
    )


MODEL = Path(__file__).parents[1] / "fit" / "fixtures" / "llama-3.1-8b"
ROW = {"at_seconds": 0.0, "prompt_tokens": 300, "output_tokens": 40}


@pytest.fixture
def only_steps_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing puts right what replicas tell of their steps, as where guesses make most of the tokens."""
    monkeypatch.setattr(sizing, "pace", lambda happened, now, before: AS_TOLD)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two minutes, a request each half second."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({**ROW, "at_seconds": i / 2}) + "\n" for i in range(240)))
    return path


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The report of a run with these flags."""

    def run(*flags: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert main([*map(str, flags), "--quiet", "--json", str(out)]) == 0
        report: dict[str, Any] = json.loads(out.read_text())
        return report

    return run


@pytest.fixture
def minute(tmp_path: Path) -> Path:
    """A trace of a minute, a request each second."""
    path = tmp_path / "minute.jsonl"
    row = {"prompt_tokens": 500, "output_tokens": 20}
    path.write_text("".join(json.dumps({**row, "at_seconds": i}) + "\n" for i in range(60)))
    return path


@pytest.fixture
def plan(minute: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What `headway plan` says over that minute with these flags."""

    def run(*flags: str) -> dict[str, Any]:
        fixed = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "8192", "--trace", str(minute)]
        assert plan_main([*fixed, *flags, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run
