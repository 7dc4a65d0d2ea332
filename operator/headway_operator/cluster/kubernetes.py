"""Services on Kubernetes: children by server-side apply, replicas through `/scale`, causes from the pods.

Whose object is whose is decided here: a child is written only where it does not exist yet or its owner is
this very service; anything else under its name is left alone and reported, and what merely carries the labels
of a child is never pruned or scaled. How the API is called is
`kubernetes_api`'s business, what a pod's state means `kubernetes_pods`'.

Rights needed in the service's namespace: get, list, create, patch, delete of the kinds in CHILD_KINDS; patch
of deployments/scale; list and patch of pods; create and patch of events; list of horizontalpodautoscalers
(without it, another scaler goes unnoticed); get of inferenceservices and patch of their status.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headway_operator.cluster import kubernetes_jobs as jobs
from headway_operator.cluster import kubernetes_pods as pods
from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_events import EventRecorder
from headway_operator.errors import ClusterError, ConflictError, ForbiddenError
from headway_operator.names import (
    API_VERSION,
    COMPONENT_LABEL,
    DELETION_COST_ANNOTATION,
    FIELD_MANAGER,
    GATEWAY_COMPONENT,
    HTTP_PORT,
    KIND,
    MANAGED_BY_LABEL,
    PUBLIC_KEY_FILE,
    REVISION_LABEL,
    RUNTIME_COMPONENT,
    SERVICE_LABEL,
    memory_config_map,
    selector_text,
    service_labels,
)
from headway_operator.spec.quality import config_map_key
from headway_operator.state import ChildKey, Manifest, Observed, Revision, ServiceKey, Site

logger = logging.getLogger(__name__)

CHILD_KINDS = ("Deployment", "Service", "ServiceAccount", "ConfigMap", "Role", "RoleBinding", "Job")
ADMIN_FOLDER = "/etc/headway/admin"
MEMORY_FILE = "memory.json"
# What was applied and is still there is applied anew this often, which undoes what others changed in it.
REAPPLY_SECONDS = 60.0


class KubernetesCluster:
    """`Cluster` on one API server, for all services of the operator."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        runtime_image: str,
        gateway_image: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._clock = clock
        self._site = Site(
            kind="kubernetes",
            runtime_image=runtime_image,
            gateway_image=gateway_image,
            admin_public_key_path=f"{ADMIN_FOLDER}/{PUBLIC_KEY_FILE}",
            gateway_backend_arguments=(),
            bind_port=HTTP_PORT,
        )
        self._events = EventRecorder(api)
        self._uids: dict[ServiceKey, str] = {}
        self._owned: dict[ServiceKey, dict[ChildKey, str]] = {}  # child -> uid of its owner, as last observed
        self._applied: dict[tuple[ServiceKey, ChildKey], tuple[str, float]] = {}
        self._may_see_scalers = True

    @property
    def site(self) -> Site:
        """The images of new revisions, the mounted public key, the pods' fixed port."""
        return self._site

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        self._uids.pop(key, None)
        self._owned.pop(key, None)
        for remembered in [pair for pair in self._applied if pair[0] == key]:
            del self._applied[remembered]

    async def fetch(self, key: ServiceKey) -> Manifest | None:
        """The InferenceService itself as it is now, status included; None when it is gone."""
        found = await self._api.get(KIND, key.namespace, key.name)
        if found is not None:
            # Deleted and made again between two passes, it is another one: the old checkpoint is not its own.
            self._uids[key] = found["metadata"]["uid"]
        return found

    async def observe(self, key: ServiceKey) -> Observed:
        """List the children, the pods and the autoscalers; all of it or a ClusterError."""
        uid = await self._uid(key)
        labels = selector_text({SERVICE_LABEL: key.name, MANAGED_BY_LABEL: FIELD_MANAGER})
        *lists, all_pods, scalers = await asyncio.gather(
            *(self._api.list(kind, key.namespace, labels) for kind in CHILD_KINDS),
            self._api.list("Pod", key.namespace, labels),
            self._list_scalers(key.namespace),
        )
        children = {
            ChildKey(kind, item["metadata"]["name"]): _owner_uid(item)
            for kind, items in zip(CHILD_KINDS, lists, strict=True)
            for item in items
        }
        self._owned[key] = children
        deployments = [
            d
            for d in lists[0]
            if _owner_uid(d) == uid and not _is_gateway(d) and not d["metadata"].get("deletionTimestamp")
        ]
        live = [pod for pod in all_pods if pods.is_live(pod)]
        runtime = [pod for pod in live if _label(pod, COMPONENT_LABEL) == RUNTIME_COMPONENT]
        replicas = [pods.replica(pod) for pod in runtime]
        for deployment in deployments:
            num_pods = sum(r.revision == _label(deployment, REVISION_LABEL) for r in replicas)
            if (uncreated := pods.uncreated_replica(deployment, num_pods)) is not None:
                replicas.append(uncreated)
        return Observed(
            revisions=tuple(_revision(deployment) for deployment in deployments),
            replicas=tuple(sorted(replicas, key=lambda replica: replica.name)),
            gateway=pods.gateway(pod for pod in live if _is_gateway(pod)),
            children=frozenset(child for child, owner in children.items() if owner == uid),
            evaluations=tuple(
                jobs.evaluation(job, all_pods)
                for job in lists[CHILD_KINDS.index("Job")]
                if _owner_uid(job) == uid and not job["metadata"].get("deletionTimestamp")
            ),
            url=f"http://{key.name}.{key.namespace}.svc",
            other_scaler=_other_scaler(key, scalers, {d["metadata"]["name"] for d in deployments}),
        )

    async def _list_scalers(self, namespace: str) -> list[Json]:
        if not self._may_see_scalers:
            return []
        try:
            return await self._api.list("HorizontalPodAutoscaler", namespace)
        except ForbiddenError as error:
            self._may_see_scalers = False
            logger.warning("Another autoscaler on a service would go unnoticed: %s", error)
            return []

    async def digests(self, key: ServiceKey, files: Sequence[str]) -> Mapping[str, str]:
        """Of keys in ConfigMaps; what lies on a claim or in a pod cannot be seen from here."""
        places = {file: config_map_key(file) for file in files}
        names = sorted({place[0] for place in places.values() if place is not None})
        maps = await asyncio.gather(*(self._api.get("ConfigMap", key.namespace, name) for name in names))
        found = dict(zip(names, maps, strict=True))
        digests = {
            file: "" if place is None else _digest_of(found[place[0]], place[1])
            for file, place in places.items()
        }
        return {file: digest for file, digest in digests.items() if digest is not None}

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """Server-side apply one child. ConflictError when an object of that name belongs to someone else."""
        child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        existing = self._owned.get(key, {})
        known_digest, applied_at = self._applied.get((key, child), ("", 0.0))
        is_fresh = self._clock() - applied_at < REAPPLY_SECONDS
        if child in existing and digest == known_digest and is_fresh:
            return
        uid = _owner_uid(manifest)
        if existing.get(child) != uid:
            # Not known to be ours: whatever lies under this name may only be written if it is nothing yet.
            found = await self._api.get(child.kind, key.namespace, child.name)
            if found is not None and _owner_uid(found) != uid:
                raise ConflictError(
                    f"{child.kind} {child.name!r} exists and is not owned by this {KIND}; "
                    "delete it, or give the service another name"
                )
        await self._api.apply(manifest, force=True)
        self._applied[(key, child)] = (digest, self._clock())
        self._owned.setdefault(key, {})[child] = uid

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        """Set a Deployment's replicas through its scale subresource."""
        body = {"spec": {"replicas": replicas}}
        if await self._api.patch("Deployment", key.namespace, revision, body, "scale") is None:
            raise ClusterError(f"cannot scale {revision!r}: there is no such Deployment")

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        """Delete one child of ours."""
        await self._api.delete(child.kind, key.namespace, child.name)
        self._applied.pop((key, child), None)

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        """Annotate the pod; one that has gone needs none."""
        body = {"metadata": {"annotations": {DELETION_COST_ANNOTATION: str(cost)}}}
        await self._api.patch("Pod", key.namespace, replica, body)

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Server-side apply the status, so that what is no longer said goes away."""
        metadata = {"name": key.name, "namespace": key.namespace}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": dict(status)}
        written = await self._api.apply(body, force=True, subresource="status")
        self._uids[key] = written["metadata"]["uid"]

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Record an event on the service; too many in a short time are left out."""
        uid = await self._uid(key)
        if not await self._events.record(key, uid, kind, reason, message, self._clock()):
            logger.debug("%s: event left out, too many lately: %s %s", key, reason, message)

    async def load_memory(self, key: ServiceKey) -> Mapping[str, Any] | None:
        """The checkpoint in the ConfigMap NAME-memory."""
        found = await self._api.get("ConfigMap", key.namespace, memory_config_map(key.name))
        if found is None or _owner_uid(found) != await self._uid(key):
            return None  # of a service that had this name before
        try:
            memory = json.loads(found.get("data", {}).get(MEMORY_FILE, "null"))
        except ValueError:
            logger.warning("%s: the checkpoint is not JSON; the controller starts without it", key)
            return None
        return memory if isinstance(memory, dict) else None

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any]) -> None:
        """Write the checkpoint."""
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": key.name, "uid": await self._uid(key)}
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": memory_config_map(key.name),
                "namespace": key.namespace,
                "labels": service_labels(key.name),
                "ownerReferences": [{**owner, "controller": True}],
            },
            "data": {MEMORY_FILE: json.dumps(memory, separators=(",", ":"))},
        }
        await self.apply(key, manifest)

    async def _uid(self, key: ServiceKey) -> str:
        if key not in self._uids:
            found = await self._api.get(KIND, key.namespace, key.name)
            if found is None:
                raise ClusterError(f"{KIND} {key} is gone")
            self._uids[key] = found["metadata"]["uid"]
        return self._uids[key]


def _label(item: Json, label: str) -> str:
    return str(item["metadata"].get("labels", {}).get(label, ""))


def _is_gateway(item: Json) -> bool:
    return _label(item, COMPONENT_LABEL) == GATEWAY_COMPONENT


def _owner_uid(item: Mapping[str, Any]) -> str:
    """The uid of the InferenceService that controls the object, or ""."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o["kind"] == KIND and o.get("controller")), "")


def _digest_of(config_map: Json | None, key: str) -> str | None:
    for part in ("data", "binaryData"):
        if config_map is not None and key in (config_map.get(part) or {}):
            return hashlib.sha256(str(config_map[part][key]).encode()).hexdigest()
    return None


def _revision(deployment: Json) -> Revision:
    metadata = deployment["metadata"]
    return Revision(
        name=metadata["name"],
        hash=_label(deployment, REVISION_LABEL),
        replicas=int(deployment["spec"].get("replicas", 1)),
        created_at=pods.seconds_of(metadata["creationTimestamp"]),
    )


def _other_scaler(key: ServiceKey, scalers: list[Json], deployments: set[str]) -> str:
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        is_service = target["kind"] == KIND and target["name"] == key.name
        if is_service or (target["kind"] == "Deployment" and target["name"] in deployments):
            return f"HorizontalPodAutoscaler/{scaler['metadata']['name']}"
    return ""
