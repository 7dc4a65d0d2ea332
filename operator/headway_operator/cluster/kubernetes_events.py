"""Records events on a service without storms: the same words are counted, the total of a service bounded."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ConflictError
from headway_operator.names import API_VERSION, FIELD_MANAGER, KIND, ServiceKey

BURST = 25
SECONDS_PER_EVENT = 60.0
MAX_MESSAGE_CHARACTERS = 1000
MAX_REMEMBERED = 1000


@dataclass(slots=True)
class _Bucket:
    """How many more events a service may have now."""

    left: float
    filled_at: float

    def take(self, now: float) -> bool:
        self.left = min(BURST, self.left + (now - self.filled_at) / SECONDS_PER_EVENT)
        self.filled_at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class EventRecorder:
    """Writes core/v1 Events. Each distinct text of one service is one object whose count goes up."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._counts: dict[tuple[str, str], int] = {}
        self._buckets: dict[ServiceKey, _Bucket] = {}

    async def record(
        self,
        key: ServiceKey,
        uid: str,
        kind: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        now: float,
    ) -> bool:
        """Write one event; False when this service has had too many lately. Raises ClusterError."""
        if not self._buckets.setdefault(key, _Bucket(BURST, now)).take(now):
            return False
        text = message[:MAX_MESSAGE_CHARACTERS]
        digest = hashlib.sha256("\n".join((uid, kind, reason, text)).encode()).hexdigest()[:16]
        name = f"{key.name}.{digest}"
        time = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count = self._counts.get((key.namespace, name))
        if count is not None and await self._count(key.namespace, name, count + 1, time):
            return True
        try:
            await self._api.create(_event(key, uid, name, kind, reason, text, time))
            self._remember(key.namespace, name, 1)
        except ConflictError:  # written before this process began: its count is in what a patch returns
            found = await self._api.patch("Event", key.namespace, name, {"lastTimestamp": time})
            await self._count(key.namespace, name, int((found or {}).get("count") or 0) + 1, time)
        return True

    async def _count(self, namespace: str, name: str, count: int, time: str) -> bool:
        body: Mapping[str, Any] = {"count": count, "lastTimestamp": time}
        if await self._api.patch("Event", namespace, name, body) is None:
            self._counts.pop((namespace, name), None)  # events expire after an hour
            return False
        self._remember(namespace, name, count)
        return True

    def _remember(self, namespace: str, name: str, count: int) -> None:
        self._counts[(namespace, name)] = count
        while len(self._counts) > MAX_REMEMBERED:
            self._counts.pop(next(iter(self._counts)))


def _event(
    key: ServiceKey, uid: str, name: str, kind: str, reason: str, message: str, time: str
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": key.namespace,
            "name": key.name,
            "uid": uid,
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": "",
    }
