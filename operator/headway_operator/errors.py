"""Every error the operator raises on purpose, in one tree.

    HeadwayOperatorError
    ├── SpecError              an InferenceService that cannot be honoured; becomes a condition. Names the field
    ├── ClusterError           the cluster refused or could not be reached
    │   ├── ConflictError      another field manager or controller owns what we would write
    │   └── UnavailableError   no answer in time: try again, change nothing
    └── ScrapeError            a replica gave no usable sample
"""


class HeadwayOperatorError(Exception):
    """Base of the tree."""


class SpecError(HeadwayOperatorError):
    """`field` is the path in the manifest (`spec.slo.ttftMilliseconds`), `reason` a CamelCase condition reason."""

    def __init__(self, field: str, message: str, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class ClusterError(HeadwayOperatorError):
    """The cluster refused a call."""


class ConflictError(ClusterError):
    """Someone else owns the object or field."""


class UnavailableError(ClusterError):
    """The cluster did not answer in time."""


class ScrapeError(HeadwayOperatorError):
    """A replica's sample is missing, of an unknown version, or contradicts itself."""
