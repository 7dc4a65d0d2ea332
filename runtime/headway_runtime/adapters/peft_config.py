"""Reads `adapter_config.json` as PEFT writes it: what of it this engine does, and what it refuses by name.

An adapter is W + scale * B @ A for some of the model's linear layers, and nothing else. All other things that
such a file can ask for change the result, so each is an error that names the field. Imports no torch.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_runtime.errors import ModelLoadError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 512
# What PEFT takes for all linear layers.
ALL_LINEAR = "all-linear"
# What says how the adapter was trained, or where it comes from, and nothing of what it computes.
_HISTORY = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version"),
        *("revision", "task_type", "runtime_config", "megatron_config", "megatron_core", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"),
        *("bias", "modules_to_save", "init_lora_weights"),
        *("layers_to_transform", "layers_pattern", "exclude_modules"),
    }
)
# What is refused unless it is off, and why.
_REFUSED = {
    "use_dora": "weights that are split into magnitude and direction (DoRA) are not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "lora_bias": "biases of B are not supported",
    "layer_replication": "copies of layers are not supported",
    "target_parameters": "only linear layers can have adapters, not bare parameters such as merged experts",
    "trainable_token_indices": "changed embeddings are not supported",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt (aLoRA) are not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "routing among adapters (Arrow) is not supported",
    "velora_config": "VeLoRA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "kasa_config": "KaSA is not supported",
}
# Ways to begin the training that change the base model's weights, too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What an adapter's configuration says of its arithmetic.

    target_modules: names, or ends of names, of layers; or a pattern of whole names; None where it says none.
    excluded: names, ends of names or a pattern, of layers that have none all the same.
    layers: numbers of those that have one; None for all. layers_patterns: of what stands before the number.
    """

    path: Path
    rank: int
    alpha: float
    uses_root: bool
    target_modules: tuple[str, ...] | str | None
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_patterns: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model: str

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_key_of(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied by in the layer of that name."""
        alpha = self.alpha_pattern.get(_key_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.uses_root else rank)

    def is_target(self, module: str) -> bool:
        """Whether the layer of that name, as the file has names, has an adapter: as PEFT decides it.

        Source: `check_target_module_exists` of PEFT.
        """
        targets = self.target_modules
        if targets is None or _is_named(self.excluded, module):
            return False
        if isinstance(targets, str):
            return targets.lower() == ALL_LINEAR or _is_named(targets, module)
        # Numbers are for ends of names alone, not for whole ones.
        return module in targets or (_is_named(targets, module) and self._has_number(module))

    def _has_number(self, module: str) -> bool:
        if self.layers is None:
            return True
        before = [rf"(?:^|.*?\.){one}" for one in self.layers_patterns] or [r".*?\.[^.]*"]
        found = next((match for one in before if (match := re.match(rf"{one}\.(?P<n>\d+)\.", module))), None)
        return found is not None and int(found["n"]) in self.layers


def read_peft_config(folder: Path) -> PeftConfig:
    """ModelLoadError for what cannot be read, and for each field that asks for more than there is here."""
    path = folder / CONFIG_FILE
    fields = _fields(path)
    _refuse_what_is_not_served(path, fields)
    target_modules = _names(path, "target_modules", fields.get("target_modules"))
    base_model = fields.get("base_model_name_or_path")
    return PeftConfig(
        path=path,
        rank=_rank(path, "r", fields.get("r", 8)),
        alpha=_alpha(path, "lora_alpha", fields.get("lora_alpha", 8)),
        uses_root=_flag(path, "use_rslora", fields.get("use_rslora")),
        target_modules=target_modules,
        excluded=_names(path, "exclude_modules", fields.get("exclude_modules")) or (),
        layers=_numbers(path, fields.get("layers_to_transform")),
        layers_patterns=_layers_patterns(path, fields.get("layers_pattern")),
        rank_pattern={
            key: _rank(path, f"rank_pattern.{key}", value)
            for key, value in _pattern(path, "rank_pattern", fields).items()
        },
        alpha_pattern={
            key: _alpha(path, f"alpha_pattern.{key}", value)
            for key, value in _pattern(path, "alpha_pattern", fields).items()
        },
        base_model=base_model if isinstance(base_model, str) else "",
    )


def _names(path: Path, name: str, value: object) -> tuple[str, ...] | str | None:
    """Names of layers, or a pattern; None for none."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if isinstance(value, str):
        return _checked(path, name, value)
    if value is not None:
        raise _wrong(path, name, value, "want names of layers, or a pattern")
    return None


def _numbers(path: Path, value: object) -> tuple[int, ...] | None:
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise _wrong(path, "layers_to_transform", value, "want numbers of layers")
    return tuple(numbers) or None


def _layers_patterns(path: Path, value: object) -> tuple[str, ...]:
    found = _names(path, "layers_pattern", value) or ()
    patterns = (found,) if isinstance(found, str) else found
    return tuple(_checked(path, "layers_pattern", one) for one in patterns)


def _checked(path: Path, name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(path, name, pattern, f"no regular expression ({error}); correct it") from error
    return pattern


def _is_named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in names)


def _fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelLoadError(f"{path}: there is no such file; give the folder of an adapter as PEFT saves it")
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read ({error}); copy the adapter again") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: holds no JSON object; copy the adapter again")
    return fields


def _refuse_what_is_not_served(path: Path, fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise _wrong(path, "peft_type", fields.get("peft_type"), "only 'LORA' adapters are supported")
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        raise _wrong(path, "task_type", task, "only adapters of 'CAUSAL_LM' models are supported")
    if (bias := fields.get("bias", "none")) not in ("none", None):
        raise _wrong(path, "bias", bias, "changed biases are not supported; train it with bias='none'")
    if modules := fields.get("modules_to_save"):
        raise _wrong(
            path,
            "modules_to_save",
            modules,
            "whole layers, such as embeddings or the LM head, are not exchanged; train it without, or merge "
            "it into the model",
        )
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise _wrong(
            path,
            "init_lora_weights",
            begun,
            "such training changes the base model's weights, too; have PEFT convert it to a plain adapter "
            "(path_initial_model_for_weight_conversion)",
        )
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise _wrong(
                path, name, fields[name], f"{reason}; merge the adapter into the model, or train without"
            )
    for name in fields.keys() - _HISTORY - _READ - _REFUSED.keys():
        if fields[name]:
            raise _wrong(path, name, fields[name], "this field is not known here and may change the result")


def _pattern(path: Path, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise _wrong(path, name, found, "want an object of patterns and numbers")
    for key in found:
        try:
            re.compile(key)
            re.compile(_expression(key))
        except (re.error, OverflowError, RecursionError) as error:
            raise _wrong(
                path, name, key, f"no regular expression for the end of a layer's name ({error}); correct it"
            ) from error
    return found


def _key_of(pattern: Mapping[str, object], module: str) -> str:
    """The key that PEFT takes for a layer: the first whose expression its name ends with."""
    return next((key for key in pattern if re.fullmatch(_expression(key), module)), module)


def _expression(key: str) -> str:
    """For whole names. Not all that is an expression by itself is one here: flags may only come first."""
    return rf"(?:.*\.)?(?:{key})"


def _rank(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise _wrong(path, name, value, f"want a rank from 1 to {MAX_RANK}")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(path, name, value, "want a number")
    try:
        alpha = float(value)
    except OverflowError:  # JSON's integers may have any number of digits
        alpha = math.inf
    if not math.isfinite(alpha):
        raise _wrong(path, name, value, "want a number that a float can hold; correct the file")
    return alpha


def _flag(path: Path, name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _wrong(path, name, value, "want true or false")
    return bool(value)


def _wrong(path: Path, name: str, value: object, remedy: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {name}={value!r}: {remedy}")
