"""Which operator looks after a service, where several have a Lease of their own.

A Lease keeps operators of one namespace apart. Those of two namespaces hold one each, and where both look
after the same service, both would write, as the same field manager, so that no conflict would ever be seen.
So the checkpoint of each service names the namespace of its writer's Lease, and until when that counts.
Whoever finds another's that counts still leaves the service alone. That compares the clocks of two machines;
it counts for minutes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_observation import label_of, owner_uid
from headway_operator.names import (
    OPERATOR_LABEL,
    OPERATOR_UNTIL_ANNOTATION,
    ServiceKey,
    memory_config_map,
)
from headway_operator.times import seconds, timestamp


class OtherOperators:
    """Than the one whose Lease is in namespace `own`; "": nobody is told apart. clock: since the epoch."""

    def __init__(
        self, api: KubernetesApi, cache: KubernetesCache, own: str, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self.own = own

    async def of(self, key: ServiceKey, uid: str) -> str:
        """The namespace of the Lease of another one that looks after the service with this uid, or "".

        From memory, unless that shows no reason not to take the service over: it may be behind.
        """
        if not self.own:
            return ""
        name = memory_config_map(key.name)
        is_known, found = self._cache.get("ConfigMap", key.namespace, name)
        if is_known and self._is_free(found, uid):
            return ""
        if not (is_known and self._counts(found)):
            found = await self._api.get("ConfigMap", key.namespace, name)
        return "" if self._is_free(found, uid) or not self._counts(found) else _writer(found, uid)

    def marked(self, metadata: Json, until: float) -> Json:
        """Metadata of a checkpoint of this operator's, which counts until then, seconds since the epoch."""
        if not self.own:
            return metadata
        labels = {**metadata["labels"], OPERATOR_LABEL: self.own}
        return {**metadata, "labels": labels, "annotations": {OPERATOR_UNTIL_ANNOTATION: timestamp(until)}}

    def _is_free(self, checkpoint: Mapping[str, Any] | None, uid: str) -> bool:
        return _writer(checkpoint, uid) in ("", self.own)

    def _counts(self, checkpoint: Mapping[str, Any] | None) -> bool:
        """Whether whoever wrote it has not been silent for too long."""
        annotations = {} if checkpoint is None else checkpoint["metadata"].get("annotations") or {}
        try:
            return self._clock() < seconds(annotations.get(OPERATOR_UNTIL_ANNOTATION, ""))
        except ValueError:
            return False


def _writer(checkpoint: Mapping[str, Any] | None, uid: str) -> str:
    """Empty without a checkpoint, of one of a service that had the name before, or one that names nobody."""
    if checkpoint is None or owner_uid(checkpoint) != uid:
        return ""
    return label_of(checkpoint, OPERATOR_LABEL)
