"""Who says how many replicas there are: Headway, nobody, or the formula of a HorizontalPodAutoscaler.

The formula, its behaviour and its numbers are those of the simulated baseline
(`headway_simulator.baselines.horizontal`); here it reads the pages of real pods and writes `/scale`. As time
is compressed, so are its periods and the time of stabilisation that Headway ships with.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import yaml
from e2e.host_runtime import with_host_runtime
from e2e.kubernetes import Object
from e2e.observed_service import MANIFEST, NAME, NAMESPACE

from headway_operator.errors import ClusterError
from headway_operator.spec.scaling import Scaling
from headway_simulator.baselines.horizontal import SYNC_SECONDS, Behavior, Memory, behave, by_waiting

HEADWAY, FIXED, WAITING = "Headway", "fixed", "HPA on waiting requests"
LEAST_STABILIZATION_SECONDS = 10
HPA_DOWN_SECONDS = Behavior(target=1.0).stabilization_seconds
LEAST_BATCHED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all of them.

    most_replicas: of those that move. cpu, memory: of a replica. ttft, tpot: targets in milliseconds, at
    `percentile`. waiting: requests for each replica. speed: of time.
    """

    most_replicas: int
    cpu: str
    memory: str
    ttft: int
    tpot: int
    percentile: int
    waiting: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    speed: float


def manifest(policy: str, setting: Setting, replicas: int, *, on_this_machine: bool) -> Object:
    """The service under one of them, which differs from the others by what that one moves alone.

    replicas: that it begins with; Headway begins with its minimum.
    on_this_machine: whether replicas bring the runtime from the host (see e2e/host_runtime.py).
    """
    found: Object = yaml.safe_load(MANIFEST.read_text())
    found["metadata"] |= {"name": NAME, "namespace": NAMESPACE}
    spec: dict[str, Any] = found["spec"]
    for name in ("slo", "scaling", "replicas"):
        spec.pop(name, None)
    spec["model"]["maxModelLen"] = setting.max_model_len
    size = {"cpu": setting.cpu, "memory": setting.memory}
    spec["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": size}
    seqs, tokens = setting.max_num_seqs, setting.max_num_batched_tokens
    # All have the promise, so that every replica knows which first tokens would come too late, and begin with
    # the highest limits. Without a range for these, and with `replicas`, the operator moves neither.
    spec["slo"] = {
        "ttftMilliseconds": setting.ttft,
        "tpotMilliseconds": setting.tpot,
        "percentile": setting.percentile,
    }
    least = (1, min(LEAST_BATCHED_TOKENS, tokens)) if policy == HEADWAY else (seqs, tokens)
    spec["batching"] = {
        "maxNumSeqs": {"min": least[0], "initial": seqs, "max": seqs},
        "maxNumBatchedTokens": {"min": least[1], "initial": tokens, "max": tokens},
    }
    if policy == HEADWAY:
        spec["scaling"] = {
            "minReplicas": 1,
            "maxReplicas": setting.most_replicas,
            "stabilizationSeconds": stabilization_seconds(setting.speed),
        }
    else:
        spec["replicas"] = replicas
    return with_host_runtime(found) if on_this_machine else found


def stabilization_seconds(speed: float) -> int:
    """What Headway ships with, in time that goes so many times as fast, as far as a spec may say."""
    return max(LEAST_STABILIZATION_SECONDS, round(Scaling().stabilization_seconds / speed))


class WaitingScaler:
    """Replicas by waiting requests, decision by decision; times in seconds of the trace."""

    def __init__(self, waiting: float, most_replicas: int) -> None:
        self._waiting, self._most = waiting, most_replicas
        self._memory = Memory()

    def decide(self, num_waiting: int, replicas: int, now: float) -> int:
        """What to write, with so many replicas asked for."""
        wanted = min(self._most, max(1, by_waiting(num_waiting, replicas, self._waiting)))
        chosen, self._memory = behave(self._memory, wanted, replicas, HPA_DOWN_SECONDS, now)
        return chosen


@contextlib.asynccontextmanager
async def scaling(
    scaler: WaitingScaler,
    speed: float,
    read: Callable[[], Awaitable[tuple[int, int]]],
    write: Callable[[int], Awaitable[None]],
) -> AsyncIterator[None]:
    """The loop, every SYNC_SECONDS of the trace. read: waiting requests, and the replicas asked for."""

    async def repeat() -> None:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        for number in range(1, 1 << 30):
            # What cannot be read or written changes nothing, as with an HPA, and comes again with the next.
            with contextlib.suppress(ClusterError, TimeoutError):
                num_waiting, replicas = await read()
                chosen = scaler.decide(num_waiting, replicas, (loop.time() - begun_at) * speed)
                if chosen != replicas:
                    await write(chosen)
            await asyncio.sleep(max(0.0, begun_at + number * SYNC_SECONDS / speed - loop.time()))

    task = asyncio.create_task(repeat())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def rounded_mean(pod_seconds: float, seconds: float, most: int) -> int:
    """The whole number nearest to the mean."""
    return max(1, min(most, math.floor(pod_seconds / seconds + 0.5)))
