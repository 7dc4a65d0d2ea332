"""The command line of `headway serve`: parsed, checked and resolved once into `ServeOptions`.

Runs before anything heavy is imported: reads flags, two environment variables and the model's config.json,
and nothing else. What only the engine process can know (which device there is) stays "auto".
"""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from headway_runtime.config import Envelope, Limits, Targets
from headway_runtime.errors import ConfigError, LimitRangeError
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.server.cpus import usable_cpus
from headway_runtime.sources import resolve

API_KEY_VARIABLE = "HEADWAY_API_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")
SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine process is told. None: it chooses by the device that it finds."""

    model_path: str
    device: str
    dtype: str
    load_format: str
    max_model_len: int
    block_size: int
    kv_cache_memory_bytes: int | None
    envelope: Envelope
    limits: Limits
    targets: Targets
    max_waiting: int
    num_threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything `headway serve` needs. served_model_names: the first one is the name in responses."""

    engine: EngineOptions
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `headway serve --help`")


def parse_options(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> ServeOptions:
    """Read the arguments after `headway serve`. ConfigError or ModelLoadError says which one is wrong."""
    environment = os.environ if environment is None else environment
    arguments = build_parser().parse_args(argv)
    model_path = resolve(arguments.model)
    model = read_model_config(model_path)
    return ServeOptions(
        engine=_engine_options(arguments, model_path, model),
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        served_model_names=tuple(arguments.served_model_name or [arguments.model]),
        api_keys=_api_keys(arguments, environment),
        admin_public_key_file=arguments.admin_public_key_file,
        admin_audience=_admin_audience(arguments),
        vocab_size=model.vocab_size,
        drain_timeout_seconds=arguments.drain_timeout_seconds,
        port_file=arguments.port_file,
        lifeline_fd=arguments.lifeline_fd,
        log_level=arguments.log_level,
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser alone, for those who check arguments that they rendered."""
    parser = _Parser(prog="headway serve", description="Serve one model over HTTP.", allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="bundled://NAME, a folder or file:///FOLDER")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=_integer(0, 65535), default=8000, help="0 picks a free one (default %(default)s)")
    add("--port-file", metavar="PATH", help="write the port number there once it is bound")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add("--max-model-len", type=_integer(2), help="tokens of prompt plus answer (default: the model's own)")
    add("--max-num-seqs", type=_integer(1), default=64, help="upper end of the live limit")
    add("--max-num-batched-tokens", type=_integer(1), default=2048, help="upper end of the live limit")
    add("--initial-max-num-seqs", type=_integer(1), help="live limit at start (default: the upper end)")
    add("--initial-max-num-batched-tokens", type=_integer(1), help="likewise")
    add("--block-size", type=_integer(1, 256), default=16, help="tokens per KV block")
    add("--kv-cache-memory-bytes", type=_size, metavar="SIZE", help="e.g. 512Mi, 4G (default: by device)")
    add("--max-waiting", type=_integer(1), default=1024, help="requests that may wait; more get 503")
    add("--served-model-name", action="extend", nargs="+", metavar="NAME", help="may be repeated")
    add("--api-key", action="extend", nargs="+", metavar="KEY", help=f"likewise; or ${API_KEY_VARIABLE}")
    add("--api-key-file", metavar="PATH", help="one key per line")
    add("--admin-public-key-file", metavar="PATH", help="PEM, Ed25519; without it /admin is off")
    add("--admin-audience", metavar="NAMESPACE/NAME", help="the service that admin tokens must be for")
    add("--ttft-target-milliseconds", type=_positive, metavar="MS", help="count requests within it")
    add("--tpot-target-milliseconds", type=_positive, metavar="MS", help="likewise")
    add("--drain-timeout-seconds", type=_positive, default=60.0, help="after SIGTERM (default %(default)s)")
    add("--seed", type=_integer(0), default=0, help="of dummy weights")
    add("--num-threads", type=_integer(1), help="compute threads (default: the CPUs this process may use)")
    add("--lifeline-fd", type=_integer(0), metavar="FD", help="end at once when this pipe reaches its end")
    add("--log-level", choices=LOG_LEVELS, default="info")
    return parser


def _engine_options(arguments: argparse.Namespace, model_path: Path, model: ModelConfig) -> EngineOptions:
    envelope = Envelope(arguments.max_num_seqs, arguments.max_num_batched_tokens)
    limits = Limits(
        arguments.initial_max_num_seqs or envelope.max_num_seqs,
        arguments.initial_max_num_batched_tokens or envelope.max_num_batched_tokens,
    )
    try:
        envelope.check(limits)
    except LimitRangeError as error:
        prefix = "--initial-" if getattr(arguments, f"initial_{error.field}") is not None else "--"
        raise ConfigError(f"{prefix}{error.field.replace('_', '-')}: {error}") from error
    model_len = model.max_position_embeddings
    if arguments.max_model_len is not None and arguments.max_model_len > model_len:
        raise ConfigError(
            f"--max-model-len={arguments.max_model_len} is more than the model's max_position_embeddings, "
            f"{model_len}; ask for at most that"
        )
    return EngineOptions(
        model_path=str(model_path),
        device=arguments.device,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        max_model_len=arguments.max_model_len or model_len,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        envelope=envelope,
        limits=limits,
        targets=Targets(arguments.ttft_target_milliseconds, arguments.tpot_target_milliseconds),
        max_waiting=arguments.max_waiting,
        num_threads=arguments.num_threads or usable_cpus(),
        seed=arguments.seed,
    )


def _api_keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    keys = list(arguments.api_key or [])
    if API_KEY_VARIABLE in environment:
        keys.append(environment[API_KEY_VARIABLE])
    if arguments.api_key_file is not None:
        try:
            lines = Path(arguments.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file={arguments.api_key_file!r}: cannot be read ({error}); give a text file"
            ) from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            # Serving without any key is not what somebody who gave a file wants.
            raise ConfigError(f"--api-key-file={arguments.api_key_file!r}: holds no key; write one per line")
        keys += found
    if not all(keys):
        raise ConfigError(
            f"--api-key=''/${API_KEY_VARIABLE}='': an empty key lets everyone in; set a real one"
        )
    return tuple(dict.fromkeys(keys))


def _admin_audience(arguments: argparse.Namespace) -> str | None:
    audience: str | None = arguments.admin_audience
    if (audience is None) != (arguments.admin_public_key_file is None):
        raise ConfigError(
            "--admin-public-key-file and --admin-audience belong together; give both or neither"
        )
    if audience is not None and not re.fullmatch(r"[^/\s]+/[^/\s]+", audience):
        raise ConfigError(f"--admin-audience={audience!r}: want NAMESPACE/NAME of the service")
    return audience


class _integer:  # noqa: N801 - reads as the type of an argument
    """An integer within a range, for argparse."""

    def __init__(self, low: int, high: int | None = None) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < self._low or (self._high is not None and value > self._high):
            bounds = f"at least {self._low}" if self._high is None else f"from {self._low} to {self._high}"
            raise argparse.ArgumentTypeError(f"{text!r} is out of range; give {bounds}")
        return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; give a number above 0")
    return value


def _size(text: str) -> int:
    """Bytes as Kubernetes quantities write them: 512Mi, 4G, 1073741824; a final B is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*?)B?", text)
    if match is None or match[2] not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or e.g. 512Mi or 4G")
    value = int(float(match[1]) * SIZE_UNITS[match[2]])
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range; give at least 1 byte")
    return value
