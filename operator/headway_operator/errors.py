"""Every error the operator raises on purpose, in one tree.

HeadwayOperatorError
├── SpecError              an InferenceService that cannot be honoured; becomes a condition. Names the field
├── ClusterError           the cluster refused or could not be reached
│   ├── ConflictError      another field manager or controller owns what we would write
│   ├── ForbiddenError     the operator's rights do not cover the call
│   └── UnavailableError   no answer in time: try again, change nothing
├── KeyPairError           the stored admin key pair cannot be used
└── ScrapeError            a replica gave no usable sample
"""


class HeadwayOperatorError(Exception):
    """Base of the tree."""


class SpecError(HeadwayOperatorError):
    """`field`: path in the manifest (`spec.slo.ttftMilliseconds`); `reason`: of the condition, CamelCase."""

    def __init__(self, field: str, message: str, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class ClusterError(HeadwayOperatorError):
    """The cluster refused a call."""


class ConflictError(ClusterError):
    """Someone else owns the object or field."""


class ForbiddenError(ClusterError):
    """The operator's rights do not cover the call."""


class UnavailableError(ClusterError):
    """The cluster did not answer in time."""


class KeyPairError(HeadwayOperatorError):
    """The stored admin key pair cannot be used."""


class ScrapeError(HeadwayOperatorError):
    """A replica's sample is missing, of an unknown version, or contradicts itself."""
