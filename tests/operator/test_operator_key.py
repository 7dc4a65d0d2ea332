"""No pod gets the Secret with the operator's own key, whoever names it and whatever templates may do."""

from typing import Any

import pytest

from headway_operator.errors import SpecError
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.fetch_job import fetch_job
from headway_operator.manifests.gateway_template import gateway_template
from headway_operator.manifests.runtime_template import runtime_template
from headway_operator.spec import parse, parse_cache

KEY = "headway-admin-key"
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def named(**fields: Any) -> dict[str, Any]:
    return {"name": "one", **fields}


def container(kind: str = "containers", **fields: Any) -> dict[str, Any]:
    return {kind: [named(image="a", securityContext=SAFE, **fields)]}


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [named(**source)]}


VARIABLE = named(valueFrom={"secretKeyRef": {"name": KEY, "key": "private.pem"}})
PODS = [
    pytest.param(volume(secret={"secretName": KEY}), "volumes[name=one].secret.secretName", id="a volume"),
    pytest.param(
        volume(projected={"sources": [{"configMap": {"name": KEY}}, {"secret": {"name": KEY}}]}),
        "volumes[name=one].projected.sources[1].secret.name",
        id="one of several sources of a volume",
    ),
    pytest.param(
        volume(csi={"driver": "a", "nodePublishSecretRef": {"name": KEY}}),
        "volumes[name=one].csi.nodePublishSecretRef.name",
        id="for a driver",
    ),
    pytest.param(
        volume(azureFile={"shareName": "a", "secretName": KEY}),
        "volumes[name=one].azureFile.secretName",
        id="for a share",
    ),
    pytest.param(
        container(env=[VARIABLE]),
        "containers[name=one].env[name=one].valueFrom.secretKeyRef.name",
        id="a variable",
    ),
    pytest.param(
        container(envFrom=[{"prefix": "A_"}, {"secretRef": {"name": KEY}}]),
        "containers[name=one].envFrom[1].secretRef.name",
        id="variables",
    ),
    pytest.param(
        container("initContainers", env=[VARIABLE]),
        "initContainers[name=one].env[name=one].valueFrom.secretKeyRef.name",
        id="a variable of an init container",
    ),
    pytest.param(
        {"imagePullSecrets": [{"name": KEY}]}, f"imagePullSecrets[name={KEY}].name", id="for images"
    ),
]


def refusal(make: Any) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        make()
    return caught.value.field, str(caught.value)


@pytest.mark.parametrize(("pod", "path"), PODS)
@pytest.mark.parametrize("mode", ["restricted", "unrestricted"])
def test_no_template_may_name_it(build: Any, pod: dict[str, Any], path: str, mode: str) -> None:
    site = build.site(allows_unrestricted=mode == "unrestricted")
    template = {"template": {"spec": pod}}
    service = parse(build.manifest(template))
    judged = parse(build.manifest({**template, "quality": {"text": "configmap://a/b"}}))
    in_front = parse(build.manifest({"gateway": template}))
    field, message = refusal(lambda: runtime_template(service, site, "a"))
    assert field == f"spec.template.spec.{path}"
    assert repr(KEY) in message
    assert "name another Secret" in message
    assert refusal(lambda: evaluation_job(judged, site, "a", "demo-quality"))[0] == field
    assert refusal(lambda: fetch_job(cache(**template), site, "claim", "fetch"))[0] == field
    where = refusal(lambda: gateway_template(in_front, site, "a"))[0]
    assert where == f"spec.gateway.template.spec.{path}"


def cache(**spec: Any) -> Any:
    return parse_cache(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "ModelCache",
            "metadata": {"name": "llama", "namespace": "team"},
            "spec": {"source": "s3://models/llama", "storage": {"size": "1Gi"}, **spec},
        }
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"auth": {"apiKeysSecretRef": {"name": KEY}}}, "spec.auth.apiKeysSecretRef.name"),
        (
            {"model": {"source": "s3://models/a", "credentialsSecretRef": {"name": KEY}}},
            "spec.model.credentialsSecretRef.name",
        ),
    ],
    ids=["of clients", "of the model"],
)
def test_no_field_of_a_service_may_name_it(build: Any, spec: dict[str, Any], field: str) -> None:
    judged = parse(build.manifest({**spec, "quality": {"text": "configmap://a/b"}}))
    assert refusal(lambda: runtime_template(judged, build.site(), "a"))[0] == field
    assert refusal(lambda: evaluation_job(judged, build.site(), "a", "demo-quality"))[0] == field


@pytest.mark.parametrize("source", ["s3://models/llama", "oci://registry.example/llama:1"])
def test_no_cache_may_fetch_with_it(build: Any, source: str) -> None:
    one = cache(source=source, credentialsSecretRef={"name": KEY})
    assert refusal(lambda: fetch_job(one, build.site(), "claim", "fetch"))[0] == (
        "spec.credentialsSecretRef.name"
    )


@pytest.mark.parametrize(
    "pod",
    [
        volume(secret={"secretName": "keys"}),
        volume(configMap={"name": KEY}),
        container(env=[named(value=KEY)]),
        container(env=[named(valueFrom={"secretKeyRef": {"name": "keys", "key": KEY}})]),
        {"nodeSelector": {"name": KEY}},
    ],
    ids=["another Secret", "a ConfigMap", "a mere word", "a key of another", "a label"],
)
def test_what_is_not_that_secret_may_have_its_name(build: Any, pod: dict[str, Any]) -> None:
    service = parse(build.manifest({"template": {"spec": pod}}))
    assert runtime_template(service, build.site(allows_unrestricted=False), "a")
