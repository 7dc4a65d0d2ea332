"""Every error the operator raises on purpose, in one tree.

HeadwayOperatorError
├── SpecError              an InferenceService that cannot be honoured; becomes a condition. Names the field
│   └── InternalError      the operator itself fails over it: a defect of ours, told like the others
├── ClusterError           the cluster refused or could not be reached
│   ├── ConflictError      another controller owns the object that we would write
│   ├── FieldConflictError another field manager sets, again and again, fields that we set
│   ├── AdmissionError     an admission webhook or policy, or a quota, refuses what we would write
│   ├── ForbiddenError     the operator's rights do not cover the call
│   ├── AbsentError        the API server has no such object, or no such kind
│   └── UnavailableError   no answer in time: try again, change nothing
│       └── ThrottledError the API server asked to wait
├── NotLeadingError        this operator may not write now: it does not hold the Lease
├── OtherOperatorError     another operator, with a Lease of its own, looks after the service
├── KeyPairError           the stored admin key pair cannot be used
└── ScrapeError            a replica gave no usable sample
"""

import contextlib
from collections.abc import Iterator


class HeadwayOperatorError(Exception):
    """Base of the tree. `condition_reason`: of the condition Degraded when a step of a pass fails so."""

    condition_reason = "StepFailed"


class SpecError(HeadwayOperatorError):
    """`field`: path in the manifest (`spec.slo.ttftMilliseconds`); `reason`: of the condition, CamelCase."""

    def __init__(self, field: str, message: str, reason: str = "InvalidSpec") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = reason


class InternalError(SpecError):
    """What the operator does with a spec fails in a way that nobody has foreseen."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "spec",
            f"the operator fails over it: {type(error).__name__}: {error}; this is a defect of the operator: "
            "report it with the traceback in its log, and take back what was changed last",
            reason="InternalError",
        )


@contextlib.contextmanager
def as_internal_error() -> Iterator[None]:
    """Within it, whatever is not of this tree becomes an InternalError. For what does no I/O."""
    try:
        yield
    except HeadwayOperatorError:
        raise
    except Exception as error:
        raise InternalError(error) from error


class ClusterError(HeadwayOperatorError):
    """The cluster refused a call."""


class ConflictError(ClusterError):
    """Someone else owns the object, or was faster."""

    condition_reason = "ObjectConflict"


class FieldConflictError(ClusterError):
    """Others set fields that server-side apply would set. `managers`: their names; `fields`: the paths."""

    condition_reason = "FieldConflict"

    def __init__(self, message: str, managers: tuple[str, ...] = (), fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.managers = managers
        self.fields = fields


class AdmissionError(ClusterError):
    """Admission refuses the object, or cannot be asked."""

    condition_reason = "AdmissionRefused"


class ForbiddenError(ClusterError):
    """The operator's rights do not cover the call."""

    condition_reason = "Forbidden"


class AbsentError(ClusterError):
    """There is no such object, or no such kind."""


class UnavailableError(ClusterError):
    """The cluster did not answer in time."""

    condition_reason = "ApiUnavailable"


class ThrottledError(UnavailableError):
    """The API server asked to wait, and the time is not over."""


class NotLeadingError(HeadwayOperatorError):
    """This operator does not hold the Lease, so it writes nothing."""


class OtherOperatorError(HeadwayOperatorError):
    """Another operator looks after the service: nothing is written for it. Both are by namespace of Lease."""

    def __init__(self, other: str, own: str) -> None:
        super().__init__(
            f"the operator whose Lease is in namespace {other!r} looks after this service; this one, whose "
            f"Lease is in {own!r}, leaves it alone: have only one of them watch this namespace"
        )


class KeyPairError(HeadwayOperatorError):
    """The stored admin key pair cannot be used."""


class ScrapeError(HeadwayOperatorError):
    """A replica's sample is missing, of an unknown version, or contradicts itself."""


def is_refused_by_admission(message: str) -> bool:
    """Whether the API server's words are about admission: a webhook's, a policy's, or pod security's no."""
    words = (
        "admission webhook",
        "failed calling webhook",
        "ValidatingAdmissionPolicy",
        "violates PodSecurity",
    )
    return any(one in message for one in words)
