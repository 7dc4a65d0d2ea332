"""Every reason that a condition can have is produced here; `docs/conditions.md` has each with its remedy."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.operator_io.condition_facts import (
    PRODUCERS,
    RECORDED,
    REFUSALS,
    ROOT,
    gateway_of,
    gateway_pod,
    of_pods,
    own_replicas,
    pod,
    produced,
    refused_deployment,
    told,
)

from headway_operator.cluster import kubernetes_causes as causes
from headway_operator.cluster import kubernetes_preparation as preparation
from headway_operator.rollout.trouble import is_failing


def documented() -> dict[str, set[str]]:
    """Reason -> the conditions that may have it, from the table."""
    text = (ROOT / "docs" / "conditions.md").read_text().partition("## Reasons")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    table: dict[str, set[str]] = {}
    before: set[str] = set()
    for reason, on, means, remedy in rows:
        assert reason not in table, f"{reason} stands there twice"
        assert means.strip()
        assert remedy.strip()
        before = before if on == "likewise" else set(on.split(", "))
        table[reason] = before
    return table


def test_each_reason_can_be_produced_and_has_a_remedy() -> None:
    made, table = produced(), documented()
    assert {reason for _, reason in made} == set(table)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_reason_is_documented_for_the_conditions_that_have_it(producer: Any) -> None:
    table = documented()
    for facts in producer():
        for condition, reason in facts:
            assert condition in table[reason], (condition, reason)


def test_no_condition_has_a_reason_that_its_row_does_not_tell_of() -> None:
    """The column of conditions says neither too little nor too much."""
    made: dict[str, set[str]] = {}
    for condition, reason in produced():
        made.setdefault(reason, set()).add(condition)
    # Whatever a replica waits for may stand where the controller says what it waits for.
    both = {
        reason: made[reason] | {"ScalingActive"}
        for reason, on in documented().items()
        if "ScalingActive" in on
    }
    assert {reason: (made | both)[reason] for reason in documented()} == documented()


@pytest.mark.parametrize(
    "case",
    [
        "its init container tried twice and it loads its model",
        "its sidecar came back and it loads its model",
        "restarted and ready, and its sidecar begins",
    ],
)
def test_what_is_beside_the_server_may_come_again_and_nothing_is_wrong(case: str) -> None:
    facts = told(of_pods(pod(RECORDED["cases"][case]["status"])))
    want = {("Ready", "ReplicasStarting"), ("Degraded", "AsExpected"), ("Progressing", "AddingReplicas")}
    assert facts >= want


@pytest.mark.parametrize(
    ("num_serving", "num_updated", "want"),
    [
        pytest.param(0, 0, ("QuotaExceeded", "QuotaExceeded"), id="none could be made"),
        pytest.param(1, 1, ("Serving", "QuotaExceeded"), id="one of two could not be made"),
        pytest.param(2, 0, ("Serving", "QuotaExceeded"), id="none of the latest template"),
        pytest.param(2, 2, ("Serving", "AsExpected"), id="all are made by now"),
    ],
)
def test_a_gateway_that_cannot_be_made_says_who_refuses_it(
    num_serving: int, num_updated: int, want: tuple[str, str]
) -> None:
    pods = [gateway_pod("ready", f"demo-{number}") for number in range(num_serving)]
    deployment = refused_deployment(REFUSALS[0], "gateway", num_updated)
    facts = told(replace(own_replicas(2), gateway=gateway_of(*pods, deployment=deployment)))
    assert {("Ready", want[0]), ("Degraded", want[1])} <= facts


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("a volume's secret is missing", "FailedMount"),
        ("another node has its volume", "FailedMount"),
        ("it gets no address", "FailedCreatePodSandBox"),
    ],
)
def test_a_pod_that_cannot_be_prepared_is_degraded_and_not_given_up(case: str, reason: str) -> None:
    recorded = RECORDED["cases"][case]
    watched = of_pods(pod(recorded["status"]), events=recorded["events"])
    assert told(watched) >= {("Ready", reason), ("Degraded", reason), ("Progressing", "AddingReplicas")}
    assert not is_failing(watched.replicas[0]), "the kubelet tries again, and mostly something else gives way"
    gateway = gateway_of(gateway_pod(case), events=recorded["events"])
    assert told(replace(own_replicas(2), gateway=gateway)) >= {("Ready", reason), ("Degraded", reason)}


def test_words_of_the_kubelet_become_reasons_of_the_table() -> None:
    closed = {*causes.WAITING_REASONS.values(), causes.OTHER_WAITING_REASON, *causes.LOSS_REASONS.values()}
    closed |= set(preparation.REASONS.values())
    assert {*closed, *causes.DISRUPTION_REASONS.values()} <= set(documented())
