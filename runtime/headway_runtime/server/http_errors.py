"""Errors as clients of the OpenAI API expect them: one JSON body, one status, one type per kind."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from headway_runtime.errors import EngineDeadError, HeadwayRuntimeError, InvalidRequestError
from headway_runtime.server.error_codes import HttpCode

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}


@dataclass(eq=False)
class HttpError(HeadwayRuntimeError):
    """An error with its HTTP status. more: further members of the error object. headers: e.g. Retry-After."""

    status: int
    message: str
    code: HttpCode = field(kw_only=True)
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": _TYPE_OF_STATUS.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
            **self.more,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def overloaded(message: str, code: HttpCode, retry_after_seconds: int) -> HttpError:
    """503: the same request may well be served later, or by another replica."""
    return HttpError(503, message, code=code, headers={"Retry-After": str(retry_after_seconds)})


def http_error_of(error: HeadwayRuntimeError | TimeoutError) -> HttpError:
    """The HTTP form of an error of the runtime's."""
    match error:
        case HttpError():
            return error
        case InvalidRequestError():
            return HttpError(400, str(error), param=error.param, code=error.code)
        case EngineDeadError():
            # It was not accepted: another replica may serve it.
            return overloaded(str(error), "engine_dead", 1)
        case TimeoutError():
            return overloaded("the engine did not answer in time; try again", "engine_busy", 1)
        case _:
            return HttpError(500, str(error), code="internal_error")
