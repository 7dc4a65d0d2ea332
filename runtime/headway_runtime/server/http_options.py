"""The flags of the HTTP side: how many processes, what a request may hold and how long it may take to come.

Where vLLM or uvicorn has the same flag, it has its name here, or its name works, too.
"""

import argparse
from dataclasses import dataclass

from headway.argument_types import integer, positive, size

DEFAULT_BODY_BYTES = 16 * 2**20
DEFAULT_HEADER_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """See the flags of the same names."""

    api_server_count: int = 1
    max_connections: int = 8192
    max_header_bytes: int = DEFAULT_HEADER_BYTES
    max_header_count: int = 256
    header_timeout_seconds: float = 15.0
    max_body_bytes: int = DEFAULT_BODY_BYTES
    body_timeout_seconds: float = 60.0
    keep_alive_seconds: float = 75.0
    engine_timeout_seconds: float = 180.0


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    default = HttpOptions()
    add(
        "--api-server-count",
        type=integer(1, 64),
        default=default.api_server_count,
        metavar="N",
        help="HTTP processes that share the port, in front of one engine process (default %(default)s)",
    )
    add(
        "--max-connections",
        "--limit-concurrency",
        type=integer(1),
        default=default.max_connections,
        metavar="N",
        help="open connections per HTTP process (default %(default)s); idle for 1 s makes room, else 503",
    )
    add(
        "--max-header-bytes",
        "--h11-max-incomplete-event-size",
        type=size,
        default=default.max_header_bytes,
        metavar="SIZE",
        help="request line and headers together (default 64Ki); more is 431",
    )
    add(
        "--max-header-count",
        "--h11-max-header-count",
        type=integer(1),
        default=default.max_header_count,
        metavar="N",
        help="headers of a request (default %(default)s); more is 431",
    )
    add(
        "--header-timeout-seconds",
        type=positive,
        default=default.header_timeout_seconds,
        metavar="S",
        help="until a request's headers have come (default %(default)s); later is 408",
    )
    add(
        "--max-body-bytes",
        type=size,
        default=default.max_body_bytes,
        metavar="SIZE",
        help="a request's body (default 16Mi); more is 413",
    )
    add(
        "--body-timeout-seconds",
        type=positive,
        default=default.body_timeout_seconds,
        metavar="S",
        help="until a request's body has come (default %(default)s); later is 408",
    )
    add(
        "--timeout-keep-alive",
        type=positive,
        default=default.keep_alive_seconds,
        metavar="S",
        help="until a connection without a request is closed (default %(default)s)",
    )
    add(
        "--engine-timeout-seconds",
        type=positive,
        default=default.engine_timeout_seconds,
        metavar="S",
        help="without a step or an answer of the engine's, after which /health fails (default %(default)s)",
    )


def http_options(arguments: argparse.Namespace) -> HttpOptions:
    """What was asked for."""
    return HttpOptions(
        api_server_count=arguments.api_server_count,
        max_connections=arguments.max_connections,
        max_header_bytes=arguments.max_header_bytes,
        max_header_count=arguments.max_header_count,
        header_timeout_seconds=arguments.header_timeout_seconds,
        max_body_bytes=arguments.max_body_bytes,
        body_timeout_seconds=arguments.body_timeout_seconds,
        keep_alive_seconds=arguments.timeout_keep_alive,
        engine_timeout_seconds=arguments.engine_timeout_seconds,
    )
