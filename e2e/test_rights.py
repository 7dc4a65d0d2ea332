"""At the end of a whole run: what the chart grants was used, all of it, and nothing else was asked for.

Read from the audit log of the API server, in which every call of a service account stands. A right that no
test uses is either not needed or not tested; the few that this cluster cannot use are named with the reason.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from e2e.cluster.settings import read_settings
from e2e.conftest import LAST
from e2e.installation import CHART, RELEASE, SYSTEM_NAMESPACE
from e2e.kubernetes import Kubernetes
from headway_operator.manifests.role import gateway_role
from headway_operator.spec import parse

# A pod's grace period after its Deployment is gone.
ENDING_SECONDS = 30.0
OPERATOR = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{RELEASE}"
GATEWAY = re.compile(r"system:serviceaccount:[^:]+:[^:]+-gateway")


class Right(NamedTuple):
    """One verb on one kind, `resource/subresource` where it has one."""

    group: str
    resource: str
    verb: str


# Rights that a run of these tests need not use, and why they are granted.
_GRANTED_ON = "the operator grants it to gateways, and nobody may grant what he does not hold"
UNUSED = {
    Right("discovery.k8s.io", "endpointslices", "list"): _GRANTED_ON,
    Right("discovery.k8s.io", "endpointslices", "watch"): _GRANTED_ON,
    Right("serving.headway.dev", "inferenceservices", "get"): "for passes while no list has come in yet",
    Right("serving.headway.dev", "modelcaches", "get"): "likewise",
}

# What the chart of `e2e/previous` does not grant yet, and the operator does without where it is refused.
NEW_KINDS = ("modelcaches", "persistentvolumeclaims")
NEWLY_WATCHED = ("podmonitors", "prometheusrules", "leaderworkersets")


@pytest.fixture(scope="module")
def events(kubernetes: Kubernetes, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every call of the operator and of gateways, once every other test of the cluster has run."""
    if not kubernetes.has_pod_network:
        pytest.skip("the audit log is on the machine of the API server")
    folder = Path(__file__).parent
    whole = {path.name for path in folder.glob("test_*.py") if "installed: Kubernetes" in path.read_text()}
    run = {item.path.name for item in request.session.items}
    if missing := whole - run - {LAST, "test_campaign.py"}:
        pytest.skip(f"without {', '.join(sorted(missing))} rights are unused: run the whole of e2e")
    lines = read_settings().audit_log.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [
        one for one in found if one.get("objectRef") and one["user"]["username"].startswith("system:serv")
    ]


def used(events: list[dict[str, Any]], user: re.Pattern[str]) -> set[Right]:
    """What was asked for; server-side apply that makes an object takes the right to create it, too."""
    rights = set()
    for event in events:
        if not user.fullmatch(event["user"]["username"]):
            continue
        about = event["objectRef"]
        subresource = about.get("subresource")
        resource = f"{about['resource']}/{subresource}" if subresource else about["resource"]
        right = Right(about.get("apiGroup", ""), resource, event["verb"])
        rights.add(right)
        if right.verb == "patch" and event.get("responseStatus", {}).get("code") == 201:
            rights.add(right._replace(verb="create"))
    return rights


def granted(rules: list[dict[str, Any]]) -> Iterator[Right]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from (Right(group, resource, verb) for verb in rule["verbs"])


def roles_of_the_chart() -> list[dict[str, Any]]:
    """The rules that the operator's account is bound to."""
    text = subprocess.check_output(
        ["helm", "template", RELEASE, str(CHART), f"--namespace={SYSTEM_NAMESPACE}"], text=True, timeout=60
    )
    objects = [one for one in yaml.safe_load_all(text) if one]
    bound = {
        (one["roleRef"]["kind"], one["roleRef"]["name"])
        for one in objects
        if one["kind"].endswith("RoleBinding")
    }
    roles = [one for one in objects if (one["kind"], one["metadata"]["name"]) in bound]
    assert len(roles) == 2
    return [rule for role in roles for rule in role["rules"]]


def test_nothing_that_was_asked_for_was_denied(events: list[dict[str, Any]], kubernetes: Kubernetes) -> None:
    ours = [one for one in events if re.fullmatch(f"{OPERATOR}|{GATEWAY.pattern}", one["user"]["username"])]
    assert len(ours) > 100
    denied = {
        (one["user"]["username"], one["verb"], one["requestURI"].partition("?")[0])
        for one in ours
        if one.get("responseStatus", {}).get("code") == 403
        and not is_of_an_uninstall(one, kubernetes)
        and not is_newer_than_its_chart(one, kubernetes)
    }
    assert denied == set()


def is_of_an_uninstall(event: dict[str, Any], kubernetes: Kubernetes) -> bool:
    """An operator whose chart is being uninstalled has lost its rights while it ends, its Lease in hand."""
    at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
    return any(began <= at <= ended + ENDING_SECONDS for began, ended in kubernetes.uninstalls)


def is_newer_than_its_chart(event: dict[str, Any], kubernetes: Kubernetes) -> bool:
    """Today's operator asks for what an older chart, with which it was run, gives it no right to."""
    at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
    resource = event["objectRef"]["resource"]
    is_new = resource in NEW_KINDS or (event["verb"] == "watch" and resource in NEWLY_WATCHED)
    return is_new and any(began <= at <= ended for began, ended in kubernetes.older_charts)


def test_every_right_of_the_operator_is_used(events: list[dict[str, Any]]) -> None:
    rights, done = set(granted(roles_of_the_chart())), used(events, re.compile(OPERATOR))
    print("\n".join(map(str, sorted(done))))
    assert sorted(rights - done - UNUSED.keys()) == []
    assert UNUSED.keys() <= rights


def test_every_right_of_a_gateway_is_used(events: list[dict[str, Any]]) -> None:
    service = parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "demo", "namespace": "default"},
            "spec": {"model": {"source": "bundled://headway-tiny"}, "replicas": 1},
        }
    )
    assert sorted(set(granted(gateway_role(service)["rules"])) - used(events, GATEWAY)) == []


def test_pods_of_services_asked_for_nothing(events: list[dict[str, Any]]) -> None:
    """Replicas have no token; the account of their namespace has asked for nothing."""
    accounts = {one["user"]["username"] for one in events}
    assert {one for one in accounts if one.endswith(":default")} == set()
