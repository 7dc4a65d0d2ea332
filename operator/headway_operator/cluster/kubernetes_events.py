"""Records events on a service without storms.

The same words again are one object whose count goes up. Words of the same reason that differ, since numbers
in them move, are told one by one up to ten times within ten minutes, then in one object that counts them and
has the latest words (as client-go's correlator aggregates). What a service may have in all is bounded by a
bucket.
"""

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
# So many different texts of one reason within this time are told one by one.
MAX_SIMILAR = 10
SIMILAR_SECONDS = 600.0
COMBINED = "(combined from similar events): "


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
    """Writes core/v1 Events."""

    def __init__(self, api: KubernetesApi, owner_kind: str = KIND) -> None:
        """owner_kind: of the objects that events are about."""
        self._api = api
        self._owner_kind = owner_kind
        self._counts: dict[tuple[str, str], int] = {}
        self._buckets: dict[ServiceKey, _Bucket] = {}
        self._similar: dict[ServiceKey, dict[tuple[str, str], dict[str, float]]] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        self._buckets.pop(key, None)
        self._similar.pop(key, None)

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
        is_combined = self._is_one_of_many(key, kind, reason, text, now)
        identity = (uid, kind, reason, "" if is_combined else text)
        if is_combined:
            text = (COMBINED + text)[:MAX_MESSAGE_CHARACTERS]
        digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
        name = f"{key.name}.{digest}"
        time = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count = self._counts.get((key.namespace, name))
        if count is not None and await self._count(key.namespace, name, count + 1, text, time):
            return True
        try:
            made = _event(key, uid, name, kind, reason, text, time)
            made["involvedObject"]["kind"] = self._owner_kind
            await self._api.create(made)
            self._remember(key.namespace, name, 1)
        except ConflictError:  # written before this process began: its count is in what a patch returns
            found = await self._api.patch("Event", key.namespace, name, {"lastTimestamp": time})
            await self._count(key.namespace, name, int((found or {}).get("count") or 0) + 1, text, time)
        return True

    def _is_one_of_many(self, key: ServiceKey, kind: str, reason: str, text: str, now: float) -> bool:
        """Whether too many other texts of this reason were told lately."""
        told = self._similar.setdefault(key, {}).setdefault((kind, reason), {})
        for old in [one for one, at in told.items() if now - at >= SIMILAR_SECONDS]:
            del told[old]
        if text not in told and len(told) >= MAX_SIMILAR:
            return True
        told[text] = now
        return False

    async def _count(self, namespace: str, name: str, count: int, text: str, time: str) -> bool:
        body: Mapping[str, Any] = {"count": count, "message": text, "lastTimestamp": time}
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
