"""Optional kinds while the API server refuses, does not answer, or has just lost one."""

from typing import Any

import pytest

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_discovery import ASK_AGAIN_SECONDS, FORBIDDEN_SECONDS, Discovery
from headway_operator.errors import ClusterError, ForbiddenError, UnavailableError
from headway_operator.names import OPTIONAL_KINDS

KINDS = frozenset(OPTIONAL_KINDS)
NUM_VERSIONS = len(set(OPTIONAL_KINDS.values()))


class FaultyApi(KubernetesApi):
    """Has the kinds that a test gives it, unless it is to fail."""

    def __init__(self) -> None:
        self.served = KINDS | {"Alertmanager"}
        self.fault: ClusterError | None = None
        self.num_asked = 0

    async def served_kinds(self, api_version: str) -> frozenset[str]:
        self.num_asked += 1
        if self.fault is not None:
            raise self.fault
        return self.served

    async def list(
        self, kind: str, namespace: str, labels: str = "", *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        if self.fault is not None:
            raise self.fault
        return [{"kind": kind}]


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> FaultyApi:
    return FaultyApi()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def discovery(api: FaultyApi, clock: Clock) -> Discovery:
    return Discovery(api, clock)


async def test_asks_once_a_minute_and_takes_what_it_knows(
    discovery: Discovery, api: FaultyApi, clock: Clock
) -> None:
    for _ in range(3):
        await discovery.refresh()
    assert (discovery.kinds, api.num_asked) == (KINDS, NUM_VERSIONS)
    clock.now += ASK_AGAIN_SECONDS
    api.served = frozenset()
    await discovery.refresh()
    assert (discovery.kinds, api.num_asked) == (frozenset(), 2 * NUM_VERSIONS)


async def test_what_was_said_last_stands_while_nobody_answers(
    discovery: Discovery, api: FaultyApi, clock: Clock
) -> None:
    await discovery.refresh()
    clock.now += ASK_AGAIN_SECONDS
    api.fault = UnavailableError("no answer")
    await discovery.refresh()
    assert discovery.kinds == KINDS
    with pytest.raises(UnavailableError):  # nobody knows what is there: nothing may be pruned or made
        await discovery.children("PodMonitor", "team", "a=b")
    assert discovery.kinds == KINDS


async def test_a_kind_without_a_right_is_left_out_for_ten_minutes(
    discovery: Discovery, api: FaultyApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await discovery.refresh()
    api.fault = ForbiddenError("podmonitors: 403")
    assert await discovery.children("PodMonitor", "team", "a=b") == []
    assert "podmonitors: 403; the chart's role grants it" in caplog.text
    api.fault = None
    clock.now += ASK_AGAIN_SECONDS
    await discovery.refresh()
    assert discovery.kinds == KINDS - {"PodMonitor"}
    assert await discovery.children("PrometheusRule", "team", "a=b") == [{"kind": "PrometheusRule"}]
    clock.now += FORBIDDEN_SECONDS
    await discovery.refresh()
    assert discovery.kinds == KINDS


async def test_a_kind_that_has_just_gone_is_asked_for_anew(discovery: Discovery, api: FaultyApi) -> None:
    await discovery.refresh()
    api.fault = ClusterError("podmonitors: 404")
    assert await discovery.children("PodMonitor", "team", "a=b") == []
    assert discovery.kinds == KINDS - {"PodMonitor"}
    api.fault = None
    await discovery.refresh()
    assert (discovery.kinds, api.num_asked) == (KINDS, 2 * NUM_VERSIONS)
