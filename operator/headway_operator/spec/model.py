"""`spec.model`: which model is served, and what opens its source."""

from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from headway_operator.spec.base import Name, PositiveTokens, SpecModel, rules
from headway_operator.spec.source import Source, scheme_of

REVISION_RULE = "!has(self.revision) || (self.source.startsWith('hf://') && !self.source.contains('@'))"
REVISION_MESSAGE = (
    "model.revision is for hf:// sources that name none themselves: remove revision, or change model.source "
    "to hf://ORG/NAME"
)
REVISION_FORM_RULE = "!self.matches('--|[.][.]')"
REVISION_FORM_MESSAGE = "revision must be a branch, tag or commit, without -- and .. in it"


class SecretRef(SpecModel):
    """A Secret in the service's namespace."""

    name: Name
    """Name of the Secret. No default."""


def _is_revision(revision: str) -> str:
    if "--" in revision or ".." in revision:
        raise ValueError(f"{REVISION_FORM_MESSAGE}; got {revision!r}")
    return revision


Revision = Annotated[
    str,
    Field(
        min_length=1,
        max_length=255,
        pattern="^[A-Za-z0-9][A-Za-z0-9_./-]*$",
        json_schema_extra=rules((REVISION_FORM_RULE, REVISION_FORM_MESSAGE)),
    ),
    AfterValidator(_is_revision),
]


class Model(SpecModel):
    """The model to serve."""

    model_config = ConfigDict(json_schema_extra=rules((REVISION_RULE, REVISION_MESSAGE)))
    source: Source
    """Where the weights lie: bundled://NAME, file:///FOLDER, an absolute path, hf://ORG/NAME[@REVISION],
    s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], pvc://CLAIM/PATH, whose claim is mounted
    read-only, or cache://NAME, what the ModelCache of that name has fetched. Up to 1024 characters, no
    default."""
    revision: Revision | None = None
    """Branch, tag or commit of an hf:// source, up to 255 characters; the same as @REVISION at its end. A
    commit keeps replicas that start later alike. Default: the source's own, else main."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with what opens private sources, of whatever kinds: the model's, and those of a draft, of
    adapters and of a baseline. For hf:// its key HF_TOKEN; for s3:// AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, and if wanted AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL_S3; for oci://
    .dockerconfigjson, as `kubectl create secret docker-registry` makes it. Default: none."""
    max_model_len: PositiveTokens | None = None
    """Longest prompt plus answer, in tokens (1 to 1048576). Default: what the model's config states."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model name that clients send, 1 to 256 characters. Default: the name of this InferenceService."""

    @model_validator(mode="after")
    def _names_one_revision(self) -> Self:
        if self.revision is not None and (scheme_of(self.source) != "hf" or "@" in self.source):
            raise ValueError(f"{REVISION_MESSAGE}; model.source is {self.source!r}")
        return self

    @property
    def revised_source(self) -> str:
        """The source with its revision, as the engine is told it."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"
