"""Every error the gateway raises on purpose, in one tree.

    HeadwayGatewayError
    ├── ConfigError           a flag is wrong; the process does not start
    ├── BackendListError      a list of backends cannot be understood; the last good one stays
    ├── TokenError            an admin call without a good token: HTTP 401
    ├── RoutingError          what the operator tells is not usable: HTTP 422
    ├── HeaderError           the request's headers cannot be passed on: HTTP 400
    ├── BodyError             the request's body cannot be taken: HTTP 400, 408, 413 or 503
    ├── AnswerError           the gateway answers a request itself with a 5xx
    ├── NotAcceptedError      one attempt failed and no replica can have taken the request: try again
    ├── ReplicaDiedError      a replica took the request and died before it said anything: try another, once
    └── BrokenStreamError     a replica's answer broke off after its head was passed on

Bugs are `assert` or built-in exceptions, never these.
"""

from headway_gateway.error_codes import GatewayCode


class HeadwayGatewayError(Exception):
    """Base of the tree; `str()` names the field, the value and the remedy."""


class ConfigError(HeadwayGatewayError):
    """A flag or a file named by a flag is not usable."""


class BackendListError(HeadwayGatewayError):
    """A table or an EndpointSlice that does not say which backends there are."""


class TokenError(HeadwayGatewayError):
    """An admin call that carries no token, or one that must not be trusted."""


class RoutingError(HeadwayGatewayError):
    """A routing that cannot be followed; the last good one stays."""


class HeaderError(HeadwayGatewayError):
    """A header of the client's that a replica would get as another one."""


class BodyError(HeadwayGatewayError):
    """The client's body cannot be read whole. `status` is the answer."""

    def __init__(
        self, status: int, message: str, *, code: GatewayCode, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class AnswerError(HeadwayGatewayError):
    """No replica's answer was passed on; the client gets `status`. `reason`: its code, the metric's label."""

    def __init__(
        self, status: int, reason: GatewayCode, message: str, *, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NotAcceptedError(HeadwayGatewayError):
    """Nothing of this attempt reached a replica. `reason` is the metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReplicaDiedError(HeadwayGatewayError):
    """The connection broke before a byte of the answer's body came; the client knows nothing of it."""


class BrokenStreamError(HeadwayGatewayError):
    """The answer's head is with the client, the rest never came. `reason`: its code, the metric's label."""

    def __init__(self, reason: GatewayCode, message: str) -> None:
        super().__init__(message)
        self.reason = reason
