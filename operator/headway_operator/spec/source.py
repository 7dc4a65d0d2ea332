"""Where a model's weights may lie: the forms of a source, for the CRD and where no API server stands.

The runtime reads the same forms (`headway_runtime/sources/reference.py`); `tests/contract/` holds both to one
list. Expressions are such that CEL's and Python's engines read them alike. Knows nothing of what is rendered.
"""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Field

from headway_operator.spec.base import rules

Scheme = Literal["bundled", "file", "hf", "s3", "oci", "pvc", "cache"]
# Sources that a replica fetches, with credentials where they are private.
REMOTE_SCHEMES = ("hf", "s3", "oci")

_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"
_HOST = "[A-Za-z0-9-]+"
_PORT = ":[0-9]{1,5}"
_REPOSITORY = "[a-z0-9]+([._-]+[a-z0-9]+)*"
_TEXT = "[^\\x00-\\x1f\\x7f]"
_REGISTRY = f"(localhost({_PORT})?|{_HOST}([.]{_HOST})+({_PORT})?|{_HOST}{_PORT})"
_REFERENCE = "(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
_REMOTE_FORMS = (
    f"hf://{_NAME}/{_NAME}(@[A-Za-z0-9][A-Za-z0-9_./-]*)?",
    f"s3://[A-Za-z0-9][A-Za-z0-9_.-]{{1,61}}[A-Za-z0-9](/{_TEXT}*)?",
    f"oci://{_REGISTRY}/{_REPOSITORY}(/{_REPOSITORY})*{_REFERENCE}",
)
_FORMS = (
    "/.+",
    "bundled://.+",
    "file://(localhost)?/[^?#]+",
    *_REMOTE_FORMS,
    f"pvc://[a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?(/{_TEXT}*)?",
    "cache://[a-z]([-a-z0-9]{0,35}[a-z0-9])?",
)
# What has one of the forms and names nothing all the same: repositories that the Hub does not have, ways up.
EXCEPT_PATTERN = "^hf://(.*(--|[.][.])|[^@]*([.]git|[.-])(@|$))|^pvc://(.*/)?[.][.](/|$)"
SOURCE_MESSAGE = (
    "source must be bundled://NAME, file:///FOLDER, an absolute path, hf://ORG/NAME or "
    "hf://ORG/NAME@REVISION, s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY:TAG or @sha256:DIGEST, "
    "pvc://CLAIM/PATH or cache://NAME; for example bundled://headway-tiny"
)
REMOTE_MESSAGE = (
    "source must be one that is fetched: hf://ORG/NAME or hf://ORG/NAME@REVISION, s3://BUCKET/PREFIX, or "
    "oci://REGISTRY/REPOSITORY:TAG or @sha256:DIGEST; what lies on a claim already is served as "
    "pvc://CLAIM/PATH"
)


def _any_of(forms: Iterable[str]) -> str:
    return f"^({'|'.join(forms)})$"


SOURCE_PATTERN = _any_of(_FORMS)
_REMOTE_PATTERN = _any_of(_REMOTE_FORMS)


def _cel(pattern: str) -> str:
    """A pattern inside a CEL string, where a backslash is written twice."""
    return pattern.replace("\\", "\\\\")


def _rule(pattern: str) -> str:
    return f"self.matches('{_cel(pattern)}') && !self.matches('{_cel(EXCEPT_PATTERN)}')"


def _matching(pattern: str, message: str) -> Callable[[str], str]:
    """A check that a source has one of the forms."""

    def checked(source: str) -> str:
        if not re.search(pattern, source) or re.search(EXCEPT_PATTERN, source) or "\n" in source:
            raise ValueError(f"{message}; got {source!r}")
        return source

    return checked


def scheme_of(source: str) -> Scheme:
    """The kind of a source that was checked; an absolute path is a file."""
    scheme, separator, _ = source.partition("://")
    return cast("Scheme", scheme) if separator else "file"


Source = Annotated[
    str,
    AfterValidator(_matching(SOURCE_PATTERN, SOURCE_MESSAGE)),
    Field(min_length=1, max_length=1024, json_schema_extra=rules((_rule(SOURCE_PATTERN), SOURCE_MESSAGE))),
]
# What is fetched; of the kinds REMOTE_SCHEMES.
RemoteSource = Annotated[
    str,
    AfterValidator(_matching(_REMOTE_PATTERN, REMOTE_MESSAGE)),
    Field(min_length=1, max_length=1024, json_schema_extra=rules((_rule(_REMOTE_PATTERN), REMOTE_MESSAGE))),
]
