"""What is to be done for a ModelCache and what holds of it.

The algorithm:

1. The claim, if it is to be made, and the network policy are there for as long as the ModelCache is.
2. What was fetched before stays in force until its place is taken: services go on from it. It is given up
   only where the claim on which it lies is gone, or is another one of the same name.
3. What the spec asks for has a key (`content`). If what is in force has that key, there is nothing to fetch.
4. Else a Job fetches it, named after all that says how. One that has ended well leaves behind what then is in
   force; one that lost its result is deleted and made again, which fetches nothing twice.
5. A Job that has given up stays for RETRY_SECONDS, and is then deleted and made again. Deleting it has that
   done at once, and so does a change of the spec.
6. A Job of an earlier spec is not kept. While suspended, none is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway_operator import names
from headway_operator.conditions.condition import Condition
from headway_operator.errors import SpecError
from headway_operator.manifests.cache_claim import cache_claim, claim_name
from headway_operator.manifests.fetch_job import MAX_RETRIES, fetch_job
from headway_operator.manifests.fetch_policy import fetch_policy
from headway_operator.model_cache.content import Content, content_key, content_of, job_hash, read_result
from headway_operator.model_cache.facts import Claim, Fetch, ObservedCache
from headway_operator.spec import ModelCache
from headway_operator.state import ChildKey, Manifest, Site
from headway_operator.times import timestamp

RETRY_SECONDS = 1800.0
# What `headway fetch` calls its errors, where more is known than that it failed.
ERROR_REASONS = {"SourceRefusedError": "SourceRefused", "NoRoomError": "OutOfSpace"}
# Causes of pods that say no more than that the command has failed.
BARE_CAUSES = ("", "ModelFetchFailed", "CrashLoopBackOff")
# Not ready, and nothing is wrong.
EVERYDAY_REASONS = ("Fetched", "Fetching", "ClaimPending", "Suspended")


@dataclass(frozen=True, slots=True)
class Course:
    """manifests: children to apply. keep: those not to prune. content: what is in force.

    ready: the condition Ready. fetch: the Job under way.
    """

    ready: Condition
    manifests: tuple[Manifest, ...] = ()
    keep: frozenset[ChildKey] = frozenset()
    content: Content | None = None
    fetch: Fetch | None = None

    @property
    def is_failing(self) -> bool:
        """Whether something has to be done by somebody before it gets ready."""
        return self.ready.reason not in EVERYDAY_REASONS


def refused(status: Mapping[str, Any], error: SpecError) -> Course:
    """Of a spec that cannot be honoured: what was fetched before stays in force."""
    return Course(_not_ready(error.reason, str(error)), content=content_of(status))


def course_of(cache: ModelCache, observed: ObservedCache, site: Site, now: float) -> Course:
    """What to do and say now. Raises SpecError for a template that cannot be merged."""
    manifests = tuple(one for one in (cache_claim(cache), fetch_policy(cache)) if one is not None)
    keep = frozenset(ChildKey(one["kind"], one["metadata"]["name"]) for one in manifests)
    claim = observed.claim
    course = Course(_not_ready("Fetching", ""), manifests, keep, _in_force(cache, claim))
    if claim is None:
        return replace(course, ready=_without_claim(cache))
    name = names.fetch_job(cache.name, job_hash(cache, claim.uid))
    course = replace(course, keep=keep | {ChildKey("Job", name)})
    key = content_key(cache, claim.uid)
    if course.content is not None and course.content.key == key:
        return replace(course, ready=_fetched(course.content))
    if cache.spec.suspend:
        message = "spec.suspend is true; it is fetched when it is false again"
        return replace(course, ready=_not_ready("Suspended", message), keep=keep)
    fetch = next((one for one in observed.fetches if one.name == name), None)
    if fetch is None:
        job = fetch_job(cache, site, claim.name, name)
        ready = _not_ready("Fetching", f"{name} begins")
        return replace(course, ready=ready, manifests=(*manifests, job))
    if fetch.phase == "done":
        return _ended_well(course, cache, claim, fetch, key, keep, now)
    if fetch.phase == "failed" and now - fetch.ended_at >= RETRY_SECONDS:
        return replace(course, ready=_not_ready("Fetching", f"{name} is made again"), keep=keep)
    return replace(course, ready=_under_way(cache, claim, fetch), fetch=fetch)


def _not_ready(reason: str, message: str) -> Condition:
    return Condition("Ready", "False", reason, message)


def _fetched(content: Content) -> Condition:
    size = f"{content.bytes / 1e9:.2f} GB in {content.files} files"
    message = f"{content.source} is there as {content.identity}: {size} in {content.path!r}"
    return Condition("Ready", "True", "Fetched", message)


def _in_force(cache: ModelCache, claim: Claim | None) -> Content | None:
    content = content_of(cache.status)
    if content is None or content.claim_name != claim_name(cache):
        return content  # it lies on a claim that is not looked at any more
    return content if claim is not None and claim.uid == content.claim_uid else None


def _without_claim(cache: ModelCache) -> Condition:
    name = claim_name(cache)
    if cache.spec.storage.claim_name is None:
        return _not_ready("ClaimPending", f"the claim {name} is made")
    message = f"there is no PersistentVolumeClaim {name!r} here; make it, or change spec.storage.claimName"
    return _not_ready("ClaimMissing", message)


def _ended_well(
    course: Course,
    cache: ModelCache,
    claim: Claim,
    fetch: Fetch,
    key: str,
    keep: frozenset[ChildKey],
    now: float,
) -> Course:
    result = read_result(fetch.output)
    if result is None or not result.folder:
        message = f"{fetch.name} came to its end and what it fetched was not read; it is made again"
        return replace(course, ready=_not_ready("Fetching", message), keep=keep)
    ended_at = fetch.ended_at or now
    content = Content(
        key=key,
        source=cache.spec.revised_source,
        claim_name=claim.name,
        claim_uid=claim.uid,
        path=result.path,
        identity=result.identity,
        bytes=result.bytes,
        files=result.files,
        fetched_at=timestamp(ended_at),
        seconds=round(max(0.0, ended_at - fetch.began_at), 1),
    )
    return replace(course, ready=_fetched(content), content=content)


def _under_way(cache: ModelCache, claim: Claim, fetch: Fetch) -> Condition:
    if fetch.phase == "running":
        return _not_ready("Fetching", f"{fetch.name} runs{_far(fetch)}")
    if fetch.phase in ("retrying", "failed"):
        reason, cause = _failure(fetch)
        if fetch.phase == "retrying":
            tries = f"{max(1, fetch.failed_attempts)} of {MAX_RETRIES + 1} attempts failed, the next goes on"
        else:
            again = timestamp(fetch.ended_at + RETRY_SECONDS)
            tries = f"tried again at {again}, or at once when the Job {fetch.name} is deleted"
        return _not_ready(reason, f"{cause}; {tries}")
    if claim.phase == "Lost":
        return _not_ready("ClaimLost", f"the volume of claim {claim.name} is gone; delete and make the claim")
    if _lacks_secret(cache, fetch):
        return _not_ready("CredentialsMissing", fetch.message)
    cause = "; ".join(part for part in (claim.message, fetch.message) if part)
    if claim.phase != "Bound":
        why = f": {cause}" if cause else ""
        return _not_ready("ClaimPending", f"claim {claim.name} is {claim.phase}{why}")
    return _not_ready(fetch.reason or "Fetching", cause or f"{fetch.name} waits for its pod")


def _far(fetch: Fetch) -> str:
    if fetch.bytes is None or not fetch.total_bytes:
        return ""
    return f": {fetch.bytes / 1e9:.2f} of {fetch.total_bytes / 1e9:.2f} GB, {percent(fetch)}%"


def percent(fetch: Fetch) -> int | None:
    """How much of it is there, rounded down; None where that is not known."""
    if fetch.bytes is None or not fetch.total_bytes:
        return None
    return max(0, min(100, 100 * fetch.bytes // fetch.total_bytes))


def _failure(fetch: Fetch) -> tuple[str, str]:
    """Reason and words of the latest attempt."""
    result = read_result(fetch.output)
    if result is not None and result.error:
        return ERROR_REASONS.get(result.error, "FetchFailed"), result.message
    reason = "FetchFailed" if fetch.reason in BARE_CAUSES else fetch.reason
    return reason, fetch.message or "the pod is gone and has left no words"


def _lacks_secret(cache: ModelCache, fetch: Fetch) -> bool:
    """Whether the pod waits for what spec.credentialsSecretRef names, or for a key of it."""
    secret = cache.spec.credentials_secret_ref
    return secret is not None and "secret" in fetch.message.lower() and secret.name in fetch.message
