"""What lies on a claim in full, as status keeps it, and the hashes by which it is known again.

Content stands for a source, a revision, a refresh and one life of a claim: another one of these is fetched
anew, into another folder. What else changes of a spec changes how it is fetched, and makes another Job while
one is under way.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from headway_operator.manifests.fetch_job import CLAIM_MOUNT
from headway_operator.manifests.render import content_hash
from headway_operator.spec import ModelCache

RESULT_VERSION = 1
# Of the spec, what does not change how the Job fetches.
NOT_FETCHING = {"suspend", "storage", "network_policy"}


class Content(Struct, frozen=True, rename="camel"):
    """`status.fetched`. claim_uid: of the claim's life in which it was fetched."""

    key: str
    source: str
    claim_name: str
    claim_uid: str
    path: str
    identity: str
    bytes: int
    files: int
    fetched_at: str
    seconds: float


class Result(Struct, frozen=True):
    """What `headway fetch --result-file` leaves behind, version 1: what was fetched, or an error."""

    schema_version: int
    folder: str = ""
    identity: str = ""
    bytes: int = 0
    files: int = 0
    error: str = ""
    message: str = ""

    @property
    def path(self) -> str:
        """The folder on the claim."""
        return posixpath.relpath(self.folder, CLAIM_MOUNT)


def content_of(status: Mapping[str, Any]) -> Content | None:
    """What status says is there; what cannot be read is not."""
    try:
        return msgspec.convert(status.get("fetched"), Content)
    except msgspec.ValidationError:
        return None


def as_status(content: Content) -> dict[str, Any]:
    """The reverse."""
    made: dict[str, Any] = msgspec.to_builtins(content)
    return made


def read_result(output: str) -> Result | None:
    """None for the last words of an attempt that left no result, or nothing."""
    try:
        result = msgspec.json.decode(output, type=Result)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return result if result.schema_version == RESULT_VERSION else None


def content_key(cache: ModelCache, claim_uid: str) -> str:
    """What is to be fetched."""
    spec = cache.spec
    asked = {"source": spec.revised_source, "adapter": spec.adapter, "refresh": spec.refresh}
    return content_hash({**asked, "claim": claim_uid})


def job_hash(cache: ModelCache, claim_uid: str) -> str:
    """What is to be fetched and how; not with which image, so that an upgrade interrupts no fetch."""
    told = cache.spec.model_dump(mode="json", by_alias=True, exclude=NOT_FETCHING, exclude_defaults=True)
    return content_hash({"spec": told, "claim": claim_uid})
