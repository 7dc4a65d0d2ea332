"""What there is in the cluster, second by second: pods that cost, replicas that serve, limits that hold."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from e2e.observed_service import NAME, NAMESPACE, RUNTIME_PODS

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.names import KIND

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """at_seconds: from the begin of the watch. pods: that are there, starting and ending ones too.

    cause, message: of the latest decision; "" without a controller.
    """

    at_seconds: float
    pods: int
    ready: int
    wanted: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    cause: str
    message: str


@dataclass(slots=True)
class Watch:
    """moments: the newest last."""

    moments: list[Moment] = field(default_factory=list)

    def pod_seconds(self, since: float, until: float) -> float:
        """Of all pods, whatever state they were in, while they were there."""
        total = 0.0
        for one, following in zip(self.moments, [*self.moments[1:], None], strict=True):
            end = until if following is None else min(until, following.at_seconds)
            total += one.pods * max(0.0, end - max(since, one.at_seconds))
        return total

    def changes(self) -> list[Moment]:
        """Where the replicas asked for, or the limits, became others than before."""
        found = self.moments[:1]
        for one in self.moments[1:]:
            if _asked(one) != _asked(found[-1]):
                found.append(one)
        return found

    def reversals(self) -> int:
        """How often replicas went down after they had gone up, or up after down."""
        asked = [one.wanted for one in self.changes()]
        steps = [after - before for before, after in itertools.pairwise(asked) if after != before]
        return sum((one > 0) != (two > 0) for one, two in itertools.pairwise(steps))


def _asked(moment: Moment) -> tuple[int, int | None, int | None]:
    return moment.wanted, moment.max_num_seqs, moment.max_num_batched_tokens


@contextlib.asynccontextmanager
async def watching(api: KubernetesApi) -> AsyncIterator[Watch]:
    """Looks for as long as the context lasts."""
    watch = Watch()
    begun_at = time.monotonic()

    async def look() -> None:
        while True:
            with contextlib.suppress(ClusterError):
                watch.moments.append(await _moment(api, begun_at))
            await asyncio.sleep(LOOK_SECONDS)

    task = asyncio.create_task(look())
    try:
        yield watch
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _moment(api: KubernetesApi, begun_at: float) -> Moment:
    pods = await api.list("Pod", NAMESPACE, RUNTIME_PODS)
    status = (await api.get(KIND, NAMESPACE, NAME) or {}).get("status") or {}
    limits = status.get("limits") or {}
    decision = status.get("lastDecision") or {}
    return Moment(
        time.monotonic() - begun_at,
        len(pods),
        sum(_is_ready(one) for one in pods),
        status.get("desiredReplicas") or 0,
        limits.get("maxNumSeqs"),
        limits.get("maxNumBatchedTokens"),
        decision.get("cause") or "",
        decision.get("message") or "",
    )


def _is_ready(pod: dict[str, object]) -> bool:
    status = pod.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions or [])
