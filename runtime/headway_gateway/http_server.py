"""aiohttp's server, whose own refusals (what is no HTTP, a bug of ours) are errors like all others."""

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, InvalidURLError, LineTooLong

from headway_gateway import replies
from headway_gateway.headers import REQUEST_ID, request_id_of

LONGEST_HEADER_BYTES = 65536
MOST_HEADERS = 256  # as a replica takes


class Server(web.Server):
    """Makes a protocol for each connection."""

    def __call__(self) -> web.RequestHandler:
        """As aiohttp's, which offers no other way to have another protocol."""
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp logs it, and raises where an answer has begun; the rest of its answer is replaced."""
        super().handle_error(request, status, exc, message)
        response = _refusal(status, exc)
        response.headers[REQUEST_ID] = request_id_of(request.headers)
        response.force_close()
        return response


def _refusal(status: int, error: BaseException | None) -> web.Response:
    if isinstance(error, LineTooLong):
        return replies.error_response(
            431,
            f"the request line or a header is more than {LONGEST_HEADER_BYTES} bytes; send less",
            code="headers_too_large",
        )
    if status >= 500:
        return replies.error_response(
            status, f"internal error: {type(error).__name__}", code="internal_error"
        )
    # The rest of the parser's message shows what was sent, which may be a secret.
    found = error.message.partition("\n")[0].rstrip(":") if isinstance(error, BadHttpMessage) else "no HTTP"
    if found.startswith("Too many headers"):
        return replies.error_response(
            431, f"the request has more than {MOST_HEADERS} headers; send fewer", code="headers_too_large"
        )
    if "can't be present with" in found:
        why = "Content-Length and Transfer-Encoding both say how long the body is; send one of them"
    elif isinstance(error, InvalidURLError):
        why = "the path has a byte that no URL may have; encode it as %XX"
    else:
        why = f"this is not valid HTTP ({found}); send HTTP/1.1"
    return replies.error_response(status, why, code="invalid_http")
