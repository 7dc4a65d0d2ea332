"""What is rendered, against golden YAML, and what an operator upgrade must not change.

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

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests import render
from headway_operator.manifests.render import hash_spec
from headway_operator.spec import parse
from headway_operator.state import ChildKey, Manifest, Rendered, Site

GOLDEN = Path(__file__).parent / "golden"
PUBLIC_KEY = "-----BEGIN PUBLIC KEY-----\nnot a key\n-----END PUBLIC KEY-----\n"
NOTHING: frozenset[ChildKey] = frozenset()

FULL_SPEC = {
    "model": {"source": "file:///models/llama", "maxModelLen": 4096, "servedName": "llama"},
    "dtype": "bfloat16",
    "quantization": "fp8",
    "weightCompression": "none",
    "memoryCheck": "Warn",
    "slo": {"ttftMilliseconds": 300, "tpotMilliseconds": 40, "percentile": 90},
    "batching": {
        "maxNumSeqs": {"max": 128, "initial": 8},
        "maxNumBatchedTokens": {"max": 4096, "initial": 256},
    },
    "kvCacheMemory": "1Gi",
    "kvCacheDtype": "fp8",
    "kvOffload": {"hostMemory": "8Gi"},
    "tensorParallelSize": 2,
    "device": "cuda",
    "resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "4"}, "requests": {"memory": "8Gi"}},
    "auth": {"apiKeysSecretRef": {"name": "keys"}},
    "drainTimeoutSeconds": 120,
    "speculative": {"method": "ngram", "numSpeculativeTokens": 6, "promptLookupMax": 8, "promptLookupMin": 3},
    "lora": {
        "adapters": [{"name": "sql", "source": "hf://org/sql"}, {"name": "law=2", "source": "file:///law"}],
        "maxLoras": 4,
        "maxCpuLoras": 6,
        "maxLoraRank": 64,
    },
    "template": {
        "metadata": {"labels": {"team": "a", names.SERVICE_LABEL: "stolen"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "volumes": [{"name": "models", "hostPath": {"path": "/models"}}],
            "containers": [
                {
                    "name": "runtime",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                },
                {"name": "sidecar", "image": "example.test/sidecar:2"},
            ],
        },
    },
}


SEVERAL_NODES = {
    "model": {"source": "pvc://weights/llama/405b"},
    "tensorParallelSize": 16,
    "nodesPerReplica": 2,
    "device": "cuda",
    "gpu": {"product": "NVIDIA-H200"},
    "scheduling": {"topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}]},
    "monitoring": {"enabled": False},
}

GATEWAY = {
    "replicas": 3,
    "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}},
    "scheduling": {
        "nodeSelector": {"pool": "front"},
        "tolerations": [{"key": "front", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "front",
    },
    "template": {
        "metadata": {"annotations": {"team": "search"}},
        "spec": {"containers": [{"name": "gateway", "env": [{"name": "LANG", "value": "C.UTF-8"}]}]},
    },
}


def rendered(
    build: Any,
    spec: dict[str, Any] | None = None,
    site: Site | None = None,
    status: dict[str, Any] | None = None,
    existing: frozenset[ChildKey] = NOTHING,
) -> Rendered:
    service = parse({**build.manifest(spec), "status": status or {}})
    return render(service, site or build.site(), PUBLIC_KEY, existing)


def child(result: Rendered, kind: str, name: str) -> Manifest:
    return next(m for m in result.manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))


def runtime(result: Rendered) -> Any:
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    return next(container for container in pod["containers"] if container["name"] == "runtime")


def status_of(result: Rendered) -> dict[str, Any]:
    """The pin as status holds it."""
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
        }
    }


def keys(result: Rendered) -> frozenset[ChildKey]:
    return frozenset(ChildKey(m["kind"], m["metadata"]["name"]) for m in result.manifests)


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


def test_a_revision_states_no_replicas(build: Any) -> None:
    result = rendered(build, {"replicas": 3})
    assert "replicas" not in child(result, "Deployment", result.revision.name)["spec"]


def test_the_name_of_a_revision_is_the_hash_of_its_template(build: Any) -> None:
    first, second = rendered(build), rendered(build, {"dtype": "float32"})
    assert first.revision.name == f"demo-{first.revision.hash}"
    assert first.revision.hash != second.revision.hash


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"slo": {"ttftMilliseconds": 1, "tpotMilliseconds": 2, "percentile": 50}}, id="slo"),
        pytest.param({"replicas": 7}, id="replicas"),
        pytest.param({"scaling": {"minReplicas": 2, "maxReplicas": 9}}, id="scaling"),
        pytest.param({"batching": {"maxNumSeqs": {"min": 2}}}, id="lower end of batching"),
        pytest.param({"dtype": "auto"}, id="a default written out"),
    ],
)
def test_live_fields_never_make_a_new_revision(build: Any, change: dict[str, Any]) -> None:
    assert rendered(build, change).revision == rendered(build).revision


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"source": "/other"}},
        {"batching": {"maxNumSeqs": {"max": 32}}},
        {"batching": {"maxNumSeqs": {"initial": 32}}},
        {"drainTimeoutSeconds": 61},
        {"speculative": {"method": "ngram"}},
        {"template": {"metadata": {"annotations": {"a": "b"}}}},
        {"resources": {"limits": {"cpu": 1}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_shapes_the_template_makes_a_new_revision(build: Any, change: dict[str, Any]) -> None:
    first, second = rendered(build), rendered(build, change)
    assert second.revision.name != first.revision.name
    assert second.revision.spec_hash != first.revision.spec_hash


def test_an_operator_with_other_default_images_rolls_nothing(build: Any) -> None:
    first = rendered(build)
    newer = build.site(runtime_image="example.test/runtime:2", gateway_image="example.test/gateway:2")
    again = rendered(build, site=newer, status=status_of(first), existing=keys(first))
    assert again == first
    changed = rendered(build, {"dtype": "float32"}, newer, status_of(first), keys(first))
    assert runtime(changed)["image"] == "example.test/runtime:2"
    assert changed.revision.gateway_image == "example.test/gateway:2"


def test_an_operator_that_renders_differently_rolls_nothing(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rendered(build)
    monkeypatch.setattr("headway_operator.manifests.pod.GRACE_MARGIN_SECONDS", 16)
    again = rendered(build, status=status_of(first), existing=keys(first))
    assert again.revision == first.revision
    assert again.keep == first.keep
    assert [m for m in again.manifests if m["kind"] == "Deployment"] == []
    # A Deployment that is gone is made anew, and so is one whose spec changed.
    lost = rendered(build, status=status_of(first))
    assert lost.revision.name != first.revision.name
    assert len([m for m in lost.manifests if m["kind"] == "Deployment"]) == 2


def test_drift_is_repaired_while_rendering_is_the_same(build: Any) -> None:
    first = rendered(build)
    again = rendered(build, status=status_of(first), existing=keys(first))
    assert keys(again) == keys(first)


def test_an_image_in_the_template_is_the_one_that_is_pinned(build: Any) -> None:
    own = {"template": {"spec": {"containers": [{"name": "runtime", "image": "mine:3"}]}}}
    result = rendered(build, own)
    assert (runtime(result)["image"], result.revision.runtime_image) == ("mine:3", "mine:3")
    back = rendered(build, {}, None, status_of(result), keys(result))
    assert runtime(back)["image"] == "example.test/runtime:1"


def test_a_field_added_by_a_newer_operator_does_not_change_the_spec_hash(build: Any) -> None:
    spec = parse(build.manifest()).spec
    assert hash_spec(spec) == hash_spec(spec.model_copy(update={"kv_cache_dtype": "auto"}))


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


def test_a_damaged_pin_is_no_pin(build: Any) -> None:
    first = rendered(build)
    status = status_of(first)
    del status["revision"]["specHash"]
    newer = build.site(runtime_image="example.test/runtime:2")
    assert rendered(build, site=newer, status=status).revision.runtime_image == "example.test/runtime:2"


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


def test_another_number_of_nodes_is_another_revision(build: Any) -> None:
    site = build.site(optional_kinds=frozenset(names.OPTIONAL_KINDS))
    spec = {**SEVERAL_NODES, "gpu": {"count": 8}}
    two, four = (rendered(build, {**spec, "nodesPerReplica": number}, site) for number in (2, 4))
    assert two.revision.name != four.revision.name
    again = rendered(build, spec, site, status_of(two), keys(two))
    assert again.revision == two.revision


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
