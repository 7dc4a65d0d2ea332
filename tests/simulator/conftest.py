"""Builders: a small replica, a service, loads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headway_operator.spec import Service, parse
from headway_runtime.config import Limits
from headway_simulator.cluster import Conditions, Setting
from headway_simulator.engine import EngineSettings
from headway_simulator.generators import Course, generated
from headway_simulator.rates import Lengths
from headway_simulator.step_model import StepModel
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


def build_service(**slo: Any) -> Service:
    """TTFT 1 s and TPOT 60 ms at P95, one to six replicas, soon let go."""
    return parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"source": "/model"},
                "slo": {"ttftMilliseconds": 1000, "tpotMilliseconds": 60, "percentile": 95, **slo},
                "scaling": {"minReplicas": 1, "maxReplicas": 6, "stabilizationSeconds": 60},
                "batching": {"maxNumSeqs": {"max": 32}, "maxNumBatchedTokens": {"max": 1024}},
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


def build_load(kind: Any = "poisson", rate: float = 2.0, seconds: float = 300.0, seed: int = 1) -> Trace:
    return generated(Course(kind, rate, seconds, factor=5.0), Lengths(SHORT), seed)


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
    )
