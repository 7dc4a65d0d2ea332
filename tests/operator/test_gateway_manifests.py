"""What is rendered of a gateway, and that its changes are its own."""

from typing import Any

import pytest
from tests.operator.rendering import GATEWAY, child, keys, rendered, runtime, status_of

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.state import Rendered


def test_a_gateway_still_takes_connections_while_nodes_learn_that_it_ends(build: Any) -> None:
    (gateway,) = (
        m
        for m in rendered(build).manifests
        if m["metadata"]["name"] == "demo-gateway" and m["kind"] == "Deployment"
    )
    pod = gateway["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = container["args"][container["args"].index("--drain-timeout-seconds") + 1]
    assert (sleep, int(seconds) >= 5) == ("sleep", True)
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + int(drain) + 5


def gateway_pod(result: Rendered) -> Any:
    return child(result, "Deployment", "demo-gateway")["spec"]["template"]["spec"]


@pytest.mark.parametrize("part", ["resources", "scheduling", "template"])
def test_a_change_of_the_gateway_makes_it_anew_and_no_replica(build: Any, part: str) -> None:
    first = rendered(build)
    newer = build.site(runtime_image="example.test/runtime:2", gateway_image="example.test/gateway:2")
    spec = {"gateway": {part: GATEWAY[part]}}
    changed = rendered(build, spec, newer, status_of(first), keys(first))
    assert changed.revision.name == first.revision.name
    assert runtime(changed)["image"] == "example.test/runtime:1"
    # A gateway of the old image might not know a flag that is rendered today.
    assert gateway_pod(changed)["containers"][0]["image"] == "example.test/gateway:2"
    assert changed.revision.gateway_hash != first.revision.gateway_hash
    # And once it is made, it stays: an operator upgrade makes neither anew.
    newest = build.site(runtime_image="example.test/runtime:3", gateway_image="example.test/gateway:3")
    assert rendered(build, spec, newest, status_of(changed), keys(changed)) == changed


def test_a_pin_of_before_gateways_could_be_said_keeps_what_it_pinned(build: Any) -> None:
    first = rendered(build)
    status = status_of(first)
    del status["revision"]["gatewaySpecHash"]
    newer = build.site(gateway_image="example.test/gateway:2")
    assert rendered(build, {}, newer, status, keys(first)) == first


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param(None, None, id="the default"),
        pytest.param({"memory": "512Mi"}, None, id="the same in words"),
        pytest.param({"memory": "2Gi"}, 2**30, id="more"),
        pytest.param({"cpu": 1}, None, id="no limit of memory"),
    ],
)
def test_a_gateway_may_hold_requests_of_half_its_memory(
    build: Any, limits: dict[str, Any] | None, want: int | None
) -> None:
    spec = {} if limits is None else {"gateway": {"resources": {"limits": limits}}}
    [container] = gateway_pod(rendered(build, spec))["containers"]
    flag = "--max-waiting-bytes"
    got = int(container["args"][container["args"].index(flag) + 1]) if flag in container["args"] else None
    assert got == want


def test_a_memory_limit_in_the_gateways_template_counts_too(build: Any) -> None:
    def limited(memory: str) -> dict[str, Any]:
        container = {"name": "gateway", "resources": {"limits": {"memory": memory}}}
        return {"gateway": {"template": {"spec": {"containers": [container]}}}}

    [container] = gateway_pod(rendered(build, limited("1Gi")))["containers"]
    assert container["args"][-2:] == ["--max-waiting-bytes", str(2**29)]
    with pytest.raises(
        SpecError, match=r"name=gateway\].resources.limits.memory: 'much' is not a Kubernetes"
    ):
        rendered(build, limited("much"))


def test_gateways_are_spread_over_nodes_unless_told_how(build: Any) -> None:
    def spread(*told: dict[str, Any]) -> Any:
        spec = {"gateway": {"scheduling": {"topologySpreadConstraints": list(told)}}}
        return gateway_pod(rendered(build, spec))["topologySpreadConstraints"]

    zones = {"topologyKey": "topology.kubernetes.io/zone"}
    nodes = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    assert [one["topologyKey"] for one in spread(zones)] == [zones["topologyKey"], nodes["topologyKey"]]
    [only] = spread(nodes)
    assert only["whenUnsatisfiable"] == "DoNotSchedule"
    assert only["labelSelector"] == {"matchLabels": names.component_selector("demo", "gateway")}
    assert only["matchLabelKeys"] == ["pod-template-hash"]
