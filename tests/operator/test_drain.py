"""How long pods have to finish their requests: what the promises need, pinned with the revision."""

from typing import Any

import pytest

from headway_operator.manifests import render
from headway_operator.manifests.pod import GRACE_MARGIN_SECONDS
from headway_operator.manifests.render import pin_of
from headway_operator.spec import parse
from headway_operator.spec.drain import drain_seconds
from headway_operator.spec.fields import LONGEST_DRAIN_SECONDS
from headway_operator.state import ChildKey, Rendered

MODEL = {"source": "bundled://headway-tiny", "maxModelLen": 8192}
PROMISE = {"ttftMilliseconds": 300, "tpotMilliseconds": 40}


def spec_of(build: Any, **spec: Any) -> Any:
    return parse(build.manifest({"replicas": 1, **spec})).spec


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, 60, id="nothing that has an end"),
        pytest.param({"slo": PROMISE}, 60, id="a pace, but no length"),
        pytest.param({"model": MODEL}, 60, id="a length, but no pace"),
        pytest.param({"model": MODEL, "slo": PROMISE}, 328, id="a full context at the promised pace"),
        pytest.param({"model": MODEL, "slo": {"tpotMilliseconds": 40}}, 328, id="no first token promised"),
        pytest.param(
            {"model": MODEL, "slo": {**PROMISE, "endToEndMilliseconds": 400_500}}, 401, id="a whole answer"
        ),
        pytest.param({"slo": {"endToEndMilliseconds": 90_000}}, 90, id="a whole answer alone"),
        pytest.param({"model": MODEL, "slo": PROMISE, "drainTimeoutSeconds": 5}, 328, id="told less"),
        pytest.param({"model": MODEL, "slo": PROMISE, "drainTimeoutSeconds": 900}, 900, id="told more"),
        pytest.param(
            {"model": {**MODEL, "maxModelLen": 131_072}, "slo": PROMISE},
            LONGEST_DRAIN_SECONDS,
            id="longer than a node waits",
        ),
    ],
)
def test_the_longest_answer_that_is_promised_fits(build: Any, spec: dict[str, Any], want: int) -> None:
    assert drain_seconds(spec_of(build, **spec)) == want


def pods(result: Rendered) -> dict[str, Any]:
    """By component."""
    return {
        one["metadata"]["labels"]["serving.headway.dev/component"]: one["spec"]["template"]["spec"]
        for one in result.manifests
        if one["kind"] == "Deployment"
    }


def drained(result: Rendered) -> set[int]:
    """What replicas and gateways are told, and what Kubernetes leaves them beyond it."""
    told = set()
    for pod in pods(result).values():
        arguments = pod["containers"][0]["args"]
        told.add(int(arguments[arguments.index("--drain-timeout-seconds") + 1]))
        told.add(pod["terminationGracePeriodSeconds"] - GRACE_MARGIN_SECONDS)
    return told


def rendered(build: Any, spec: dict[str, Any], status: Any = None, existing: Any = frozenset()) -> Rendered:
    service = parse({**build.manifest({"replicas": 1, "model": MODEL, **spec}), "status": status or {}})
    return render(service, build.site(), "PEM", existing)


def as_status(result: Rendered) -> dict[str, Any]:
    pin = result.revision
    return {
        "revision": {
            "name": pin.name,
            "hash": pin.hash,
            "runtimeImage": pin.runtime_image,
            "gatewayImage": pin.gateway_image,
            "gatewayHash": pin.gateway_hash,
            "specHash": pin.spec_hash,
            "gatewaySpecHash": pin.gateway_spec_hash,
            "drainTimeoutSeconds": pin.drain_timeout_seconds,
        }
    }


def test_replicas_and_gateways_have_it_and_kubernetes_waits_longer(build: Any) -> None:
    result = rendered(build, {"slo": PROMISE})
    assert drained(result) == {328}
    assert result.revision.drain_timeout_seconds == 328


def test_another_promise_restarts_nothing_and_counts_from_the_next_revision_on(build: Any) -> None:
    first = rendered(build, {"slo": PROMISE})
    status = as_status(first)
    existing = frozenset(ChildKey(one["kind"], one["metadata"]["name"]) for one in first.manifests)
    slower = {"slo": {**PROMISE, "tpotMilliseconds": 80}}
    again = rendered(build, slower, status, existing)
    assert again.revision == first.revision
    assert pods(again) == pods(first)
    changed = rendered(build, {**slower, "dtype": "float32"}, status, existing)
    assert drained(changed) == {656}


def test_a_pin_of_before_it_was_kept_has_what_the_spec_said(build: Any) -> None:
    first = rendered(build, {"slo": PROMISE})
    status = as_status(first)
    del status["revision"]["drainTimeoutSeconds"]
    assert pin_of(status) is not None
    assert drained(rendered(build, {"slo": PROMISE}, status)) == {60}


@pytest.mark.parametrize(("told", "want"), [(30, 328 + GRACE_MARGIN_SECONDS), (1000, 1000)])
def test_a_template_may_give_more_time_to_end_and_not_less(build: Any, told: int, want: int) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": told}}
    result = rendered(build, {"slo": PROMISE, "template": template, "gateway": {"template": template}})
    assert [pod["terminationGracePeriodSeconds"] for pod in pods(result).values()] == [want, want]
