"""What objects of both our kinds have in common on Kubernetes: a status, events, and children that they own.

A child is written only where it does not exist yet or its owner is this very object; anything else under its
name is left alone and reported.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_applied import AppliedChildren
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_events import EventRecorder
from headway_operator.cluster.kubernetes_fields import FieldKeeper
from headway_operator.cluster.kubernetes_observation import owner_uid
from headway_operator.cluster.kubernetes_undeclared import Undeclared, undeclared, without
from headway_operator.errors import ClusterError, ConflictError
from headway_operator.manifests.last_applied import with_last_applied
from headway_operator.names import API_VERSION, REVISION_KINDS
from headway_operator.state import ChildKey, Manifest, ServiceKey

logger = logging.getLogger(__name__)


class KubernetesChildren:
    """All objects of one kind of ours. cache: what is read from memory; the API is asked for the rest."""

    def __init__(
        self, api: KubernetesApi, kind: str, cache: KubernetesCache, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._kind = kind
        self._cache = cache
        self._clock = clock
        self._events = EventRecorder(api, kind)
        self._fields = FieldKeeper(api, clock)
        self._applied = AppliedChildren(cache, clock)
        self._undeclared = Undeclared(kind)
        self._uids: dict[ServiceKey, str] = {}
        self._owned: dict[ServiceKey, dict[ChildKey, str]] = {}  # child -> uid of its owner, as last observed

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of an object that is gone."""
        self._uids.pop(key, None)
        self._owned.pop(key, None)
        self._applied.forget(key)
        self._events.forget(key)
        self._fields.forget(key)

    async def fetch(self, key: ServiceKey, *, from_memory: bool = True) -> Manifest | None:
        """The object itself as it is now, status included; None when it is gone.

        from_memory: whether what watches have brought will do, where they have.
        """
        is_known, found = self._cache.get(self._kind, key.namespace, key.name)
        if not (is_known and from_memory):
            found = await self._api.get(self._kind, key.namespace, key.name)
        if found is not None:
            # Deleted and made again between two passes, it is another one: the old checkpoint is not its own.
            self._uids[key] = found["metadata"]["uid"]
        return found

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """Server-side apply one child. ConflictError when an object of that name belongs to someone else,
        FieldConflictError when someone else sets the same fields again and again.
        """
        child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        existing = self._owned.get(key, {})
        if child in existing and self._applied.is_as_applied(key, child, manifest):
            return
        uid = owner_uid(manifest)
        if existing.get(child) != uid:
            # Not known to be ours: whatever lies under this name may only be written if it is nothing yet.
            found = await self._api.get(child.kind, key.namespace, child.name)
            if found is not None and owner_uid(found) != uid:
                raise ConflictError(
                    f"{child.kind} {child.name!r} exists and is not owned by this {self._kind}; "
                    f"delete it, or give the {self._kind} another name"
                )
        await self._write(key, child, manifest)
        self._owned.setdefault(key, {})[child] = uid

    async def _write(self, key: ServiceKey, child: ChildKey, manifest: Manifest) -> None:
        """Apply it, with what is applied on it where it may come to be kept as it is."""
        whole = with_last_applied(manifest) if child.kind in REVISION_KINDS else manifest
        written = await self._fields.apply(key, child, whole)
        self._applied.remember(key, child, manifest, written)

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        """Delete one child of ours."""
        await self._api.delete(child.kind, key.namespace, child.name)
        self._applied.forget(key, child)

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a status an API server with older definitions keeps, as far as it has said so."""
        paths = self._undeclared.left_out(self._clock())
        return without({"status": status}, paths)["status"] if paths else status

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Server-side apply the status, so that what is no longer said goes away."""
        metadata = {"name": key.name, "namespace": key.namespace}
        body = {"apiVersion": API_VERSION, "kind": self._kind, "metadata": metadata, "status": dict(status)}
        while True:
            try:
                written = await self._api.apply(body, force=True, subresource="status")
                break
            except ClusterError as error:
                paths = undeclared(str(error))
                less = without(body, paths)
                if less == body:
                    raise
                self._undeclared.learn(paths, self._clock())
                body = less
        self._uids[key] = written["metadata"]["uid"]
        self._cache.put(written)

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Record an event on the object; too many in a short time are left out."""
        uid = await self._uid(key)
        if not await self._events.record(key, uid, kind, reason, message, self._clock()):
            logger.debug("%s: event left out, too many lately: %s %s", key, reason, message)

    async def _of_owner(self, kind: str, key: ServiceKey, labels: str) -> list[Json]:
        """Those with the label of this object."""
        held = self._cache.objects(kind, key)
        return await self._api.list(kind, key.namespace, labels) if held is None else held

    async def _uid(self, key: ServiceKey) -> str:
        if key not in self._uids:
            found = await self._api.get(self._kind, key.namespace, key.name)
            if found is None:
                raise ClusterError(f"{self._kind} {key} is gone")
            self._uids[key] = found["metadata"]["uid"]
        return self._uids[key]
