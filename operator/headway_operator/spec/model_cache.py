"""`spec` of a ModelCache: what is fetched, onto which claim, and where the pod that fetches may run.

The one source of the CRD's second definition. Words are those of an InferenceService where it has the same
field. Knows nothing of clusters.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from headway_operator.spec.base import Name, PodTemplateDict, SpecModel, rules, with_empty_default
from headway_operator.spec.model import Revision, SecretRef
from headway_operator.spec.quantity import QUANTITY_PATTERN, parse_quantity
from headway_operator.spec.resources import Resources
from headway_operator.spec.scheduling import LabelValue, Toleration
from headway_operator.spec.source import RemoteSource, Scheme, scheme_of

REVISION_RULE = "!has(self.revision) || (self.source.startsWith('hf://') && !self.source.contains('@'))"
REVISION_MESSAGE = (
    "revision is for hf:// sources that name none themselves: remove revision, or change source to "
    "hf://ORG/NAME"
)
CLAIM_RULE = "has(self.claimName) != has(self.size)"
CLAIM_MESSAGE = (
    "storage is a claim that exists or one that is made: set either claimName or size, and not both"
)
MADE_RULE = "!has(self.claimName) || (!has(self.storageClassName) && !has(self.accessModes))"
MADE_MESSAGE = (
    "storageClassName and accessModes are for a claim that is made: remove them, or set size in place of "
    "claimName"
)
WRITABLE_RULE = "self.exists(mode, mode != 'ReadOnlyMany')"
WRITABLE_MESSAGE = "accessModes must have one that can be written: set ReadWriteOnce or ReadWriteMany"
KEPT_RULE = "has(self.claimName) == has(oldSelf.claimName) && " + " && ".join(
    f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    for field in ("storageClassName", "accessModes")
)
KEPT_MESSAGE = (
    "a claim that was made keeps its class and access modes, and is not exchanged for another: set storage "
    "back, and make a second ModelCache for the new storage"
)
GROWS_RULE = (
    "!has(self.size) || !has(oldSelf.size) || quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0"
)
GROWS_MESSAGE = "Kubernetes shrinks no claim: raise storage.size, or set it back"

AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]


def _is_size(value: str) -> str:
    if parse_quantity(value) < 1:
        raise ValueError(f"{value!r} is less than one byte; write for example 200Gi")
    return value


class Storage(SpecModel):
    """Where the model lies: on a claim that exists, or on one that is made and goes with this ModelCache."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (CLAIM_RULE, CLAIM_MESSAGE),
            (MADE_RULE, MADE_MESSAGE),
            (KEPT_RULE, KEPT_MESSAGE),
            (GROWS_RULE, GROWS_MESSAGE),
        )
    )
    claim_name: Name | None = None
    """PersistentVolumeClaim of this namespace that exists; several caches may share one. It is neither
    changed nor deleted. Default: none, a claim NAME-model-cache is made."""
    size: Annotated[str, Field(max_length=32, pattern=QUANTITY_PATTERN), AfterValidator(_is_size)] | None = (
        None
    )
    """Size of the claim that is made, a quantity in bytes such as 200Gi: room for the model, and for two
    while another revision is fetched. It may be raised later where the class can do that. Default: none,
    which needs claimName."""
    storage_class_name: Annotated[str, Field(max_length=253)] | None = None
    """StorageClass of the claim that is made; empty: none, so that only volumes without a class fit.
    Default: the cluster's default class."""
    access_modes: (
        Annotated[
            list[AccessMode],
            Field(min_length=1, max_length=3, json_schema_extra=rules((WRITABLE_RULE, WRITABLE_MESSAGE))),
        ]
        | None
    ) = None
    """How the claim that is made may be mounted, 1 to 3 modes. Default ReadWriteOnce: by the pods of one node
    at a time, so that replicas on other nodes wait for ever; ReadWriteMany, or ReadOnlyMany beside
    ReadWriteOnce where the class has that, serves replicas on several nodes."""

    @model_validator(mode="after")
    def _is_one_claim(self) -> Self:
        if (self.claim_name is None) == (self.size is None):
            raise ValueError(CLAIM_MESSAGE)
        if self.claim_name is not None and (self.storage_class_name, self.access_modes) != (None, None):
            raise ValueError(MADE_MESSAGE)
        if self.access_modes is not None and set(self.access_modes) == {"ReadOnlyMany"}:
            raise ValueError(WRITABLE_MESSAGE)
        return self


class FetchScheduling(SpecModel):
    """On which nodes the pod that fetches may run."""

    node_selector: dict[str, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that a node must have, at most 32. Default: none."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32)
    """Taints that the pod puts up with, at most 32. Default: none."""
    priority_class_name: Name | None = None
    """PriorityClass of the pod. Default: the cluster's."""


class FetchNetworkPolicy(SpecModel):
    """Whom the pod that fetches may reach."""

    model_config = ConfigDict(json_schema_extra=with_empty_default())
    enabled: bool = True
    """Whether nobody reaches the pod, and it reaches only names and what the source needs. Policies of your
    own add to it. Default true."""


class ModelCacheSpec(SpecModel):
    """What to fetch, and where to keep it."""

    model_config = ConfigDict(json_schema_extra=rules((REVISION_RULE, REVISION_MESSAGE)))
    source: RemoteSource
    """What is fetched: hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX or
    oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], up to 1024 characters. Another one is fetched beside the old one,
    which is served until it is there. No default."""
    revision: Revision | None = None
    """Branch, tag or commit of an hf:// source, up to 255 characters; the same as @REVISION at its end. A
    branch is looked up once, when it is fetched. Default: the source's own, else main."""
    adapter: bool = False
    """Whether the source is a LoRA adapter, as PEFT saves it, in place of a model. Default false."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with what opens a private source. For hf:// its key HF_TOKEN; for s3:// AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, and if wanted AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL_S3; for oci://
    .dockerconfigjson, as `kubectl create secret docker-registry` makes it. Default: none."""
    refresh: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Any text of 1 to 64 characters: another one has the source looked up again, for what a branch, tag or
    prefix has become. Default: none, it is looked up once."""
    storage: Storage
    """Where the model lies. No default."""
    scheduling: FetchScheduling | None = None
    """On which nodes the pod that fetches may run. Default: on any that reaches the claim."""
    resources: Resources = Resources()
    """Resources of the pod that fetches. Default: none asked."""
    network_policy: FetchNetworkPolicy = FetchNetworkPolicy()
    """Whom the pod that fetches may reach. Default: enabled."""
    suspend: bool = False
    """Whether to fetch nothing for now: a fetch under way ends, what has come is kept and goes on being
    served. Default false."""
    template: PodTemplateDict | None = None
    """Pod template merged strategically over that of the pod that fetches; name the container `runtime` to
    change it, for example its env for a proxy. Default: none."""

    @model_validator(mode="after")
    def _names_one_revision(self) -> Self:
        if self.revision is not None and (scheme_of(self.source) != "hf" or "@" in self.source):
            raise ValueError(f"{REVISION_MESSAGE}; source is {self.source!r}")
        return self

    @property
    def scheme(self) -> Scheme:
        """The kind of its source."""
        return scheme_of(self.source)

    @property
    def revised_source(self) -> str:
        """The source with its revision, as `headway fetch` is told it."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"
