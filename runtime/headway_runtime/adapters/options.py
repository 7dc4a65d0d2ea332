"""The flags of LoRA adapters, by vLLM's names, and what they come to. Imports no torch."""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from headway.argument_types import integer
from headway_runtime.adapters.peft_config import MAX_RANK, read_peft_config
from headway_runtime.config import LoraConfig, LoraModule
from headway_runtime.errors import ConfigError, ModelLoadError
from headway_runtime.sources import resolve_adapter

DEFAULT_MAX_LORAS = 8
DEFAULT_MAX_LORA_RANK = 16
MOST_LORAS = 1024
LONGEST_NAME = 256
# Names are parts of URLs, labels and headers.
_NAME = re.compile(r"[^\x00-\x20\x7f]+")
_JSON_FIELDS = ("name", "path", "base_model_name")


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--enable-lora",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve LoRA adapters beside the model (default: off)",
    )
    add(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help="adapters to load at the start: a name for requests' `model`, and a folder, file://, hf://, "
        's3:// or oci:// source; or {"name": NAME, "path": PATH, "base_model_name": MODEL}; may be repeated',
    )
    add(
        "--max-loras",
        type=integer(1, MOST_LORAS),
        help=f"different adapters in one step (default {DEFAULT_MAX_LORAS})",
    )
    add(
        "--max-cpu-loras",
        type=integer(1, MOST_LORAS),
        help="adapters that are loaded at once (default: as many as --max-loras or --lora-modules says)",
    )
    add(
        "--max-lora-rank",
        type=integer(1, MAX_RANK),
        help=f"largest rank of an adapter (default {DEFAULT_MAX_LORA_RANK})",
    )


@dataclass(frozen=True, slots=True)
class LoraBounds:
    """What the flags of numbers come to."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int


def lora_bounds(arguments: argparse.Namespace, num_modules: int = 0) -> LoraBounds | None:
    """None without --enable-lora, with which alone the others mean anything. ConfigError."""
    if not arguments.enable_lora:
        for flag in ("max_loras", "max_cpu_loras", "max_lora_rank"):
            if (value := getattr(arguments, flag)) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')}={value} needs --enable-lora; give both")
        return None
    most = arguments.max_cpu_loras
    max_loras = arguments.max_loras or min(DEFAULT_MAX_LORAS, most or DEFAULT_MAX_LORAS)
    if most is not None and most < max_loras:
        raise ConfigError(
            f"--max-cpu-loras={most} is less than --max-loras={max_loras}, which cannot be in one step then; "
            "raise it, or lower --max-loras"
        )
    if most is not None and num_modules > most:
        raise ConfigError(
            f"--lora-modules names {num_modules} adapters, more than --max-cpu-loras={most}; raise that"
        )
    rank = arguments.max_lora_rank or DEFAULT_MAX_LORA_RANK
    return LoraBounds(max_loras, most or max(max_loras, num_modules), rank)


def lora_config(arguments: argparse.Namespace, lifeline_fd: int | None = None) -> LoraConfig | None:
    """None without --enable-lora. ConfigError, ModelFetchError or ModelLoadError names the flag at fault.

    Adapters are fetched where they have to be, and their configurations read: what they ask for that there is
    not is told before the model is loaded.
    """
    given = arguments.lora_modules or ()
    given = [given] if isinstance(given, str | dict) else given
    bounds = lora_bounds(arguments, len(given))
    if bounds is None:
        if given:
            raise ConfigError(f"--lora-modules={given[0]!r} needs --enable-lora; give both")
        return None
    named = [_parsed(one) for one in given]
    names = [name for name, _, _ in named]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"--lora-modules names {name!r} twice; give each adapter a name of its own")
    modules = tuple(
        lora_module(name, path, parent, arguments.download_dir, lifeline_fd) for name, path, parent in named
    )
    for module in modules:
        _check_config(module, bounds.max_lora_rank)
    # A server's arguments name the model, an engine's own do not.
    base = str(getattr(arguments, "model", ""))
    return LoraConfig(bounds.max_loras, bounds.max_cpu_loras, bounds.max_lora_rank, modules, base)


def lora_module(
    name: str, source: str, parent: str = "", download_dir: str | None = None, lifeline_fd: int | None = None
) -> LoraModule:
    """The adapter at `source`, fetched where it has to be. ConfigError, ModelFetchError."""
    check_name(name)
    folder = resolve_adapter(source, download_dir=download_dir, lifeline_fd=lifeline_fd)
    return LoraModule(name, source, str(folder), parent)


def check_name(name: str) -> None:
    """ConfigError for what no adapter may be called."""
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"lora_name={name!r}: want 1 to {LONGEST_NAME} characters without spaces; choose another name"
        )


def _check_config(module: LoraModule, max_rank: int) -> None:
    """The weights are checked by the engine, which alone knows the model's layers."""
    try:
        config = read_peft_config(Path(module.folder))
    except ModelLoadError as error:
        raise ConfigError(f"--lora-modules: {module.name!r}: {error}") from error
    if config.rank > max_rank:
        raise ConfigError(
            f"--lora-modules: {module.name!r}: {config.path}: r={config.rank} is more than "
            f"--max-lora-rank={max_rank}; raise that"
        )


def _parsed(text: object) -> tuple[str, str, str]:
    """Name, source and parent of one of --lora-modules' values."""
    if isinstance(text, str) and not text.lstrip().startswith("{"):
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f'--lora-modules={text!r}: want NAME=PATH, or {{"name": NAME, "path": PATH}}')
        return name, path, ""
    try:
        fields = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ConfigError(f"--lora-modules={text!r} is not JSON ({error}); write an object") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--lora-modules={text!r}: want NAME=PATH or an object with name and path")
    for field in fields:
        if field not in _JSON_FIELDS:
            raise ConfigError(
                f"--lora-modules: {field}={fields[field]!r} is not known; there are {', '.join(_JSON_FIELDS)}"
            )
    found = []
    for field in _JSON_FIELDS:
        value = fields.get(field)
        if value is None and field == "base_model_name":
            value = ""
        elif not isinstance(value, str) or not value:
            raise ConfigError(f"--lora-modules: {field}={value!r}: want a text")
        found.append(value)
    return found[0], found[1], found[2]
