"""Which pods are a service's: those that its own children have made, whatever labels others carry."""

from typing import Any

import pytest

from headway_operator.cluster.kubernetes_observation import Found
from headway_operator.cluster.kubernetes_trim import trim
from headway_operator.names import (
    GROUP_INDEX_LABEL,
    GROUP_SET_LABEL,
    KIND,
    POD_TEMPLATE_HASH_LABEL,
    component_labels,
)


def child(name: str, owner: str = "mine") -> dict[str, Any]:
    owners = [{"kind": KIND, "uid": owner, "controller": True}]
    return {"metadata": {"name": name, "uid": f"uid-of-{name}", "ownerReferences": owners}}


CHILDREN = {
    "Deployment": [child("demo-1a2b"), child("demo-gateway"), child("demo-old", "former")],
    "LeaderWorkerSet": [child("demo-3c4d"), child("demo-new", "former")],
    "Job": [child("demo-quality-1a2b"), child("demo-quality-old", "former")],
}


def pod(kind: str, name: str, *, uid: str = "u", controller: bool = True, **labels: str) -> dict[str, Any]:
    """Made by a controller of this kind and name; the hash in its labels is h unless told otherwise."""
    group = {GROUP_SET_LABEL: labels.get("group", ""), GROUP_INDEX_LABEL: labels.get("index", "")}
    told = {POD_TEMPLATE_HASH_LABEL: labels.get("hash", "h")} if kind == "ReplicaSet" else group
    owner = {"apiVersion": "a", "kind": kind, "name": name, "uid": uid, "controller": controller}
    metadata = {"name": "one", "labels": component_labels("demo", "runtime") | told}
    return {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {}, "status": {}}


OWN = {
    "of a revision": pod("ReplicaSet", "demo-1a2b-h"),
    "of the gateway": pod("ReplicaSet", "demo-gateway-h"),
    "a leader": pod("StatefulSet", "demo-3c4d", group="demo-3c4d", index="0"),
    "a worker": pod("StatefulSet", "demo-3c4d-12", group="demo-3c4d", index="12"),
    "of a Job": pod("Job", "demo-quality-1a2b", uid="uid-of-demo-quality-1a2b"),
}
FOREIGN = {
    "a ReplicaSet's that is nobody's": pod("ReplicaSet", "demo-9z9z-h"),
    "a ReplicaSet's of another template": pod("ReplicaSet", "demo-1a2b-h", hash="i"),
    "a ReplicaSet's of a former service": pod("ReplicaSet", "demo-old-h"),
    "not the ReplicaSet's to control": pod("ReplicaSet", "demo-1a2b-h", controller=False),
    "a ReplicaSet's with the name of a group": pod("ReplicaSet", "demo-3c4d-h"),
    "a group's of a former service": pod("StatefulSet", "demo-new", group="demo-new", index="0"),
    "a StatefulSet's of its own": pod("StatefulSet", "else", group="demo-3c4d", index="0"),
    "a worker's of another group": pod("StatefulSet", "demo-3c4d-1", group="demo-3c4d", index="0"),
    "a StatefulSet's with the name of a revision": pod("StatefulSet", "demo-1a2b", group="demo-1a2b"),
    "a Job's of the same name": pod("Job", "demo-quality-1a2b", uid="u"),
    "a Job's of a former service": pod("Job", "demo-quality-old", uid="uid-of-demo-quality-old"),
    "a Deployment's, which makes none": pod("Deployment", "demo-1a2b"),
    "made by hand": {"metadata": {"name": "one", "labels": component_labels("demo", "runtime")}},
}


@pytest.mark.parametrize(
    ("one", "want"),
    [(one, True) for one in OWN.values()] + [(one, False) for one in FOREIGN.values()],
    ids=[*OWN, *FOREIGN],
)
def test_only_what_a_child_has_made_is_a_services(one: dict[str, Any], want: object) -> None:
    """As it is written, and as it is kept in memory."""
    for read in (one, trim("Pod", one)):
        found = Found(CHILDREN, [read])
        assert (found.of_service("mine").pods == [read]) == want
    assert Found({}, [one]).of_service("mine").pods == []
