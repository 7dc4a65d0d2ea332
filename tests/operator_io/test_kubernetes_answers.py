"""What refusals mean, in the API server's own words."""

import json
from typing import Any

import pytest

from headway_operator.cluster.kubernetes_answers import error_of, retry_after_seconds
from headway_operator.errors import (
    AbsentError,
    AdmissionError,
    ClusterError,
    ConflictError,
    FieldConflictError,
    ForbiddenError,
    UnavailableError,
)

SERVICE = 'services "demo"'
QUOTA = (
    f"{SERVICE} is forbidden: exceeded quota: few, requested: services=1, used: services=2, "
    "limited: services=2"
)
POLICY = (
    f"{SERVICE} is forbidden: ValidatingAdmissionPolicy 'names' with binding 'all' denied request: "
    "failed expression: object.metadata.name.startsWith('x')"
)
WEBHOOK = 'Internal error occurred: failed calling webhook "a.example.com": failed to call webhook: EOF'
DENIED = 'admission webhook "a.example.com" denied the request: no'
RIGHTS = f'{SERVICE} is forbidden: User "system:serviceaccount:a:b" cannot patch resource "services"'


def status(message: str, **more: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, **more}).encode()


@pytest.mark.parametrize(
    ("code", "raw", "want"),
    [
        (403, status(RIGHTS), ForbiddenError),
        (401, status("Unauthorized"), ForbiddenError),
        (403, status(QUOTA), AdmissionError),
        (422, status(POLICY), AdmissionError),
        (400, status(DENIED), AdmissionError),
        (500, status(WEBHOOK), AdmissionError),
        (500, status("etcdserver: leader changed"), UnavailableError),
        (429, status("too many requests"), UnavailableError),
        (409, status("the object has been modified"), ConflictError),
        (422, status("spec.replicas: Invalid value"), ClusterError),
        (502, b"<html>bad gateway", UnavailableError),
        (404, b'"text"', AbsentError),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(code: int, raw: bytes, want: type[ClusterError]) -> None:
    error = error_of("PATCH /x", code, raw)
    assert type(error) is want
    assert str(error).startswith(f"PATCH /x: {code}: ")


def test_who_sets_which_fields_is_named() -> None:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{who}" using apps/v1 at 2026-11-01T10:00:00Z',
            "field": field,
        }
        for who, field in (
            ("kubectl-edit", ".spec.paused"),
            ("argocd", ".spec.selector"),
            ("argocd", ".spec.paused"),
        )
    ]
    error = error_of("PATCH /x", 409, status("Apply failed with 3 conflicts", details={"causes": causes}))
    assert isinstance(error, FieldConflictError)
    assert error.managers == ("argocd", "kubectl-edit")
    assert error.fields == (".spec.paused", ".spec.selector")


@pytest.mark.parametrize(
    ("code", "headers", "want"),
    [
        (429, {"Retry-After": "5"}, 5.0),
        (429, {"retry-after": "5"}, 5.0),
        (503, {"Retry-After": "2"}, 2.0),
        (429, {}, 1.0),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (429, {"Retry-After": "86400"}, 60.0),
        (503, {}, 0.0),
        (500, {"Retry-After": "5"}, 0.0),
        (200, {"Retry-After": "5"}, 0.0),
    ],
)
def test_a_server_that_asks_to_wait_is_believed_within_reason(
    code: int, headers: dict[str, str], want: float
) -> None:
    assert retry_after_seconds(code, headers) == want
