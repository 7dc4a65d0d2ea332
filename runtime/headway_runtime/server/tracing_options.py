"""Where traces go: the flag of `headway serve`, or OpenTelemetry's own variables. Imports nothing of it.

Only OTLP over HTTP (protobuf) is spoken. What else the standard variables say (headers, timeouts, sampling,
resource attributes, batch sizes) OpenTelemetry's library reads itself.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from headway_runtime.errors import ConfigError

FLAG = "--otlp-traces-endpoint"
TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"
PROTOCOL = "http/protobuf"
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """endpoint: the URL that spans are posted to; None leaves it to the standard variables."""

    is_on: bool = False
    endpoint: str | None = None


def add_tracing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG, metavar="URL", help=f"send a trace of each request there; or ${TRACES_ENDPOINT_VARIABLE}"
    )


def tracing_options(arguments: argparse.Namespace, environment: Mapping[str, str]) -> TracingOptions:
    """ConfigError for an endpoint that is none, another protocol, or a library that is not there."""
    given: str | None = arguments.otlp_traces_endpoint
    variable = next(
        (one for one in (TRACES_ENDPOINT_VARIABLE, ENDPOINT_VARIABLE) if environment.get(one)), None
    )
    if given is None and variable is None:
        return TracingOptions()
    if environment.get(DISABLED_VARIABLE, "").strip().lower() == "true":
        return TracingOptions()
    source = FLAG if given is not None or variable is None else f"${variable}"
    _require_http(environment)
    if not _has_library():
        raise ConfigError(
            f"{source} asks for traces, but OpenTelemetry is not installed; remedy: "
            "pip install -e '.[runtime,tracing]' in the checkout"
        )
    if given is None:
        return TracingOptions(is_on=True)
    return TracingOptions(is_on=True, endpoint=_endpoint(given))


def _endpoint(given: str) -> str:
    """The URL to post to: the usual path is added to a bare host, as it is to the standard variable."""
    try:
        parts = urlsplit(given)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{FLAG}={given!r}: want a URL such as http://collector:4318{TRACES_PATH}")
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else given


def _require_http(environment: Mapping[str, str]) -> None:
    for name in PROTOCOL_VARIABLES:
        value = environment.get(name)
        if value:
            if value != PROTOCOL:
                raise ConfigError(
                    f"${name}={value!r}: only {PROTOCOL!r} is spoken; name the collector's port for it"
                )
            return  # the first one that is set counts


def _has_library() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None and (
            find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False
