"""Which requests asked for the model, and why one that was answered with an error was rejected.

The engine counts what it refuses itself, and who reads a body counts what is wrong in it; the rest is here.
"""

from headway_runtime.metrics import RejectReason
from headway_runtime.server.http_errors import HttpError


def asks_for_model(method: str, path: str) -> bool:
    """Whether a request counts as received, answered or not."""
    return method == "POST" and path.startswith("/v1/")


def reason_of(error: HttpError) -> RejectReason | None:
    """None where somebody else has counted it, or it was accepted."""
    match error:
        case HttpError(status=401):
            return RejectReason.UNAUTHORIZED
        case HttpError(code="model_not_found"):
            return RejectReason.MODEL_NOT_FOUND
        case HttpError(code="unsupported_content_type"):
            return RejectReason.INVALID
        case HttpError(status=408 | 413 | 431):
            return RejectReason.TOO_LARGE
        case HttpError(code="connections"):
            return RejectReason.CONNECTIONS
        case HttpError(
            status=503, code="engine_starting" | "engine_stalled" | "engine_dead" | "body_not_read"
        ):
            return RejectReason.UNAVAILABLE
        case _:
            return None
