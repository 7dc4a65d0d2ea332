"""What a user wrote as a model's source, taken apart: which kind it is and what it names.

Pure: looks at no disk and no network. The operator checks the same forms in the custom resource
(`headway_operator/spec/source.py`); `tests/contract/` holds both to one list.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headway_runtime.errors import ConfigError

FORMS = (
    "bundled://NAME, file:///FOLDER or the path of a folder, hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX, "
    "oci://REGISTRY/REPOSITORY[:TAG|@DIGEST], pvc://CLAIM/PATH, cache://NAME"
)
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TEXT = r"[^\x00-\x1f\x7f]*"
_BUCKET = re.compile(rf"([A-Za-z0-9][\w.-]{{1,61}}[A-Za-z0-9])(?:/({_TEXT}))?", re.ASCII)
_REGISTRY = re.compile(
    r"(localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:))(:[0-9]{1,5})?"
    r"/([a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(\w[\w.-]{0,127}))?(?:@(sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_CLAIM = re.compile(rf"([a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?)(?:/({_TEXT}))?")
_CACHE = re.compile(r"[a-z]([-a-z0-9]{0,35}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that comes with this package."""

    name: str


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A folder of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the Hugging Face Hub, or of what HF_ENDPOINT names. revision: branch, tag or commit."""

    repository: str
    revision: str

    @property
    def pinned(self) -> str | None:
        """The commit, where the source names one: what it holds never changes."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    @property
    def ref(self) -> str:
        """Under which name the cache remembers what the source held when it was last asked."""
        return self.revision

    def __str__(self) -> str:
        return f"hf://{self.repository}@{self.revision}"


@dataclass(frozen=True, slots=True)
class BucketModel:
    """The objects right below a prefix of an S3 bucket. prefix: without slashes at its ends; may be empty."""

    bucket: str
    prefix: str

    @property
    def pinned(self) -> str | None:
        """Nothing: objects may always be replaced."""
        return None

    @property
    def ref(self) -> str:
        """As a hub model's."""
        return "latest"

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """An image or artifact of an OCI registry. reference: a tag, or a digest."""

    host: str
    repository: str
    reference: str

    @property
    def pinned(self) -> str | None:
        """The digest, where the source names one, as `Listing.identity` has it."""
        return self.reference.removeprefix("sha256:") if self.reference.startswith("sha256:") else None

    @property
    def ref(self) -> str:
        """As a hub model's."""
        return self.reference.replace(":", "-")

    def __str__(self) -> str:
        separator = "@" if self.pinned else ":"
        return f"oci://{self.host}/{self.repository}{separator}{self.reference}"


@dataclass(frozen=True, slots=True)
class ClaimModel:
    """A folder on a PersistentVolumeClaim, which only a pod can see."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """What a ModelCache of the cluster holds, which only a pod can see."""

    name: str


RemoteModel = HubModel | BucketModel | RegistryModel
Reference = BundledModel | FolderModel | RemoteModel | ClaimModel | CachedModel


def parse(source: str, revision: str | None = None) -> Reference:
    """Take `source` apart; `revision` is the flag of that name. ConfigError says which form is wanted."""
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "hf":
        return _hub(source, rest, revision)
    if revision is not None:
        raise ConfigError(
            f"--revision={revision!r} is for hf:// sources; {source!r} is none: remove it "
            "(oci:// names a tag or digest in the source)"
        )
    if not separator:
        return FolderModel(Path(source).expanduser())
    match scheme:
        case "bundled":
            return BundledModel(rest)
        case "file":
            return FolderModel(_file_path(source))
        case "s3":
            return _bucket(source, rest)
        case "oci":
            return _registry(source, rest)
        case "pvc":
            return _claim(source, rest)
        case "cache":
            return _cache(source, rest)
    raise ConfigError(f"model source {source!r}: scheme {scheme!r} is not supported; use {FORMS}")


def _hub(source: str, rest: str, flag: str | None) -> HubModel:
    match = _HUB.fullmatch(rest)
    if match is None or "--" in rest or ".." in rest or match[1].endswith((".git", "-", ".")):
        raise ConfigError(
            f"model source {source!r}: want hf://ORG/NAME or hf://ORG/NAME@REVISION, "
            "as the model's page names them"
        )
    repository, written = match[1], match[2]
    if flag is not None and (not re.fullmatch(r"[A-Za-z0-9][\w./-]*", flag, re.ASCII) or ".." in flag):
        raise ConfigError(f"--revision={flag!r}: want a branch, a tag or a commit")
    if flag is not None and written is not None and flag != written:
        raise ConfigError(f"--revision={flag!r} and model source {source!r} name two revisions; keep one")
    return HubModel(repository, flag or written or "main")


def _bucket(source: str, rest: str) -> BucketModel:
    match = _BUCKET.fullmatch(rest)
    if match is None:
        raise ConfigError(
            f"model source {source!r}: want s3://BUCKET/PREFIX, the prefix being the 'folder' of the model"
        )
    return BucketModel(match[1], (match[2] or "").strip("/"))


def _registry(source: str, rest: str) -> RegistryModel:
    match = _REGISTRY.fullmatch(rest)
    if match is None:
        raise ConfigError(
            f"model source {source!r}: want oci://REGISTRY/REPOSITORY, with :TAG or @sha256:DIGEST behind if "
            "any; REGISTRY is a host with a dot or a port, such as registry.example.com or localhost:5000, "
            "and the repository is in lower case"
        )
    host, port, repository, tag, digest = match.groups()
    return RegistryModel(host + (port or ""), repository, digest or tag or "latest")


def _claim(source: str, rest: str) -> ClaimModel:
    match = _CLAIM.fullmatch(rest)
    path = (match[2] or "").strip("/") if match else ""
    if match is None or ".." in path.split("/"):
        raise ConfigError(f"model source {source!r}: want pvc://CLAIM/PATH, the path inside the volume")
    return ClaimModel(match[1], path)


def _cache(source: str, rest: str) -> CachedModel:
    if not _CACHE.fullmatch(rest):
        raise ConfigError(f"model source {source!r}: want cache://NAME, the name of a ModelCache")
    return CachedModel(rest)


def _file_path(source: str) -> Path:
    parts = urlsplit(source)
    if (
        parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"model source {source!r}: a file source is written file:///absolute/folder")
    return Path(unquote(parts.path))
