"""Services on Kubernetes: children by server-side apply, replicas through `/scale`, causes from the pods.

What merely carries the labels of a child is never pruned or scaled. How children are written is the business
of `kubernetes_children`, how the API is called that of `kubernetes_api`, what objects mean that of
`kubernetes_observation`.

Rights needed in the service's namespace: get, list, watch, create, patch, delete of the kinds in CHILD_KINDS
and, unless they are to be left out, all but watch of the optional ones; patch of deployments/scale and
leaderworkersets/scale; list, watch and patch of pods; list, create and patch of events (without list, a probe
that failed or a volume that is not mounted goes unnamed); list and watch of horizontalpodautoscalers (without
it, another scaler goes unnoticed); get, list and watch of inferenceservices and patch of their status.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway_operator.cluster import kubernetes_pods
from headway_operator.cluster.checkpoint_data import data_of, memory_in
from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_children import KubernetesChildren
from headway_operator.cluster.kubernetes_discovery import Discovery
from headway_operator.cluster.kubernetes_observation import Found, observed, owner_uid
from headway_operator.cluster.kubernetes_other_operator import OtherOperators
from headway_operator.errors import AbsentError, ClusterError, ForbiddenError, OtherOperatorError
from headway_operator.manifests.last_applied import holds, last_applied
from headway_operator.names import (
    API_VERSION,
    CACHE_KIND,
    CLAIM,
    DELETION_COST_ANNOTATION,
    FIELD_MANAGER,
    HTTP_PORT,
    KIND,
    MANAGED_BY_LABEL,
    OPTIONAL_KINDS,
    PUBLIC_KEY_FILE,
    REVISION_KINDS,
    SERVICE_LABEL,
    memory_config_map,
    selector_text,
    service_labels,
)
from headway_operator.spec.quality import config_map_key
from headway_operator.state import ChildKey, Manifest, Observed, ServiceKey, Site

logger = logging.getLogger(__name__)

CHILD_KINDS = (
    *("Deployment", "Service", "ServiceAccount", "ConfigMap", "Role", "RoleBinding", "Job"),
    *("PodDisruptionBudget", "NetworkPolicy"),
)
SCALER = "HorizontalPodAutoscaler"
# What a pass reads, and by which labels: kept in memory where it can be.
CACHED_KINDS = {
    KIND: "",
    CACHE_KIND: "",
    SCALER: "",
    **dict.fromkeys(
        (*CHILD_KINDS, *OPTIONAL_KINDS, CLAIM, "Pod"), selector_text({MANAGED_BY_LABEL: FIELD_MANAGER})
    ),
}
ADMIN_FOLDER = "/etc/headway/admin"
APPLIED_FILE = "applied.json"
# Engines of one service, and other pods of it, whose events are asked for in one pass: one tells enough, all
# at once are a storm.
MAX_PODS_WITH_EVENTS = 3


class KubernetesCluster(KubernetesChildren):
    """`Cluster` on one API server, for all services of the operator."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        runtime_image: str,
        gateway_image: str,
        operator_namespace: str = "",
        lease_namespace: str = "",
        monitoring_namespace: str = "",
        monitoring_labels: Sequence[tuple[str, str]] = (),
        runbook_url: str = "",
        image_pull_secrets: Sequence[str] = (),
        allows_unrestricted: bool = False,
        is_ipv6: bool = False,
        clock: Callable[[], float] = time.time,
        cache: KubernetesCache | None = None,
    ) -> None:
        """cache: what is read from memory. Without one, and for kinds that it lacks, the API is asked.

        lease_namespace: by which operators are told apart; "": there is no other.
        """
        super().__init__(api, KIND, cache or KubernetesCache(api, (), {}), clock)
        self._site = Site(
            kind="kubernetes",
            runtime_image=runtime_image,
            gateway_image=gateway_image,
            admin_public_key_path=f"{ADMIN_FOLDER}/{PUBLIC_KEY_FILE}",
            gateway_backend_arguments=(),
            bind_port=HTTP_PORT,
            operator_namespace=operator_namespace,
            monitoring_namespace=monitoring_namespace,
            monitoring_labels=tuple(monitoring_labels),
            runbook_url=runbook_url,
            image_pull_secrets=tuple(image_pull_secrets),
            allows_unrestricted=allows_unrestricted,
            is_ipv6=is_ipv6,
        )
        self._others = OtherOperators(api, self._cache, lease_namespace, clock)
        self._discovery = Discovery(api, clock)
        self._unseen_kinds: set[str] = set()

    @property
    def site(self) -> Site:
        """What pods are rendered with, and which optional kinds there are now."""
        return replace(self._site, optional_kinds=self._discovery.kinds)

    async def check_alone(self, key: ServiceKey) -> None:
        """Raise OtherOperatorError where another one has written the checkpoint lately."""
        if other := await self._others.of(key, await self._uid(key)):
            self._applied.forget(key)
            raise OtherOperatorError(other, self._others.own)

    async def observe(self, key: ServiceKey) -> Observed:
        """The children, the pods and the autoscalers; all of it or a ClusterError."""
        uid = await self._uid(key)
        labels = selector_text({SERVICE_LABEL: key.name, MANAGED_BY_LABEL: FIELD_MANAGER})
        await self._discovery.refresh()
        children = await self._all_of(key, (*CHILD_KINDS, *sorted(self._discovery.kinds), "Pod"), labels)
        pods = children.pop("Pod")
        found = Found(children, pods, await self._scalers(key.namespace))
        self._owned[key] = found.owners()
        found = found.of_service(uid)
        events = {
            **await self._events_of(found.engine_pods()),
            **await self._events_of(found.other_pods()),
        }
        return observed(key, uid, replace(found, events=events))

    async def _all_of(self, key: ServiceKey, kinds: Sequence[str], labels: str) -> dict[str, list[Json]]:
        """What there is of each kind: from memory, and what is not there from the API server, all at once."""
        held = {kind: self._cache.objects(kind, key) for kind in kinds}
        known = {kind: objects for kind, objects in held.items() if objects is not None}
        if unknown := [kind for kind in kinds if kind not in known]:
            asked = await asyncio.gather(*(self._ask_for(kind, key.namespace, labels) for kind in unknown))
            known |= zip(unknown, asked, strict=True)
        return known

    async def _ask_for(self, kind: str, namespace: str, labels: str) -> list[Json]:
        if kind in OPTIONAL_KINDS:
            return await self._discovery.children(kind, namespace, labels)
        return await self._api.list(kind, namespace, labels)

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """As for every kind of ours; an optional kind whose definition has gone is not rendered again."""
        try:
            await super().apply(key, manifest)
        except AbsentError:
            if manifest["kind"] in OPTIONAL_KINDS:
                self._discovery.lost(manifest["kind"])
            raise

    async def repair(self, key: ServiceKey, child: ChildKey) -> None:
        """Apply once more what its annotation says was applied, where others have changed that.

        Read only where what is kept in memory shows that somebody changed it. Nothing can be done for one
        without the annotation, as versions before there was one left it, or with one of no use.
        """
        if self._applied.is_as_left(key, child):
            return
        uid, found = await self._uid(key), await self._api.get(child.kind, key.namespace, child.name)
        if found is None or owner_uid(found) != uid or found["metadata"].get("deletionTimestamp"):
            return
        try:
            manifest = last_applied(found, key, uid, allows_unrestricted=self._site.allows_unrestricted)
        except ValueError as error:
            logger.warning("%s: %s %s is left as it is: %s", key, child.kind, child.name, error)
            manifest = None
        if manifest is None:
            self._applied.saw(key, child, found)
        elif holds(found, manifest):
            self._applied.remember(key, child, manifest, found)
        else:
            logger.info("%s: what others changed in %s %s is undone", key, child.kind, child.name)
            await self._write(key, child, manifest)

    async def _scalers(self, namespace: str) -> list[Json]:
        held = self._cache.all_in(SCALER, namespace)
        loss = "another autoscaler on a service would go unnoticed"
        return await self._list_if_allowed(SCALER, namespace, loss) if held is None else held

    async def _events_of(self, pods: Sequence[Mapping[str, Any]]) -> dict[str, list[Json]]:
        """The events of pods that need them, by their uids; of the newest few."""
        now = self._clock()
        suspects = [pod for pod in pods if kubernetes_pods.needs_events(pod, now)]
        if not suspects:
            return {}
        newest = sorted(suspects, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
        asked = [pod["metadata"] for pod in newest[:MAX_PODS_WITH_EVENTS]]
        lists = await asyncio.gather(
            *(
                self._list_if_allowed(
                    "Event",
                    metadata["namespace"],
                    "a probe that failed or a volume that is not mounted would go unnamed",
                    fields=f"involvedObject.kind=Pod,involvedObject.uid={metadata['uid']}",
                )
                for metadata in asked
            )
        )
        return {metadata["uid"]: found for metadata, found in zip(asked, lists, strict=True)}

    async def _list_if_allowed(self, kind: str, namespace: str, loss: str, fields: str = "") -> list[Json]:
        """What a role may leave out; said once. loss: what is lost without."""
        if kind in self._unseen_kinds:
            return []
        try:
            return await self._api.list(kind, namespace, fields=fields)
        except ForbiddenError as error:
            self._unseen_kinds.add(kind)
            logger.warning("without a right to list, %s: %s", loss, error)
            return []

    async def model_caches(self, namespace: str, names: Sequence[str]) -> Mapping[str, Manifest | None]:
        """From memory where that is current; the API is asked for the others."""
        found = {name: self._cache.get(CACHE_KIND, namespace, name) for name in names}
        return {
            name: item if is_known else await self._api.get(CACHE_KIND, namespace, name)
            for name, (is_known, item) in found.items()
        }

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

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        """Set the replicas of a revision's object through its scale subresource."""
        body, owned = {"spec": {"replicas": replicas}}, self._owned.get(key, {})
        kind = next((one for one in REVISION_KINDS if ChildKey(one, revision) in owned), "Deployment")
        if await self._api.patch(kind, key.namespace, revision, body, "scale") is None:
            raise ClusterError(f"cannot scale {revision!r}: there is no such {kind}")

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        """Annotate the pod; one that has gone needs none."""
        body = {"metadata": {"annotations": {DELETION_COST_ANNOTATION: str(cost)}}}
        await self._api.patch("Pod", key.namespace, replica, body)

    async def load_memory(self, key: ServiceKey) -> Mapping[str, Any] | None:
        """The checkpoint in the ConfigMap NAME-memory; with it, what was applied of this service."""
        found = await self._api.get("ConfigMap", key.namespace, memory_config_map(key.name))
        if found is None or owner_uid(found) != await self._uid(key):
            return None  # of a service that had this name before
        try:
            self._applied.resume(key, found.get("data", {}).get(APPLIED_FILE, "[]"))
        except ValueError as error:
            logger.warning("%s: %s of the checkpoint is of no use: %s", key, APPLIED_FILE, error)
        try:
            return memory_in(found)
        except ValueError:
            logger.warning("%s: the checkpoint is not JSON; the controller starts without it", key)
            return None

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any], until: float) -> None:
        """Write the checkpoint, and what was applied."""
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": key.name, "uid": await self._uid(key)}
        name = memory_config_map(key.name)
        metadata = {
            "name": name,
            "namespace": key.namespace,
            "labels": service_labels(key.name),
            "ownerReferences": [{**owner, "controller": True}],
        }
        kept = data_of(memory)
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._others.marked(metadata, until),
            **kept,
            "data": {
                **kept.get("data", {}),
                APPLIED_FILE: self._applied.to_json(key, besides=ChildKey("ConfigMap", name)),
            },
        }
        await self.apply(key, manifest)


def _digest_of(config_map: Json | None, key: str) -> str | None:
    for part in ("data", "binaryData"):
        if config_map is not None and key in (config_map.get(part) or {}):
            return hashlib.sha256(str(config_map[part][key]).encode()).hexdigest()
    return None
