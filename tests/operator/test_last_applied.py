"""What was applied of a workload is read back from it, and is of no use where it is about anything else."""

import base64
import copy
import json
import random
import zlib
from typing import Any

import pytest
from tests.operator.rendering import FULL_SPEC, SEVERAL_NODES, child, rendered

from headway_operator import names
from headway_operator.manifests.last_applied import holds, last_applied, with_last_applied
from headway_operator.names import LAST_APPLIED_ANNOTATION, ServiceKey

KEY, UID = ServiceKey("team", "demo"), "0000-uid"
Json = dict[str, Any]


@pytest.fixture
def workloads(build: Any) -> dict[str, Json]:
    """A revision's Deployment and LeaderWorkerSet, and the gateway's Deployment, as they are applied."""
    site = build.site(optional_kinds=frozenset(names.OPTIONAL_KINDS))
    one, groups = rendered(build), rendered(build, {**SEVERAL_NODES, "gpu": {"count": 8}}, site)
    return {
        "revision": child(one, "Deployment", one.revision.name),
        "gateway": child(one, "Deployment", "demo-gateway"),
        "groups": child(groups, names.LEADER_WORKER_SET, groups.revision.name),
    }


def read(found: Json, *, allows_unrestricted: bool = False) -> Json | None:
    return last_applied(found, KEY, UID, allows_unrestricted=allows_unrestricted)


def edited(applied: Json, change: Any) -> Json:
    """The object as it was applied, with an annotation that says something else."""
    other = copy.deepcopy(applied)
    change(other)
    annotations = {LAST_APPLIED_ANNOTATION: packed(json.dumps(other).encode())}
    return {**applied, "metadata": {**applied["metadata"], "annotations": annotations}}


def packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize("which", ["revision", "gateway", "groups"])
def test_what_was_applied_is_read_back(workloads: dict[str, Json], which: str) -> None:
    applied = workloads[which]
    written = with_last_applied(applied)
    assert read(written) == applied
    assert written["spec"] == applied["spec"], "nothing in the pods tells of it"
    assert len(written["metadata"]["annotations"][LAST_APPLIED_ANNOTATION]) < 3000
    assert "annotations" not in applied["metadata"], "what was rendered is not written to"


def test_one_that_is_too_large_goes_without(workloads: dict[str, Json]) -> None:
    large = copy.deepcopy(workloads["revision"])
    noise = random.Random(1).randbytes(100_000).hex()  # compressed, half of it is left
    large["spec"]["template"]["metadata"]["annotations"] = {"noise": noise}
    assert with_last_applied(large) == large
    large["spec"]["template"]["metadata"]["annotations"] = {"noise": noise[:100_000]}
    assert read(with_last_applied(large)) == large


def test_what_an_earlier_version_wrote_says_nothing(workloads: dict[str, Json]) -> None:
    assert read(workloads["revision"]) is None


def change_container(**fields: Any) -> Any:
    def change(manifest: Json) -> None:
        manifest["spec"]["template"]["spec"]["containers"][0].update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda one: one["metadata"].update(name="demo-gateway"), "metadata.name"),
        (lambda one: one["metadata"].update(namespace="kube-system"), "metadata.namespace"),
        (lambda one: one.update(kind="DaemonSet"), "kind: 'DaemonSet'"),
        (lambda one: one.update(apiVersion="apps/v2"), "apiVersion"),
        (lambda one: one["metadata"]["ownerReferences"][0].update(uid="other"), "ownerReferences"),
        (lambda one: one["metadata"]["ownerReferences"].append({"uid": "x"}), "ownerReferences"),
        (lambda one: one["metadata"].update(ownerReferences=[]), "ownerReferences"),
        (lambda one: one["metadata"]["labels"].pop(names.SERVICE_LABEL), "metadata.labels"),
        (lambda one: one["metadata"]["labels"].update({names.REVISION_LABEL: "0"}), "metadata.labels"),
        (lambda one: one["metadata"].update(finalizers=["a/b"]), "other fields"),
        (lambda one: one.update(status={}), "other fields"),
        (lambda one: one["spec"].update(replicas=9), "other fields"),
        (lambda one: one.pop("metadata"), "none of ours"),
        (lambda one: one["spec"].pop("template"), "none of ours"),
        (lambda one: one["spec"]["template"]["spec"].update(hostPID=True), "hostPID"),
        (lambda one: one["spec"]["template"]["spec"].update(volumes="all"), "not a list"),
        (change_container(securityContext={"privileged": True}), "privileged"),
    ],
)
def test_an_annotation_about_anything_else_is_of_no_use(
    workloads: dict[str, Json], change: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(edited(workloads["revision"], change))


def test_a_site_that_allows_it_has_unrestricted_pods_back(workloads: dict[str, Json]) -> None:
    found = edited(workloads["revision"], lambda one: one["spec"]["template"]["spec"].update(hostPID=True))
    applied = read(found, allows_unrestricted=True)
    assert applied is not None
    assert applied["spec"]["template"]["spec"]["hostPID"] is True


def test_no_site_has_pods_back_that_get_the_operators_key(workloads: dict[str, Json]) -> None:
    volume = {"name": "key", "secret": {"secretName": names.OPERATOR_KEY_SECRET}}
    found = edited(
        workloads["revision"], lambda one: one["spec"]["template"]["spec"].update(volumes=[volume])
    )
    for allows_unrestricted in (False, True):
        with pytest.raises(ValueError, match="no pod may have it"):
            read(found, allows_unrestricted=allows_unrestricted)


def test_both_templates_of_a_group_are_held_to_the_rules(workloads: dict[str, Json]) -> None:
    for part in ("leaderTemplate", "workerTemplate"):
        found = edited(
            workloads["groups"],
            lambda one, part=part: one["spec"]["leaderWorkerTemplate"][part]["spec"].update(hostIPC=True),
        )
        with pytest.raises(ValueError, match=f"{part}.spec.hostIPC"):
            read(found)


def test_a_replica_has_no_account_of_a_gateway(workloads: dict[str, Json]) -> None:
    account = {"automountServiceAccountToken": True, "serviceAccountName": "demo-gateway"}
    assert workloads["gateway"]["spec"]["template"]["spec"]["serviceAccountName"] == "demo-gateway"
    with pytest.raises(ValueError, match="automountServiceAccountToken"):
        read(edited(workloads["revision"], lambda one: one["spec"]["template"]["spec"].update(account)))


@pytest.mark.parametrize(
    "annotation",
    [
        pytest.param("not base64", id="text"),
        pytest.param(base64.b64encode(b"not compressed").decode(), id="not compressed"),
        pytest.param(packed(b"{"), id="not JSON"),
        pytest.param(packed(b"[]"), id="a list"),
        pytest.param(packed(b"[" * 200_000), id="too deep"),
        pytest.param(packed(json.dumps({"a": " " * 2**21}).encode()), id="too large"),
        pytest.param("ü", id="no ASCII"),
    ],
)
def test_an_annotation_that_cannot_be_read_is_of_no_use(workloads: dict[str, Json], annotation: str) -> None:
    found = copy.deepcopy(workloads["revision"])
    found["metadata"]["annotations"] = {LAST_APPLIED_ANNOTATION: annotation}
    with pytest.raises(ValueError, match=LAST_APPLIED_ANNOTATION):
        read(found)


def pod(**fields: Any) -> Json:
    container: Json = {"name": "runtime", "image": "runtime:1", "args": ["serve", "--port"]}
    container |= {"resources": {"limits": {"cpu": 1}}, "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    volumes = [{"name": "tmp", "emptyDir": {}}]
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    whole = {"containers": [container], "volumes": volumes, "tolerations": tolerations, "hostPID": False}
    return {**whole, **fields}


def changed(change: Any) -> Json:
    found = copy.deepcopy(pod())
    change(found)
    return found


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda found: found.update(dnsPolicy="ClusterFirst"), id="a default"),
        pytest.param(
            lambda found: found["containers"][0]["resources"].update(limits={"cpu": "1"}), id="as text"
        ),
        pytest.param(
            lambda found: found["containers"][0]["resources"].update(limits={"cpu": "1000m"}), id="a unit"
        ),
        pytest.param(lambda found: found["containers"].insert(0, {"name": "mesh"}), id="a sidecar"),
        pytest.param(lambda found: found["containers"][0].update(env=[{"name": "A"}]), id="a list of others"),
    ],
)
def test_what_others_added_is_no_change(change: Any) -> None:
    assert holds(changed(change), pod())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda found: found["containers"][0].update(image="other:1"), id="image"),
        pytest.param(lambda found: found["containers"][0].update(name="other"), id="container"),
        pytest.param(lambda found: found["containers"][0]["args"].append("--x"), id="one argument more"),
        pytest.param(lambda found: found["containers"][0]["args"].reverse(), id="order"),
        pytest.param(
            lambda found: found["containers"][0]["resources"].update(limits={"cpu": "2"}), id="a quantity"
        ),
        pytest.param(
            lambda found: found["containers"][0]["resources"].update(limits={}), id="no quantity at all"
        ),
        pytest.param(
            lambda found: found.update(volumes=[{"name": "tmp", "hostPath": {"path": "/"}}]), id="volume"
        ),
        pytest.param(lambda found: found["tolerations"].append({"operator": "Exists"}), id="a toleration"),
        pytest.param(lambda found: found.pop("tolerations"), id="a field less"),
        pytest.param(lambda found: found.update(hostPID=True), id="a flag"),
        pytest.param(lambda found: found.update(hostPID=0), id="another type"),
    ],
)
def test_what_others_changed_is_seen(change: Any) -> None:
    assert not holds(changed(change), pod())


def test_every_field_of_a_large_spec_is_compared(build: Any) -> None:
    spec = {**FULL_SPEC, "template": {"metadata": {"annotations": {"note": "x"}}}}
    result = rendered(build, spec, build.site(allows_unrestricted=True))
    applied = child(result, "Deployment", result.revision.name)
    assert holds(applied, applied)
    seen = 0
    for path, value in leaves(applied):
        found = copy.deepcopy(applied)
        at(found, path[:-1])[path[-1]] = f"{value}-other"
        assert not holds(found, applied), path
        seen += 1
    assert seen > 100


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in inner:
            yield from leaves(one, (*path, name))
    else:
        yield path, value


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value
