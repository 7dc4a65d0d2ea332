"""A template of any shape, which the API server would take: it is rendered, or refused by name."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.rendering import NOTHING, PUBLIC_KEY

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.local_left_aside import left_aside
from headway_operator.manifests import render
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.fetch_job import fetch_job
from headway_operator.spec import parse, parse_cache
from headway_operator.state import Site

SITE = Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000)
ASKED = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1, "quality": {}, "quantization": "int8"}
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
PROBE = {"httpGet": {"path": "/", "port": 1}, "periodSeconds": 2}
CONTEXT = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
    "appArmorProfile": {"type": "RuntimeDefault"},
    "seLinuxOptions": {"type": "container_t"},
    "windowsOptions": {"hostProcess": False},
}


def template(place: str) -> dict[str, Any]:
    """With every field that is read or merged, and some that are not."""
    own = {
        "name": place,
        "image": "a",
        "command": ["a"],
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "a", "key": "a"}}},
        ],
        "envFrom": [{"secretRef": {"name": "a"}}],
        "ports": [{"containerPort": 8000, "name": "http"}, {"containerPort": 9000}],
        "resources": {
            "limits": {"memory": "1Gi", "cpu": 0.5},
            "requests": {"cpu": 1},
            "claims": [{"name": "a"}],
        },
        "volumeMounts": [{"mountPath": "/tmp", "readOnly": True}, {"mountPath": "/a", "name": "a"}],
        "volumeDevices": [{"devicePath": "/dev/a", "name": "a"}],
        "livenessProbe": PROBE,
        "startupProbe": {"tcpSocket": {"port": 1}},
        "lifecycle": {"preStop": {"exec": {"command": ["a"]}}, "postStart": {"httpGet": {"port": 1}}},
        "securityContext": {**SAFE, **CONTEXT, "privileged": False, "procMount": "Default"},
        "ofTomorrow": {"env": {"a": 1}, "ports": [{"a": 1}]},
    }
    return {
        "metadata": {"labels": {"a": "b"}, "annotations": {"env": "c"}},
        "spec": {
            "containers": [own, {"name": "sidecar", "image": "a", "securityContext": SAFE}],
            "initContainers": [{"name": "init", "image": "a", "securityContext": SAFE}],
            "volumes": [
                {"name": "a", "configMap": {"name": "a", "items": [{"key": "a", "path": "a"}]}},
                {"name": "b", "secret": {"secretName": "a"}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "a"}}]}},
                {"name": "tmp", "$patch": "delete"},
            ],
            "securityContext": CONTEXT,
            "hostNetwork": False,
            "terminationGracePeriodSeconds": 900,
            "nodeSelector": {"env": "b"},
            "affinity": {"nodeAffinity": {}},
            "tolerations": [{"key": "a", "effect": "NoSchedule"}, {"operator": "Exists"}],
            "topologySpreadConstraints": [{"topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}],
            "imagePullSecrets": [{"name": "a"}],
            "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a"]}],
            "ofTomorrow": [{"a": {"b": 1}}],
        },
    }


def manifest(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "team", "uid": "u", "generation": 1}
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def rendered(place: str, template: dict[str, Any]) -> None:
    """All that is made with such a template."""
    told = {"template": template} if place == "runtime" else {"gateway": {"template": template}}
    scheduling = {
        "nodeSelector": {"env": "a"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
    }
    spec: dict[str, Any] = {**ASKED, **copy.deepcopy(told)}
    spec.setdefault("gateway", {})
    spec["gateway"]["scheduling"] = spec["scheduling"] = scheduling
    left_aside({"spec": spec})
    service = parse(manifest("InferenceService", spec))
    render(service, SITE, PUBLIC_KEY, NOTHING)
    if place == "runtime":
        evaluation_job(service, SITE, "runtime:1", "demo-eval")
        cache = {"source": "hf://a/b", "storage": {"size": "1Gi"}, "template": template}
        fetch_job(parse_cache(manifest("ModelCache", cache)), SITE, "claim", "demo-fetch")


def nodes(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of each node of a template, but for its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from nodes(one, (*path, key))


def with_node(value: Any, path: tuple[str | int, ...], node: Any) -> Any:
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = node
    return changed


FIELDS = {"runtime": "spec.template.", "gateway": "spec.gateway.template."}
PLACES = tuple(FIELDS)
TEMPLATES = {place: template(place) for place in PLACES}
NODES = {place: list(nodes(TEMPLATES[place])) for place in PLACES}
WORDS = (
    "name",
    "env",
    "ports",
    "containers",
    "$patch",
    "projected",
    "memory",
    "replace",
    "delete",
    "runtime",
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS)
JSON = st.recursive(
    SCALARS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)


def renders_or_is_refused(place: str, path: tuple[str | int, ...], node: Any) -> None:
    field = ""
    try:
        rendered(place, with_node(TEMPLATES[place], path, node))
    except SpecError as error:
        field = error.field
    assert field == "" or field.startswith(FIELDS[place])


@pytest.mark.parametrize("place", PLACES)
def test_the_template_is_rendered_as_it_stands(place: str) -> None:
    rendered(place, TEMPLATES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("node", ["x", ["x"], [None], [{}], {}, {"a": "x"}, None, 5, [["x"]]], ids=repr)
def test_each_node_as_something_else_is_rendered_or_refused(place: str, node: Any) -> None:
    for path in NODES[place]:
        renders_or_is_refused(place, path, node)


@settings(max_examples=500, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_json_at_any_node_is_rendered_or_refused(data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(PLACES))
    renders_or_is_refused(place, data.draw(st.sampled_from(NODES[place])), data.draw(JSON))


@pytest.mark.parametrize(
    ("template", "field", "words"),
    [
        ({"spec": {"securityContext": "x"}}, "spec.securityContext", "'x' is not an object; write a map"),
        ({"metadata": {"annotations": ["x"]}}, "metadata.annotations", "['x'] is not an object"),
        ({"metadata": {"labels": {"a": 1}}}, "metadata.labels.a", "1 is not a string; write one, in quotes"),
        (
            {"spec": {"containers": [{"name": "runtime", "livenessProbe": "x"}]}},
            "spec.containers[0].livenessProbe",
            "'x' is not an object",
        ),
        (
            {"spec": {"containers": [{"name": "runtime", "securityContext": {"capabilities": "x"}}]}},
            "spec.containers[0].securityContext.capabilities",
            "is not an object",
        ),
        (
            {"spec": {"volumes": [{"name": "a", "projected": "x"}]}},
            "spec.volumes[0].projected",
            "not an object",
        ),
        (
            {"spec": {"volumes": [{"name": "a", "emptyDir": "x"}]}},
            "spec.volumes[0].emptyDir",
            "not an object",
        ),
        (
            {"spec": {"containers": [{"name": "a"}, {"name": "b", "ports": "abc"}]}},
            "spec.containers[1].ports",
            "'abc' is not a list",
        ),
        (
            {"spec": {"containers": [{"name": "runtime", "env": [{"value": "x"}]}]}},
            "spec.containers[0].env[0].name",
            "is missing in {'value': 'x'}; write it",
        ),
        (
            {"spec": {"containers": [{"name": "runtime", "volumeMounts": [{"mountPath": "/x"}]}]}},
            "spec.containers[name=runtime].volumeMounts[mountPath=/x].name",
            "is missing in",
        ),
        (
            {"spec": {"terminationGracePeriodSeconds": "9"}},
            "spec.terminationGracePeriodSeconds",
            "a whole number",
        ),
        ({"spec": {"hostNetwork": "no"}}, "spec.hostNetwork", "'no' is not a boolean; write true or false"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(("spec", "metadata")) else "",
)
def test_the_field_the_value_and_the_remedy_are_named(
    template: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        rendered("runtime", template)
    assert (caught.value.field, caught.value.reason) == (f"spec.template.{field}", "InvalidSpec")
    assert words in str(caught.value)


@pytest.mark.parametrize("memory", ["x", ["a"], {"a": 1}, True])
def test_a_gateways_memory_that_is_no_quantity_is_refused_by_name(memory: Any) -> None:
    container = {"name": "gateway", "resources": {"limits": {"memory": memory}}}
    with pytest.raises(SpecError) as caught:
        rendered("gateway", {"spec": {"containers": [container]}})
    assert caught.value.field.startswith("spec.gateway.template.spec.containers[")
    assert caught.value.field.endswith("].resources.limits.memory")


def test_a_long_value_is_not_told_as_a_whole() -> None:
    with pytest.raises(SpecError) as caught:
        rendered("runtime", {"spec": {"securityContext": ["x" * 9000]}})
    assert len(str(caught.value)) < 300
    assert str(caught.value).endswith("is not an object; write a map")
