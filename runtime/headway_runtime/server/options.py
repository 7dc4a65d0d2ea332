"""The command line of `headway serve`: parsed, checked and resolved once into `ServeOptions`.

Runs before anything heavy is imported: reads flags, a few environment variables, the model's config.json and
generation_config.json, and nothing else. What only the engine process can know (which device there is) stays
"auto".
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.argument_types import integer, positive
from headway.command_parser import CommandParser
from headway_runtime.config import LoraConfig
from headway_runtime.engine_options import EngineOptions, add_engine_arguments, engine_options
from headway_runtime.errors import ConfigError
from headway_runtime.model_config import read_model_config
from headway_runtime.server.chat_options import ChatOptions, add_chat_arguments, chat_options
from headway_runtime.server.cors_options import CorsOptions, add_cors_arguments, cors_options
from headway_runtime.server.http_options import HttpOptions, add_http_arguments, http_options
from headway_runtime.server.tls import TlsOptions, add_tls_arguments, tls_options
from headway_runtime.server.tracing_options import TracingOptions, add_tracing_arguments, tracing_options
from headway_runtime.server.vllm_flags import add_vllm_arguments
from headway_runtime.sources import resolve
from headway_runtime.sources.flags import MODEL_HELP

API_KEY_VARIABLE = "HEADWAY_API_KEY"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"
_API_KEY_VARIABLES = f"${API_KEY_VARIABLE} or ${VLLM_API_KEY_VARIABLE}"
LORA_UPDATING_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything `headway serve` needs. served_model_names: the first one is the name in responses."""

    engine: EngineOptions
    http: HttpOptions
    tls: TlsOptions | None
    cors: CorsOptions
    chat: ChatOptions
    model: str
    host: str
    port: int
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...]
    admin_public_key_file: str | None
    admin_audience: str | None
    vocab_size: int
    drain_timeout_seconds: float
    port_file: str | None
    lifeline_fd: int | None
    log_level: str
    tracing: TracingOptions
    allows_runtime_lora_updating: bool = False
    download_dir: str | None = None


def parse_options(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> ServeOptions:
    """Read the arguments after `headway serve`. A HeadwayRuntimeError says which one is wrong."""
    environment = os.environ if environment is None else environment
    return resolve_options(build_parser().parse_args(argv), environment)


def resolve_options(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ServeOptions:
    """The same of arguments that `build_parser` has read; a remote model is fetched, which may take long."""
    model_path = resolve(
        arguments.model,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        lifeline_fd=arguments.lifeline_fd,
    )
    model = read_model_config(model_path)
    engine = engine_options(arguments, model_path, model)
    served_model_names = tuple(arguments.served_model_name or [arguments.model])
    _check_adapter_names(engine.lora, served_model_names)
    if arguments.headless and engine.parallel.node_rank == 0:
        raise ConfigError(
            "--headless is for nodes that compute for node 0; give this one a --node-rank above 0"
        )
    return ServeOptions(
        engine=engine,
        http=http_options(arguments),
        tls=tls_options(arguments),
        cors=cors_options(arguments),
        chat=chat_options(arguments),
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        served_model_names=served_model_names,
        api_keys=_api_keys(arguments, environment),
        admin_public_key_file=arguments.admin_public_key_file,
        admin_audience=_admin_audience(arguments),
        vocab_size=model.vocab_size,
        drain_timeout_seconds=arguments.drain_timeout_seconds,
        port_file=arguments.port_file,
        lifeline_fd=arguments.lifeline_fd,
        log_level=arguments.log_level,
        tracing=tracing_options(arguments, environment),
        download_dir=arguments.download_dir,
        allows_runtime_lora_updating=_allows_lora_updating(arguments, environment),
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser alone, for those who check arguments that they rendered."""
    parser = CommandParser(prog="headway serve", description="Serve one model over HTTP.", raises=ConfigError)
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add_engine_arguments(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=integer(0, 65535), default=8000, help="0 picks a free one (default %(default)s)")
    add(
        "--headless",
        action="store_true",
        help="answer no requests, only compute for node 0: what a --node-rank above 0 means anyway",
    )
    add("--port-file", metavar="PATH", help="write the port number there once it is bound")
    add("--served-model-name", action="extend", nargs="+", metavar="NAME", help="may be repeated")
    add("--api-key", action="extend", nargs="+", metavar="KEY", help=f"likewise; or {_API_KEY_VARIABLES}")
    add("--api-key-file", metavar="PATH", help="one key per line; lines that begin with # are notes")
    add("--admin-public-key-file", metavar="PATH", help="PEM, Ed25519; without it /admin is off")
    add("--admin-audience", metavar="NAMESPACE/NAME", help="the service that admin tokens must be for")
    add("--drain-timeout-seconds", type=positive, default=60.0, help="after SIGTERM (default %(default)s)")
    add(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let whoever has the only API key load and unload adapters, as the operator may anyway; or "
        f"${LORA_UPDATING_VARIABLE}=1, as for vLLM",
    )
    add_http_arguments(parser)
    add_tls_arguments(parser)
    add_cors_arguments(parser)
    add_chat_arguments(parser)
    add_tracing_arguments(parser)
    add_vllm_arguments(parser)
    add("--lifeline-fd", type=integer(0), metavar="FD", help="end at once when this pipe reaches its end")
    add("--log-level", choices=LOG_LEVELS, default="info")
    return parser


def _api_keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    keys = list(arguments.api_key or [])
    variables = (API_KEY_VARIABLE, VLLM_API_KEY_VARIABLE)
    keys += [environment[name] for name in variables if name in environment]
    if arguments.api_key_file is not None:
        try:
            lines = Path(arguments.api_key_file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file={arguments.api_key_file!r}: cannot be read ({error}); give a text file"
            ) from error
        # A note on whose the next key is must not become a key itself.
        found = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not found:
            # Serving without any key is not what somebody who gave a file wants.
            raise ConfigError(f"--api-key-file={arguments.api_key_file!r}: holds no key; write one per line")
        keys += found
    if not all(keys):
        raise ConfigError(
            f"--api-key='' (or {_API_KEY_VARIABLES}): an empty key lets everyone in; set a real one"
        )
    return tuple(dict.fromkeys(keys))


def _allows_lora_updating(arguments: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    told = environment.get(LORA_UPDATING_VARIABLE, "").strip().lower()
    return bool(arguments.allow_runtime_lora_updating) or told in ("1", "true")


def _check_adapter_names(lora: LoraConfig | None, served_model_names: Sequence[str]) -> None:
    for module in () if lora is None else lora.modules:
        if module.name in served_model_names:
            raise ConfigError(
                f"--lora-modules: name={module.name!r} is the model's own (--served-model-name); choose "
                "another"
            )
        if module.parent and module.parent not in served_model_names:
            raise ConfigError(
                f"--lora-modules: base_model_name={module.parent!r} is not served here; want "
                f"{' or '.join(map(repr, served_model_names))}, or leave it out"
            )


def _admin_audience(arguments: argparse.Namespace) -> str | None:
    audience: str | None = arguments.admin_audience
    if (audience is None) != (arguments.admin_public_key_file is None):
        raise ConfigError(
            "--admin-public-key-file and --admin-audience belong together; give both or neither"
        )
    if audience is not None and not re.fullmatch(r"[^/\s]+/[^/\s]+", audience):
        raise ConfigError(f"--admin-audience={audience!r}: want NAMESPACE/NAME of the service")
    return audience
