"""The fields of a ModelCache's `status`: what the operator writes. Source of the CRD's status schema."""

from typing import Annotated

from pydantic import Field

from headway_operator.spec.status_fields import Condition, StatusModel

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class FetchedStatus(StatusModel):
    """What lies on the claim in full, and is served."""

    key: str
    """A hash of source, revision, refresh and claim: for what this was fetched."""
    source: Annotated[str, Field(max_length=1400)]
    """From where, with the revision that was asked for."""
    claim_name: str
    """The PersistentVolumeClaim on which it lies."""
    claim_uid: str
    """The life of that claim: one that is made anew under its name is empty."""
    path: Annotated[str, Field(max_length=1024)]
    """Folder on the claim."""
    identity: str
    """What the revision came to: a commit, the digest of a manifest, or a hash of all names and etags."""
    bytes: int
    """Size of its files, in bytes."""
    files: int
    """Number of its files."""
    fetched_at: Time
    """When it was there in full."""
    seconds: float
    """From the first pod's beginning until then, in seconds, pauses after failed attempts included."""


class FetchProgress(StatusModel):
    """A fetch under way."""

    bytes: int | None = None
    """Bytes that are there; absent while nothing is known."""
    total_bytes: int | None = None
    """All bytes that are known to be wanted."""
    percent: int | None = None
    """The share of the two, rounded down (0 to 100)."""
    failed_attempts: int | None = None
    """Attempts of the Job that have failed."""


class CacheDisplay(StatusModel):
    """What `kubectl get` prints."""

    size: str | None = None
    """Size of what is fetched, or of what is to come."""
    progress: str | None = None
    """How much of it is there."""


class ModelCacheStatus(StatusModel):
    """What the operator sees and does."""

    observed_generation: int | None = None
    """The generation of the spec that this is about."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """Ready: whether what the spec asks for is there. Degraded: whether something is wrong, whatever is
    served."""
    claim_name: str | None = None
    """The PersistentVolumeClaim onto which is fetched."""
    fetched: FetchedStatus | None = None
    """What is there in full and served; of an earlier spec while another one is fetched."""
    progress: FetchProgress | None = None
    """How far the fetch under way is; absent without one."""
    services: list[str] = Field(default_factory=list, max_length=64)
    """InferenceServices that use it, the first 64 by name."""
    display: CacheDisplay | None = None
    """What `kubectl get` prints."""
