"""What an operator says about itself: its health, and its metrics."""

import socket
from typing import Any

import aiohttp
from prometheus_client import generate_latest

from headway_operator.errors import ClusterError
from headway_operator.health import Health, serving
from headway_operator.names import ServiceKey
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Outcome, Problem


async def test_health_turns_bad_when_passes_stop_coming_to_the_one_that_leads() -> None:
    state = {"health": Health(True, 1, 3.0, 120.0)}
    metrics = OperatorMetrics()
    metrics.failed(ServiceKey("default", "demo"), ClusterError.__name__, 0.5)
    ports = [_free_port(), _free_port()]
    async with serving(
        lambda: state["health"],
        metrics.registry,
        host="127.0.0.1",
        health_port=ports[0],
        metrics_port=ports[1],
    ):
        async with aiohttp.ClientSession() as session:

            async def status() -> int:
                async with session.get(f"http://127.0.0.1:{ports[0]}/healthz") as response:
                    assert (await response.json())["limit_seconds"] == 120.0
                    return response.status

            assert await status() == 200
            state["health"] = Health(True, 1, 121.0, 120.0)
            assert await status() == 503
            state["health"] = Health(True, 1, 3.0, 120.0, watch_lag_seconds=121.0)
            assert await status() == 503
            state["health"] = Health(True, 1, 3.0, 120.0, task_failing_seconds=121.0)
            assert await status() == 503
            state["health"] = Health(False, 1, 121.0, 120.0)
            assert await status() == 200
            async with session.get(f"http://127.0.0.1:{ports[1]}/metrics") as response:
                assert 'reason="ClusterError"' in await response.text()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_pass_is_measured(key: ServiceKey) -> None:
    metrics = OperatorMetrics()
    metrics.passed(Outcome(key, {}), 0.25)
    page = generate_latest(metrics.registry).decode()
    assert 'headway_operator_reconcile_seconds_sum{result="success"} 0.25' in page
    metrics.forget(key)  # one that never decided anything is forgotten as well


def test_a_service_that_is_gone_leaves_no_series(key: ServiceKey) -> None:
    metrics = OperatorMetrics()
    before = generate_latest(metrics.registry).decode()
    starts = {"recent": [{"replica": "a", "readyAt": "2027-01-15T07:59:55Z", "totalSeconds": 32.0}]}
    metrics.passed(Outcome(key, {}), 0.25)
    metrics.passed(
        Outcome(key, {"startup": starts}, problems=[Problem("apply Service demo", "no", "ConflictError")]),
        0.25,
    )
    metrics.failed(key, "ClusterError", 0.25)
    page = generate_latest(metrics.registry).decode()
    assert 'headway_operator_latest_start_seconds{name="demo",namespace="default",stage="total"} 32.0' in page
    assert 'headway_operator_start_seconds_sum{stage="total"} 32.0' in page
    assert 'headway_operator_reconcile_seconds_count{result="problems"} 1.0' in page
    metrics.forget(key)
    assert 'name="demo"' in page
    assert 'name="demo"' not in generate_latest(metrics.registry).decode()
    assert 'name="demo"' not in before


def test_starts_are_counted_once_each_and_not_those_of_another_operators_time(key: ServiceKey) -> None:
    def start(name: str, second: int) -> dict[str, Any]:
        return {"replica": name, "readyAt": f"2027-01-15T07:59:{second:02}Z", "totalSeconds": 10.0}

    def count(metrics: OperatorMetrics) -> float:
        page = generate_latest(metrics.registry).decode()
        lines = [
            line for line in page.splitlines() if line.startswith("headway_operator_start_seconds_count")
        ]
        return float(lines[0].split()[-1]) if lines else 0.0

    metrics = OperatorMetrics()
    recent = [start("b", 20), start("a", 10)]
    for _ in range(2):  # found there at the beginning
        metrics.passed(Outcome(key, {"startup": {"recent": recent}}), 0.1)
    assert count(metrics) == 0
    recent = [start("d", 40), start("c", 30), *recent]
    for _ in range(2):
        metrics.passed(Outcome(key, {"startup": {"recent": recent}}), 0.1)
    assert count(metrics) == 2
