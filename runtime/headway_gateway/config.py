"""The gateway's flags and the frozen config they become; opens no file, asks nothing of the network."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.argument_types import integer, not_negative, positive
from headway.command_parser import CommandParser
from headway_gateway.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
# Half of the memory that the operator gives a gateway by default: the other half is for what is in flight.
DEFAULT_MAX_WAITING_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServiceReference:
    """A headless Service whose EndpointSlices name the backends."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything fixed at start. Exactly one of `backends_file` and `kubernetes_service` is set.

    max_held_bytes, max_connections: None for what the memory there is allows.
    """

    host: str
    port: int
    backends_file: Path | None
    kubernetes_service: ServiceReference | None
    port_file: Path | None = None
    lifeline_fd: int | None = None
    admin_public_key_file: Path | None = None
    admin_audience: str | None = None
    max_waiting: int = 1024
    max_waiting_bytes: int = DEFAULT_MAX_WAITING_BYTES
    waiting_timeout_seconds: float = 30.0
    drain_timeout_seconds: float = 60.0
    idle_timeout_seconds: float = 600.0
    max_body_bytes: int = 16 * 1024 * 1024
    max_held_bytes: int | None = None
    max_connections: int | None = None
    log_level: LogLevel = "info"


def parse_config(arguments: list[str]) -> GatewayConfig:
    """Flags to config. A wrong flag ends the process with status 2 and a message that names it."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        return _to_config(options)
    except ConfigError as error:
        parser.error(str(error))


def _to_config(options: argparse.Namespace) -> GatewayConfig:
    if (options.admin_public_key_file is None) != (options.admin_audience is None):
        raise ConfigError(
            f"--admin-public-key-file={options.admin_public_key_file!r} and "
            f"--admin-audience={options.admin_audience!r} belong together; give both or neither"
        )
    service = options.kubernetes_service
    return GatewayConfig(
        host=options.host,
        port=options.port,
        backends_file=options.backends_file,
        kubernetes_service=None if service is None else parse_service_reference(service),
        port_file=options.port_file,
        lifeline_fd=options.lifeline_fd,
        admin_public_key_file=options.admin_public_key_file,
        admin_audience=options.admin_audience,
        max_waiting=options.max_waiting,
        max_waiting_bytes=options.max_waiting_bytes,
        waiting_timeout_seconds=options.waiting_timeout_seconds,
        drain_timeout_seconds=options.drain_timeout_seconds,
        idle_timeout_seconds=options.idle_timeout_seconds,
        max_body_bytes=options.max_body_bytes,
        max_held_bytes=options.max_held_bytes,
        max_connections=options.max_connections,
        log_level=options.log_level,
    )


def parse_service_reference(value: str) -> ServiceReference:
    """`NAMESPACE/NAME` to its two parts."""
    namespace, slash, name = value.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise ConfigError(
            f"--kubernetes-service={value!r} is not NAMESPACE/NAME, for example default/demo-replicas"
        )
    return ServiceReference(namespace, name)


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headway gateway",
        description="Stand in front of a service's replicas: spread, hold and stream requests.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; :: is every one, of IPv4 and of IPv6 (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=integer(0, 65535), default=8000, help="0 takes a free port (default: %(default)s)"
    )
    parser.add_argument("--port-file", type=Path, help="written with the port number once it is bound")
    parser.add_argument(
        "--lifeline-fd", type=integer(0), help="exit at once when this inherited pipe reaches its end"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--backends-file", type=Path, help="local table of replicas, read again when it is replaced"
    )
    source.add_argument(
        "--kubernetes-service",
        metavar="NAMESPACE/NAME",
        help="headless Service whose EndpointSlices are watched",
    )
    parser.add_argument(
        "--admin-public-key-file", type=Path, help="PEM keys that admin tokens are verified with"
    )
    parser.add_argument(
        "--admin-audience", metavar="NAMESPACE/NAME", help="audience that admin tokens must carry"
    )
    parser.add_argument(
        "--max-waiting",
        type=integer(0),
        default=1024,
        help="requests held while no replica is ready (default: %(default)s)",
    )
    parser.add_argument(
        "--max-waiting-bytes",
        type=integer(0),
        default=DEFAULT_MAX_WAITING_BYTES,
        help="bytes of their bodies, all together; one that waits alone may have more (default: %(default)s)",
    )
    parser.add_argument(
        "--waiting-timeout-seconds",
        type=not_negative,
        default=30.0,
        help="how long one is held (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout-seconds",
        type=not_negative,
        default=60.0,
        help="after SIGTERM, end what is still running then (default: %(default)s)",
    )
    parser.add_argument(
        "--idle-timeout-seconds",
        type=positive,
        # As long as the openai client waits by default: an unstreamed answer is silent until its end.
        default=600.0,
        help="give up on a replica or a client that moves no byte for so long (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=integer(1),
        default=16 * 1024 * 1024,
        help="longer request bodies are answered 413 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-held-bytes",
        type=integer(1),
        help="bytes of all request bodies in memory together; those above 64 KiB have three quarters of it "
        "(default: half of the container's memory limit; 268435456 without one)",
    )
    parser.add_argument(
        "--max-connections",
        type=integer(1),
        help="open connections of clients; one that rests makes room, else 503 (default: one for each 128 "
        "KiB of the container's memory, 8192 without a limit, or half of the files that may be open)",
    )
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser
