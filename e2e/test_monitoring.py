"""What chart and operator give to Prometheus and Grafana, in a real Prometheus that scrapes real pods.

Every query of the dashboard returns data, those on trouble included, which the test makes: a promise that
cannot be kept, requests that are refused, a child that cannot be made.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.disruption import becomes_ready, fixed_service, patch, under_load
from e2e.installation import CHART, SYSTEM_NAMESPACE
from e2e.kubernetes import Kubernetes, eventually
from e2e.observed_service import NAME, NAMESPACE, SERVICE_LABEL, condition
from e2e.prometheus import Prometheus, running_prometheus

TROUBLED = "troubled"
DASHBOARD = CHART / "dashboards" / "headway.json"
NUM_PODS = 5  # two replicas, two gateways, the operator
RATE_INTERVAL = "30s"
ALERTS = {
    *("HeadwayReplicaShortage", "HeadwayTailLatency", "HeadwayOperatorErrors", "HeadwayOperatorDown"),
    *("HeadwayModelCacheStalled", "HeadwayNoOperatorLeads", "HeadwaySpecRefused", "HeadwayRolloutGivenUp"),
}
# Of a service whose children somebody else has: it fails for as long as it is there.
QUERIES_ON_TROUBLE = {("Decisions and failures", "headway_operator_reconcile_errors_total")}

pytestmark = pytest.mark.timeout(300)


def queries() -> list[tuple[str, str]]:
    """Title of the panel and query, of every panel."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def filled(title: str, expression: str) -> str:
    is_on_trouble = any(title == panel and metric in expression for panel, metric in QUERIES_ON_TROUBLE)
    return (
        expression.replace("$__rate_interval", RATE_INTERVAL)
        .replace("$namespace", NAMESPACE)
        .replace("$service", TROUBLED if is_on_trouble else NAME)
    )


@pytest.fixture(scope="module")
def services(installed: Kubernetes) -> None:
    """One whose promise cannot be kept, and one whose Service has another owner."""
    if not installed.has_pod_network:
        pytest.skip("Prometheus runs on this machine, which does not reach the pods")
    promising = fixed_service(installed, replicas=2, gateways=1)
    promising["spec"]["slo"] = {"ttftMilliseconds": 1, "tpotMilliseconds": 1000}
    taken = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": TROUBLED, "namespace": NAMESPACE},
        "spec": {"ports": [{"port": 80}]},
    }
    troubled = fixed_service(installed, replicas=0, gateways=1)
    troubled["metadata"]["name"] = TROUBLED
    installed.apply(promising, taken, troubled)
    installed.kubectl("wait", "--for=create", f"service/{NAME}", f"--namespace={NAMESPACE}", "--timeout=50s")


@pytest.fixture
async def prometheus(
    installed: Kubernetes, services: None, url: str, tmp_path: Path
) -> AsyncIterator[Prometheus]:
    """With some seconds of load in it, and a request that is refused now and then."""
    await becomes_ready(installed, 2)
    patch(installed, {"batching": {"maxNumSeqs": {"min": 2}}})  # live; the controller decides anew
    with running_prometheus(installed, tmp_path, (NAMESPACE, SYSTEM_NAMESPACE)) as running:
        async with under_load(url):
            refusals = asyncio.create_task(refused(url))
            yield running
            refusals.cancel()
            await asyncio.gather(refusals, return_exceptions=True)


async def refused(url: str) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a " * 20_000}]}
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{url}/chat/completions", json=body) as response:
                assert response.status == 400, await response.text()
            await asyncio.sleep(0.5)


async def test_every_query_of_the_dashboard_returns_data_and_every_rule_works(
    installed: Kubernetes, prometheus: Prometheus
) -> None:
    await eventually("all pods are read", 60, lambda: all_up(prometheus))
    asked = queries()
    assert len(asked) > 15
    answers: dict[str, int] = {}
    for title, expression in asked:
        query = filled(title, expression)
        series = await eventually(f"{title}: {query}", 60, partial(with_data, prometheus, query))
        answers[f"{title}: {expression[:60]}"] = len(series)
    print(json.dumps(answers, indent=1))
    namespaces = prometheus.get("label/namespace/values", **{"match[]": "headway_operator_replicas_wanted"})
    assert namespaces == [NAMESPACE]  # the service's, not the operator's
    await eventually("rules are evaluated", 60, lambda: rules_are_well(prometheus))
    alerts = await eventually(
        "the promise that cannot be kept is told of",
        60,
        lambda: prometheus.query('ALERTS{alertname="HeadwaySLOBurn"}'),
    )
    assert {one["metric"]["namespace"] for one in alerts} == {NAMESPACE}
    assert {one["metric"]["inferenceservice"] for one in alerts} == {NAME}
    assert condition(installed, "SLOMet").startswith("False")


async def test_what_is_switched_off_is_removed(installed: Kubernetes, services: None) -> None:
    kinds = "podmonitors,prometheusrules,networkpolicies"
    assert len(of_service(installed, kinds)) == 3
    off = {"enabled": False}
    patch(installed, {"monitoring": off, "networkPolicy": off})
    await eventually("all of it is gone", 60, lambda: not of_service(installed, kinds))


def of_service(kubernetes: Kubernetes, kinds: str) -> list[str]:
    return [item["kind"] for item in kubernetes.list(kinds, NAMESPACE, SERVICE_LABEL)]


def all_up(prometheus: Prometheus) -> bool:
    states = prometheus.get("targets", state="active")["activeTargets"]
    assert len(states) >= NUM_PODS, states
    assert all(one["health"] == "up" for one in states), [one["lastError"] for one in states]
    return True


def with_data(prometheus: Prometheus, query: str) -> list[dict[str, Any]]:
    """The series with a number; an answer of nothing but NaN is none."""
    return [one for one in prometheus.query(query) if math.isfinite(float(one["value"][1]))]


def rules_are_well(prometheus: Prometheus) -> bool:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == ALERTS | {"HeadwaySLOBurn"}
    bad = [rule for rule in rules if rule["health"] == "err"]
    assert not bad, bad
    return all(rule["health"] == "ok" for rule in rules)
