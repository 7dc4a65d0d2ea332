"""One of the two models: where it lies and what its engine is told. Loads nothing."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_eval.flags import BASELINE_PREFIX
from headway_runtime.config import KVCacheDtype
from headway_runtime.engine_options import EngineOptions, engine_options
from headway_runtime.head_start import is_for_cpu
from headway_runtime.memory import kept_as
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.quantization.kv_scheme import chosen_kv_cache_dtype
from headway_runtime.served_dtype import served_dtype
from headway_runtime.sources import resolve

# What may make a model's answers other ones; a baseline is without, unless it is told.
LEVERS = ("quantization", "kv_cache_dtype", "dtype", "speculative_config", "initial_num_speculative_tokens")
# What a resolved folder no longer needs.
OF_THE_SOURCE = ("revision",)


@dataclass(frozen=True, slots=True)
class Side:
    """source: as the user named it. keywords: of the in-process engine, the same that made `options`."""

    source: str
    folder: Path
    model: ModelConfig
    options: EngineOptions
    keywords: Mapping[str, Any]

    def has_four_bits(self) -> bool:
        """Whether some of its weights have no more."""
        quantization = choose_quantization(self.options.quantization, self.folder)
        if quantization.stored is None:
            return quantization.online == "int4"
        return any(rule.scheme is not None and rule.scheme.bits == 4 for rule in quantization.stored.rules)

    def levers(self) -> dict[str, str]:
        """What makes this side what it is, for the reader of a report."""
        speculative = self.keywords.get("speculative_config")
        quantization = choose_quantization(self.options.quantization, self.folder)
        is_cpu = is_for_cpu(self.options.device)
        dtype = served_dtype(self.options.dtype, self.model.dtype, quantization, is_cpu=is_cpu)
        wanted: KVCacheDtype = self.options.kv_cache_dtype  # type: ignore[assignment]
        kv_cache_dtype = chosen_kv_cache_dtype(wanted, self.folder)
        return {
            "dtype": dtype,
            "quantization": self.options.quantization,
            "kv_cache_dtype": kept_as(kv_cache_dtype, dtype),
            "speculation": "off" if speculative is None else str(speculative),
        }


def make_side(source: str, arguments: Mapping[str, Any]) -> Side:
    """arguments: of all the engine's flags. ConfigError, ModelFetchError, ModelLoadError."""
    folder = resolve(source, revision=arguments["revision"], download_dir=arguments["download_dir"])
    model = read_model_config(folder)
    keywords = {name: value for name, value in arguments.items() if name not in OF_THE_SOURCE}
    options = engine_options(argparse.Namespace(**arguments), folder, model)
    return Side(source, folder, model, options, keywords)


def split_arguments(arguments: argparse.Namespace, *, is_same: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """MODEL's and BASELINE's arguments by the names of an engine's flags.

    is_same: whether BASELINE is MODEL itself without its levers.
    """
    values = vars(arguments)
    given = {
        name.removeprefix(BASELINE_PREFIX): value
        for name, value in values.items()
        if name.startswith(BASELINE_PREFIX)
    }
    model = {name: values[name] for name in given}
    baseline = {}
    for name, value in given.items():
        if value is not None:
            baseline[name] = value
        elif name in LEVERS:
            baseline[name] = _without(name, is_same=is_same)
        elif name in OF_THE_SOURCE and not is_same:
            baseline[name] = None
        else:
            baseline[name] = model[name]
    return model, baseline


def _without(lever: str, *, is_same: bool) -> str | None:
    match lever:
        case "quantization":
            return "none" if is_same else "auto"
        case "kv_cache_dtype":
            # A checkpoint may ask for 8 bits, which "auto" would follow on both sides.
            return "plain" if is_same else "auto"
        case "dtype":
            return "auto"
    return None
