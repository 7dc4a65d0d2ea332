"""One pass over one ModelCache: the list of steps, nothing else, as `reconcile` is for a service.

1. read      the manifest becomes a ModelCache; of one that cannot be honoured, or over which the operator
             itself fails in 3, only a condition is written
2. observe   its claim, its Jobs and their pods, and the services that use it
3. decide    what is in force, and which children there should be (`model_cache.course`)
4. apply     each child
5. prune     children no longer wanted, unless an apply failed
6. status    when it says something new, with its events

What services wait for is in the status, which wakes them. Every pass is complete in itself: nothing is
remembered from one to the next but what was logged.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from headway_operator import conditions, model_cache
from headway_operator.errors import SpecError, as_internal_error
from headway_operator.model_cache import Course, ObservedCache
from headway_operator.names import CacheKey
from headway_operator.passes import Carried, Outcome
from headway_operator.spec import Manifest, ModelCache, generation_of, key_of, parse_cache
from headway_operator.state import ChildKey, ServiceKey, Site

logger = logging.getLogger(__name__)


class ModelCaches(Protocol):
    """Where caches live. Every call has a time limit; its errors are of `ClusterError`'s tree."""

    @property
    def site(self) -> Site:
        """What pods are rendered with."""

    async def observe(self, cache: ModelCache) -> ObservedCache:
        """Read what there is of it now."""

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """Server-side apply one child."""

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        """Delete one child that is ours and no longer wanted; absent is success."""

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a status is kept, as far as that is known: an older definition keeps less of it."""

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replace the status subresource."""

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Record an event on the cache."""


async def take_cache_pass(
    caches: ModelCaches, clock: Callable[[], float], manifest: Manifest, carried: Carried
) -> Outcome:
    """Take one pass over the cache as `manifest` now has it, its last status included.

    Raises ClusterError when nothing can be observed.
    """
    named, previous = key_of(manifest), manifest.get("status") or {}
    key = CacheKey(named.namespace, named.name)
    outcome = Outcome(key, previous, earlier_problems=carried.problems)
    carried.problems = outcome.problems
    cache: ModelCache | None = None
    observed: ObservedCache | None = None
    try:
        with as_internal_error():
            cache = parse_cache(manifest)
        observed = await caches.observe(cache)
        with as_internal_error():
            course = model_cache.course_of(cache, observed, caches.site, clock())
    except SpecError as error:
        outcome.refuse(error)
        course, problems = model_cache.refused(previous, error), None
    else:
        problems = await _act(caches, outcome, course, observed)
    status = model_cache.status(course, previous, generation_of(manifest), clock(), observed, cache, problems)
    await _tell(caches, outcome, status)
    return outcome


async def _act(
    caches: ModelCaches, outcome: Outcome, course: Course, observed: ObservedCache
) -> conditions.Problems | None:
    """Write what is to be there; the steps that failed, if any did."""
    key = outcome.key
    applied = [
        await outcome.attempt(
            f"apply {manifest['kind']} {manifest['metadata']['name']}", caches.apply(key, manifest)
        )
        for manifest in course.manifests
    ]
    if all(applied):
        for child in sorted(observed.children - course.keep):
            await outcome.attempt(f"prune {child.kind} {child.name}", caches.prune(key, child))
    if not outcome.problems:
        return None
    messages = tuple(f"{one.step}: {one.message}" for one in outcome.problems)
    return conditions.Problems(messages, outcome.problem_reason)


async def _tell(caches: ModelCaches, outcome: Outcome, status: Mapping[str, Any]) -> None:
    previous, outcome.status = outcome.status, caches.declared(status)
    if previous == outcome.status:
        return
    if not await outcome.attempt("write status", caches.write_status(outcome.key, outcome.status)):
        return
    for kind, reason, message in model_cache.events(previous, status):
        logger.info("%s: %s: %s", outcome.key, reason, message)
        await outcome.attempt("record event", caches.emit(outcome.key, kind, reason, message))
