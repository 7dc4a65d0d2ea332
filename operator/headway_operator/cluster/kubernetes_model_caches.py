"""ModelCaches on Kubernetes: what their claims, Jobs and pods show, and how far a fetch is.

What only a question to the API server can tell (the log of a pod, events, a claim that others made) is asked
for at most every ASK_SECONDS for each cache. What objects mean is `kubernetes_fetches`' business.

Rights needed in the namespace of a cache, beside those of services: get, list and watch of modelcaches and
patch of their status; get, list, watch, create and patch of persistentvolumeclaims; get of pods/log (without
it, how far a fetch is goes untold).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from headway_operator.cluster import kubernetes_fetches as fetches
from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_causes import Pod
from headway_operator.cluster.kubernetes_children import KubernetesChildren
from headway_operator.cluster.kubernetes_jobs import Job
from headway_operator.cluster.kubernetes_observation import Found
from headway_operator.cluster.kubernetes_preparation import unprepared
from headway_operator.errors import ClusterError
from headway_operator.manifests.cache_claim import claim_name
from headway_operator.model_cache import Claim, Fetch, ObservedCache
from headway_operator.model_cache.offer import uses
from headway_operator.names import (
    CACHE_KIND,
    CACHE_LABEL,
    CLAIM,
    FIELD_MANAGER,
    KIND,
    MANAGED_BY_LABEL,
    RUNTIME_CONTAINER,
    selector_text,
)
from headway_operator.spec import ModelCache
from headway_operator.state import ServiceKey, Site

logger = logging.getLogger(__name__)

OWN_KINDS = ("Job", "NetworkPolicy", CLAIM)
ASK_SECONDS = 10.0
# Of a claim of others, once what is on it has been fetched.
SETTLED_SECONDS = 60.0
# Enough for a line of progress among warnings of connections that broke.
LOG_LINES = 20


class KubernetesModelCaches(KubernetesChildren):
    """All ModelCaches of the operator. site: what their pods are rendered with."""

    def __init__(
        self,
        api: KubernetesApi,
        site: Callable[[], Site],
        cache: KubernetesCache | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(api, CACHE_KIND, cache or KubernetesCache(api, (), {}), clock)
        self._read_site = site
        self._answers: dict[ServiceKey, dict[str, tuple[float, Any]]] = {}

    @property
    def site(self) -> Site:
        """As services have it."""
        return self._read_site()

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a cache that is gone."""
        super().forget(key)
        self._answers.pop(key, None)

    async def observe(self, cache: ModelCache) -> ObservedCache:
        """The claim, the Jobs with their pods, and who uses the cache; all of it or a ClusterError."""
        key = cache.key
        uid = await self._uid(key)
        labels = selector_text({CACHE_LABEL: key.name, MANAGED_BY_LABEL: FIELD_MANAGER})
        *lists, pods, services = await asyncio.gather(
            *(self._of_owner(kind, key, labels) for kind in OWN_KINDS),
            self._of_owner("Pod", key, labels),
            self._services(key.namespace),
        )
        found = Found(dict(zip(OWN_KINDS, lists, strict=True)), pods)
        owners = self._owned[key] = found.owners()
        living = [one for one in found.children["Job"] if not one["metadata"].get("deletionTimestamp")]
        jobs = [(job, fetches.pods_of(job, pods)) for job in living]
        return ObservedCache(
            claim=await self._claim(cache, lists[OWN_KINDS.index(CLAIM)]),
            fetches=tuple([await self._fetch(cache, job, own) for job, own in jobs]),
            children=frozenset(child for child, owner in owners.items() if owner == uid),
            services=tuple(sorted(one["metadata"]["name"] for one in services if uses(one, key.name))),
        )

    async def _services(self, namespace: str) -> list[Json]:
        held = self._cache.all_in(KIND, namespace)
        return await self._api.list(KIND, namespace) if held is None else held

    async def _claim(self, cache: ModelCache, made: Sequence[Json]) -> Claim | None:
        name, namespace = claim_name(cache), cache.key.namespace
        found = next((one for one in made if one["metadata"]["name"] == name), None)
        if found is None and cache.spec.storage.claim_name is not None:
            seconds = SETTLED_SECONDS if cache.status.get("fetched") else ASK_SECONDS
            found = await self._sparingly(
                cache, f"claim {name}", lambda: self._api.get(CLAIM, namespace, name), seconds
            )
        if found is None or found["metadata"].get("deletionTimestamp"):
            return None
        uid, phase = str(found["metadata"]["uid"]), str((found.get("status") or {}).get("phase") or "Pending")
        message = "" if phase == "Bound" else fetches.claim_words(await self._events_of(cache, uid))
        return Claim(name, uid, phase, message)

    async def _fetch(self, cache: ModelCache, job: Job, pods: Sequence[Pod]) -> Fetch:
        """One Job, and how far it is or what its pod waits for, where only a question tells."""
        fetch = fetches.fetch(job, pods)
        if not pods:
            return fetch
        pod = pods[-1]["metadata"]
        if fetch.phase == "waiting" and not fetch.reason:
            reason, message = unprepared(pods[-1], await self._events_of(cache, pod["uid"]))
            return replace(fetch, reason=reason, message=message) if reason else fetch
        if fetch.phase != "running":
            return fetch
        log = await self._sparingly(
            cache,
            f"log {pod['name']}",
            lambda: self._api.log_tail(pod["namespace"], pod["name"], RUNTIME_CONTAINER, LOG_LINES),
        )
        told = fetches.progress(log or "")
        return fetch if told is None else replace(fetch, bytes=told[0], total_bytes=told[1])

    async def _events_of(self, cache: ModelCache, uid: str) -> list[Json]:
        fields = f"involvedObject.uid={uid}"
        namespace = cache.key.namespace
        answer = await self._sparingly(
            cache, f"events {uid}", lambda: self._api.list("Event", namespace, fields=fields)
        )
        return list(answer or ())

    async def _sparingly(
        self,
        cache: ModelCache,
        what: str,
        question: Callable[[], Awaitable[Any]],
        seconds: float = ASK_SECONDS,
    ) -> Any:
        """The answer, which may be so many seconds old; None where there is none."""
        answers, now = self._answers.setdefault(cache.key, {}), self._clock()
        for old in [one for one, (expires_at, _) in answers.items() if now >= expires_at]:
            del answers[old]
        if what not in answers:
            answer = None
            try:
                answer = await question()
            except ClusterError as error:
                logger.debug("%s: %s is not known: %s", cache.key, what, error)
            answers[what] = (now + seconds, answer)
        return answers[what][1]
