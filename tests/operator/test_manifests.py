"""What is rendered, against golden YAML, and which templates are refused.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_manifests.py, then read the diff.
"""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.rendering import (
    FULL_SPEC,
    GATEWAY,
    NOTHING,
    PUBLIC_KEY,
    SEVERAL_NODES,
    child,
    keys,
    rendered,
    runtime,
)

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests import render
from headway_operator.spec import parse
from headway_operator.state import ChildKey, Rendered

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "spec", "site"),
    [
        ("smallest", {}, {}),
        ("full", FULL_SPEC, {}),
        ("claim", {"model": {"source": "pvc://weights/llama/8b/"}}, {}),
        ("offload", {"kvOffload": {"hostMemory": "8Gi", "disk": {"size": "50Gi"}}}, {}),
        ("hub", {"model": {"source": "hf://org/name@v1", "credentialsSecretRef": {"name": "token"}}}, {}),
        ("bucket", {"model": {"source": "s3://models/llama", "credentialsSecretRef": {"name": "keys"}}}, {}),
        (
            "registry",
            {"model": {"source": "oci://r.example/llama:8b", "credentialsSecretRef": {"name": "login"}}},
            {},
        ),
        (
            "several-kinds",
            {
                "model": {"source": "pvc://weights/llama", "credentialsSecretRef": {"name": "all"}},
                "speculative": {"draft": {"source": "s3://models/draft"}},
                "lora": {
                    "adapters": [
                        {"name": "sql", "source": "hf://org/sql"},
                        {"name": "law", "source": "oci://r.example/law:1"},
                    ]
                },
            },
            {},
        ),
        ("gateways", {"gateway": GATEWAY}, {}),
        ("several-nodes", SEVERAL_NODES, {"optional_kinds": frozenset(names.OPTIONAL_KINDS)}),
        (
            "local",
            {},
            {
                "kind": "local",
                "runtime_image": "",
                "gateway_image": "",
                "admin_public_key_path": "/run/headway/public.pem",
                "gateway_backend_arguments": ("--backends-file", "/run/headway/backends.json"),
                "bind_port": 0,
            },
        ),
    ],
)
def test_renders_the_golden_manifests(
    build: Any, name: str, spec: dict[str, Any], site: dict[str, Any]
) -> None:
    result = rendered(build, spec, build.site(**site))
    # Through JSON, so that what two templates share is written out in both.
    got = yaml.safe_dump_all(json.loads(json.dumps(result.manifests)), sort_keys=True)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        path.write_text(got)
    assert list(yaml.safe_load_all(got)) == list(yaml.safe_load_all(path.read_text()))


def test_where_the_cluster_has_ipv6_pods_listen_on_it(build: Any) -> None:
    for is_ipv6, want in ((False, "0.0.0.0"), (True, "::")):
        hosts = [
            container["args"][container["args"].index("--host") + 1]
            for manifest in rendered(build, {}, build.site(is_ipv6=is_ipv6)).manifests
            if manifest["kind"] == "Deployment"
            for container in manifest["spec"]["template"]["spec"]["containers"]
        ]
        assert hosts == [want, want]


def test_a_stored_default_of_sequences_rolls_nothing(build: Any) -> None:
    """An API server keeps the defaults of its time, and on GPUs 64 was one. The name is of a version that had
    it."""
    site = build.site(optional_kinds=frozenset(names.OPTIONAL_KINDS))
    stored = SEVERAL_NODES | {"batching": {"maxNumSeqs": {"min": 1, "max": 64}}}
    kept, fresh = (rendered(build, spec, site).revision for spec in (stored, SEVERAL_NODES))
    assert kept.name == "demo-7d7a1e56"
    assert fresh.name != kept.name
    on_cpu, said = (
        rendered(build, spec, build.site()).revision
        for spec in ({}, {"batching": {"maxNumSeqs": {"max": 64}}})
    )
    assert on_cpu.name == said.name


@pytest.mark.parametrize("spec", [{}, FULL_SPEC], ids=["smallest", "full"])
def test_every_child_is_owned_labelled_and_kept(build: Any, spec: dict[str, Any]) -> None:
    result = rendered(build, spec)
    for manifest in result.manifests:
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "team"
        assert names.service_labels("demo").items() <= metadata["labels"].items()
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("InferenceService", "demo", "0000-uid")
    assert keys(result) | {ChildKey("ConfigMap", "demo-memory")} == result.keep


@pytest.mark.parametrize("spec", [{}, FULL_SPEC], ids=["smallest", "full"])
def test_deployments_select_their_own_pods_only(build: Any, spec: dict[str, Any]) -> None:
    result = rendered(build, spec)
    deployments = [m for m in result.manifests if m["kind"] == "Deployment"]
    for one in deployments:
        selector = one["spec"]["selector"]["matchLabels"]
        for other in deployments:
            labels = other["spec"]["template"]["metadata"]["labels"]
            assert (selector.items() <= labels.items()) == (one is other)
    for name, component in (("demo", "gateway"), ("demo-replicas", "runtime")):
        assert child(result, "Service", name)["spec"]["selector"][names.COMPONENT_LABEL] == component


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"containers": [{"name": "runtime", "args": ["--x"]}]}}, "args"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.template.spec.containers"),
        ({"spec": {"volumes": {"name": "x"}}}, "spec.template.spec.volumes"),
        ({"metadata": {"name": "x"}}, "spec.template.metadata.name"),
        ({"kind": "Pod"}, "spec.template.kind"),
        ({"spec": []}, "spec.template.spec"),
        ({"spec": {"containers": None}}, "spec.template.spec.containers"),
        (
            {"spec": {"containers": [{"name": "runtime", "$patch": "delete"}]}},
            "spec.template.spec.containers",
        ),
        ({"spec": {"containers": [{"name": "runtime", "env": ["A=b"]}]}}, "spec.template"),
    ],
    ids=[
        "arguments",
        "container without name",
        "volumes no list",
        "a name",
        "a kind",
        "spec no map",
        "no containers",
        "no runtime",
        "env of text",
    ],
)
def test_templates_that_would_lose_something_are_refused(
    build: Any, template: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        rendered(build, {"template": template})
    assert field in caught.value.field


@pytest.mark.parametrize(
    ("spec", "kind", "want"),
    [
        ({"device": "cuda"}, "kubernetes", {"limits": {"nvidia.com/gpu": "4"}}),
        (
            {"device": "cuda", "resources": {"requests": {"cpu": "8"}}},
            "kubernetes",
            {"limits": {"nvidia.com/gpu": "4"}, "requests": {"cpu": "8"}},
        ),
        (
            {"device": "cuda", "resources": {"limits": {"nvidia.com/gpu": "8"}}},
            "kubernetes",
            {"limits": {"nvidia.com/gpu": "8"}},
        ),
        ({"device": "auto"}, "kubernetes", None),
        ({"device": "cpu"}, "kubernetes", None),
        ({"device": "cuda"}, "local", None),
    ],
)
def test_a_replica_of_several_processes_gets_a_gpu_and_shared_memory_for_them(
    build: Any, spec: dict[str, Any], kind: str, want: dict[str, Any] | None
) -> None:
    result = rendered(build, spec | {"tensorParallelSize": 4}, build.site(kind=kind))
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    arguments = container["args"]
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "4"
    assert container.get("resources") == want
    mounts = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    volumes = [one["name"] for one in pod["volumes"] if one.get("emptyDir") == {"medium": "Memory"}]
    assert mounts == volumes == (["shared-memory"] if kind == "kubernetes" else [])


@pytest.mark.parametrize("kind", ["kubernetes", "local"])
def test_api_keys_are_mounted_in_both_worlds(build: Any, kind: str) -> None:
    spec = {"auth": {"apiKeysSecretRef": {"name": "k"}}}
    result = rendered(build, spec, build.site(kind=kind))
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
    assert volume["secret"]["secretName"] == "k"
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--api-key-file") + 1] == f"{mount['mountPath']}/api-keys"


def test_a_replica_that_fetches_its_model_may_take_longer_to_start(build: Any) -> None:
    seconds = {}
    for source in (
        "bundled://headway-tiny",
        "pvc://claim/x",
        "hf://org/name",
        "s3://models/a",
        "oci://r.example/a",
    ):
        probe = runtime(rendered(build, {"model": {"source": source}}))["startupProbe"]
        seconds[source.partition(":")[0]] = probe["periodSeconds"] * probe["failureThreshold"]
    assert seconds == {"bundled": 1800, "pvc": 1800, "hf": 7200, "s3": 7200, "oci": 7200}


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("pvc://claim", "/mnt/models"),
        ("pvc://claim/", "/mnt/models"),
        ("pvc://claim/a/b/", "/mnt/models/a/b"),
        ("hf://org/name", "hf://org/name"),
    ],
)
def test_a_replica_is_told_where_its_claim_is_mounted(build: Any, source: str, want: str) -> None:
    container = runtime(rendered(build, {"model": {"source": source}}))
    assert container["args"][:2] == ["serve", want]
    assert "pvc" not in " ".join(container["args"])


@pytest.mark.parametrize(
    ("model", "draft", "want", "claims"),
    [
        ("pvc://a/x", "pvc://a/y", "/mnt/models/y", ["a"]),
        ("pvc://a/x", "pvc://b/y", "/mnt/draft-models/y", ["a", "b"]),
        ("hf://o/n", "pvc://b/y", "/mnt/draft-models/y", ["b"]),
        ("pvc://a/x", "hf://o/n", "hf://o/n", ["a"]),
    ],
)
def test_a_draft_may_lie_on_a_claim_too(
    build: Any, model: str, draft: str, want: str, claims: list[str]
) -> None:
    spec = {"model": {"source": model}, "speculative": {"draft": {"source": draft}}}
    result = rendered(build, spec)
    container = runtime(result)
    arguments = container["args"]
    assert json.loads(arguments[arguments.index("--speculative-config") + 1])["model"] == want
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    volumes = {
        one["name"]: one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one
    }
    assert [one["claimName"] for one in volumes.values()] == claims
    mounts = {one["name"]: one for one in container["volumeMounts"] if one["name"] in volumes}
    assert mounts.keys() == volumes.keys()
    assert all(one["readOnly"] for one in (*mounts.values(), *volumes.values()))


def test_a_public_source_needs_no_secret(build: Any) -> None:
    for source in ("hf://org/name", "s3://models/a", "oci://r.example/a"):
        result = rendered(build, {"model": {"source": source}})
        assert [one["name"] for one in runtime(result)["env"]] == ["HOME"]
        pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
        assert not [volume for volume in pod["volumes"] if "secret" in volume]


def test_probes_ask_for_readiness_and_life(build: Any) -> None:
    container = runtime(rendered(build))
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}


def test_the_grace_period_is_longer_than_the_drain(build: Any) -> None:
    result = rendered(build, {"drainTimeoutSeconds": 300})
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300
    assert "300" in runtime(result)["args"]


def test_a_service_without_uid_owns_by_name(build: Any) -> None:
    service = replace(parse(build.manifest()), uid="")
    result = render(service, build.site(), PUBLIC_KEY, NOTHING)
    assert all("ownerReferences" not in manifest["metadata"] for manifest in result.manifests)


def test_labels_that_the_template_deletes_come_back(build: Any) -> None:
    result = rendered(build, {"template": {"metadata": {"labels": None}}})
    labels = child(result, "Deployment", result.revision.name)["spec"]["template"]["metadata"]["labels"]
    assert labels == rendered_labels(result)


def rendered_labels(result: Rendered) -> dict[str, str]:
    return {**names.component_labels("demo", "runtime"), names.REVISION_LABEL: result.revision.hash}


def test_adapters_may_lie_on_claims_too(build: Any) -> None:
    sources = ["pvc://a/x", "pvc://b/y/z", "pvc://b", "hf://o/n"]
    spec = {
        "model": {"source": "pvc://a/model"},
        "lora": {"adapters": [{"name": str(n), "source": one} for n, one in enumerate(sources)]},
    }
    result = rendered(build, spec)
    container = runtime(result)
    arguments = container["args"]
    found = [
        json.loads(value)["path"] for flag, value in itertools.pairwise(arguments) if flag == "--lora-modules"
    ]
    assert found == ["/mnt/models/x", "/mnt/lora-adapters/1/y/z", "/mnt/lora-adapters/1", "hf://o/n"]
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    claims = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod["volumes"]
        if "persistentVolumeClaim" in one
    }
    assert claims == {"model": "a", "lora-adapters-1": "b"}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts["lora-adapters-1"] == "/mnt/lora-adapters/1"
    # An adapter that is fetched takes as long as a model that is.
    assert container["startupProbe"]["failureThreshold"] == 7200


def test_replicas_of_several_nodes_are_groups_of_pods_alike_but_for_who_answers(build: Any) -> None:
    site = build.site(optional_kinds=frozenset(names.OPTIONAL_KINDS), operator_namespace="headway-system")
    result = rendered(build, SEVERAL_NODES, site)
    made = child(result, "LeaderWorkerSet", result.revision.name)
    deployments = [one["metadata"]["name"] for one in result.manifests if one["kind"] == "Deployment"]
    assert deployments == ["demo-gateway"]
    group = made["spec"]["leaderWorkerTemplate"]
    assert (group["size"], "replicas" in made["spec"]) == (2, False)
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    assert leader["spec"]["containers"] == worker["spec"]["containers"], "flags must agree"
    [container] = leader["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}, "of each of the two nodes"
    components = [one["metadata"]["labels"][names.COMPONENT_LABEL] for one in (leader, worker)]
    assert components == ["runtime", "worker"]
    selected = child(result, "Service", "demo-replicas")["spec"]["selector"]
    assert selected.items() <= leader["metadata"]["labels"].items()
    assert not selected.items() <= worker["metadata"]["labels"].items()
    policy = child(result, "NetworkPolicy", "demo")["spec"]
    peers = policy["ingress"][-1]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert peers == ["runtime", "worker"]
    assert policy["egress"][-1] == {"to": policy["ingress"][-1]["from"]}
    assert policy["egress"][0]["ports"][0] == {"port": 53, "protocol": "UDP"}


@pytest.mark.parametrize(
    ("site", "reason", "words"),
    [
        pytest.param({}, "LeaderWorkerSetMissing", "install LeaderWorkerSet", id="a cluster without it"),
        pytest.param({"kind": "local"}, "InvalidSpec", "this machine is one node", id="one machine"),
    ],
)
def test_several_nodes_are_refused_where_nobody_could_make_the_group(
    build: Any, site: dict[str, Any], reason: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        rendered(build, SEVERAL_NODES, build.site(**site))
    assert (caught.value.field, caught.value.reason) == ("spec.nodesPerReplica", reason)
