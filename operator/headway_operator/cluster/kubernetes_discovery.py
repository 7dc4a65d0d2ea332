"""Which of the kinds that a cluster may lack it has now, and which of those the operator may write.

Every user of a cluster may ask it what it serves, so this needs no right of its own. Definitions come and go
while the operator runs, so it asks again from time to time; while the server does not say, what it said last
stands.
"""

import asyncio
import logging
from collections.abc import Callable

from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.errors import ClusterError, ForbiddenError, UnavailableError
from headway_operator.names import OPTIONAL_KINDS

logger = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 60.0
FORBIDDEN_SECONDS = 600.0


class Discovery:
    """The optional kinds of one API server. clock: seconds."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._forbidden: dict[str, float] = {}  # until when a kind counts as absent
        self.kinds: frozenset[str] = frozenset()

    async def refresh(self) -> None:
        """Ask, if it has been a while; who comes meanwhile waits for the same answer.

        Never raises: a kind that cannot be asked for is as it was.
        """
        async with self._asking:
            if self._clock() - self._asked_at >= ASK_AGAIN_SECONDS:
                await self._ask()

    async def _ask(self) -> None:
        self._asked_at = self._clock()
        served: set[str] = set()
        for version in sorted(set(OPTIONAL_KINDS.values())):
            try:
                served |= await self._api.served_kinds(version)
            except ClusterError as error:
                logger.debug("what %s has is not known now: %s", version, error)
                served |= {kind for kind in self.kinds if OPTIONAL_KINDS[kind] == version}
        forbidden = {kind for kind, until in self._forbidden.items() if self._clock() < until}
        now = frozenset(served & set(OPTIONAL_KINDS)) - forbidden
        if now != self.kinds:
            logger.info("kinds of other operators in this cluster: %s", ", ".join(sorted(now)) or "none")
        self.kinds = now

    async def children(self, kind: str, namespace: str, labels: str) -> list[Json]:
        """The children of a kind that is there; none, and the kind counts as absent, where it has just gone.

        The same where the operator has no right to it, which is tried again after ten minutes.
        """
        try:
            return await self._api.list(kind, namespace, labels)
        except UnavailableError:
            raise
        except ForbiddenError as error:
            self._forbidden[kind] = self._clock() + FORBIDDEN_SECONDS
            logger.warning("%s is left out: %s; the chart's role grants it", kind, error)
        except ClusterError as error:
            logger.info("%s is left out: %s", kind, error)
            self.lost(kind)
        self.kinds -= {kind}
        return []

    def lost(self, kind: str) -> None:
        """The API server has just said that there is no such kind; what there is is asked for anew."""
        self._asked_at = float("-inf")
        self.kinds -= {kind}
