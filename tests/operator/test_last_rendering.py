"""A service is rendered again when, and only when, something that it is rendered from has changed."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.errors import SpecError
from headway_operator.manifests import LastRendering, render
from headway_operator.spec import Service, parse
from headway_operator.state import ChildKey, Rendered, Site
from tests.operator.rendering import FULL_SPEC, NOTHING, PUBLIC_KEY, SEVERAL_NODES

Arguments = tuple[Service, Site, str, frozenset[ChildKey]]


class Counted:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: Any) -> Rendered:
        self.count += 1
        return render(*arguments)


@pytest.fixture
def arguments(build: Any) -> Arguments:
    return parse(build.manifest(FULL_SPEC)), build.site(), PUBLIC_KEY, NOTHING


def test_the_same_is_rendered_once_and_handed_out_anew(build: Any, arguments: Arguments) -> None:
    last, counted = LastRendering(), Counted()
    want = render(*arguments)
    for number in range(3):
        service, *others = arguments
        # Read anew in each pass; what a status says of requests moves.
        read = replace(parse(build.manifest(FULL_SPEC)), status={"slo": {"ttft": number}})
        got = last.of(counted, read, *others)
        assert got == want
        if number:
            got.manifests[0]["metadata"]["labels"]["mine"] = "x"  # of this pass alone
    assert counted.count == 1


@pytest.mark.parametrize(
    "changed", ["spec", "uid", "pin", "replicas", "site", "key", "existing"]
)
def test_whatever_it_is_rendered_from_renders_it_again(
    build: Any, arguments: Arguments, changed: str
) -> None:
    service, site, pem, existing = arguments
    last, counted = LastRendering(), Counted()
    first = last.of(counted, *arguments)
    pin = {
        "name": first.revision.name,
        "hash": first.revision.hash,
        "runtimeImage": "older:1",
        "gatewayImage": first.revision.gateway_image,
        "gatewayHash": first.revision.gateway_hash,
        "specHash": first.revision.spec_hash,
    }
    others: dict[str, Arguments] = {
        "spec": (parse(build.manifest({**FULL_SPEC, "kvCacheMemory": "2Gi"})), site, pem, existing),
        "uid": (replace(service, uid="another"), site, pem, existing),
        "pin": (replace(service, status={"revision": pin}), site, pem, existing),
        "replicas": (replace(service, status={"desiredReplicas": 3}), site, pem, existing),
        "site": (service, replace(site, runtime_image="runtime:9"), pem, existing),
        "key": (service, site, "another key", existing),
        "existing": (service, site, pem, frozenset({ChildKey("Deployment", "demo-gateway")})),
    }
    got = last.of(counted, *others[changed])
    assert counted.count == 2
    assert got == render(*others[changed])
    assert changed == "existing" or got != first
    assert last.of(counted, *arguments) == first


def test_what_cannot_be_rendered_is_refused_each_time_and_loses_nothing(
    build: Any, arguments: Arguments
) -> None:
    last, counted = LastRendering(), Counted()
    service, site, pem, existing = arguments
    first = last.of(counted, *arguments)
    spanning = parse(build.manifest(SEVERAL_NODES))
    for _ in range(2):
        with pytest.raises(SpecError, match="nodesPerReplica"):
            last.of(counted, spanning, site, pem, existing)
    assert last.of(counted, service, site, pem, existing) == first
    assert counted.count == 3
