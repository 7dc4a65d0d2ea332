"""Leadership by a Lease: of the operators that run, only the one that holds it may write.

The holder renews every 5 s. Should it fail to for 20 s, by its own monotonic clock, it begins no further
write; another takes over once it has seen the Lease unchanged for 30 s by its own clock. So no two clocks are
compared, and what lies between, 10 s, is the time limit of a call to the API: a write that was begun in time
has ended, one way or another, before anybody else may write.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from headway_operator.cluster.kubernetes_api import TIMEOUT_SECONDS, Json, KubernetesApi
from headway_operator.errors import ClusterError, ConflictError

logger = logging.getLogger(__name__)

LEASE_NAME = "headway-operator"
LEASE_SECONDS = 30
# The longest that a write begun by the holder may still be under way.
MARGIN_SECONDS = TIMEOUT_SECONDS
RENEW_SECONDS = 5.0
RETRY_SECONDS = 2.0


class Lease:
    """Seeks the Lease and keeps it. `is_held` says whether to act now."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        identity: str,
        *,
        owners: Sequence[Mapping[str, Any]] = (),
        lease_seconds: float = LEASE_SECONDS,
        margin_seconds: float = MARGIN_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._owners = owners
        self._lease_seconds = lease_seconds
        self._hold_seconds = lease_seconds - margin_seconds
        self._renew_seconds = renew_seconds
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._renewed_at: float | None = None
        self._seen: tuple[str, float] = ("", clock())  # its resourceVersion, and since when it is that

    @property
    def is_held(self) -> bool:
        """Whether this operator may begin a write; false as soon as the last renewal is too old."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < self._hold_seconds

    async def run(self) -> None:
        """Seek and renew until cancelled; then give the Lease up, so that the next need not wait."""
        logger.info("Lease %s of namespace %s is sought", LEASE_NAME, self._namespace)
        try:
            was_held = False
            while True:
                is_renewed = await self._attempt()
                if was_held != self.is_held:
                    was_held = not was_held
                    logger.info("Lease %s is %s", LEASE_NAME, "held" if was_held else "not held any more")
                await asyncio.sleep(self._renew_seconds if is_renewed else self._retry_seconds)
        finally:
            if self.is_held:
                with contextlib.suppress(ClusterError):
                    await self.release()

    async def _attempt(self) -> bool:
        try:
            await self.seek()
        except ClusterError as error:
            logger.warning("Lease %s: %s", LEASE_NAME, error)
            return False
        except Exception:
            # Whatever it is, an operator that no longer asks would idle for ever, in good health.
            logger.exception("Lease %s cannot be read", LEASE_NAME)
            return False
        return self.is_held

    async def seek(self) -> None:
        """Renew the Lease, or take it if it is free or was left. Raises ClusterError."""
        asked_at = self._clock()
        found = await self._api.get("Lease", self._namespace, LEASE_NAME)
        try:
            if found is None:
                await self._api.create(self._manifest(0))
            elif self._may_take(found):
                spec = found["spec"]
                transitions = int(spec.get("leaseTransitions") or 0) + (not self._is_mine(found))
                manifest = self._manifest(transitions)
                manifest["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
                await self._api.replace(manifest)
            else:
                self._renewed_at = None
                return
        except ConflictError:
            self._renewed_at = None  # another was faster
            return
        # From before the request: the others count from when they see it, which is later.
        self._renewed_at = asked_at

    async def release(self) -> None:
        """Leave the Lease without a holder."""
        self._renewed_at = None
        await self._api.patch("Lease", self._namespace, LEASE_NAME, {"spec": {"holderIdentity": ""}})

    def _may_take(self, found: Json) -> bool:
        version = found["metadata"]["resourceVersion"]
        now = self._clock()
        if version != self._seen[0]:
            self._seen = (version, now)
        is_left = now - self._seen[1] >= self._lease_seconds
        return self._is_mine(found) or not found["spec"].get("holderIdentity") or is_left

    def _is_mine(self, found: Json) -> bool:
        return bool(found["spec"].get("holderIdentity") == self._identity)

    def _manifest(self, transitions: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": LEASE_NAME,
                "namespace": self._namespace,
                "ownerReferences": [*self._owners],
            },
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, int(self._lease_seconds)),
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
