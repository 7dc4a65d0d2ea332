"""What a model's weights are and become: the checkpoint's word, and the user's (`--quantization`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from headway_runtime.errors import ConfigError, ModelLoadError
from headway_runtime.model_config_fields import read_object
from headway_runtime.quantization.compressed_tensors import read_compressed_tensors
from headway_runtime.quantization.fields import Fields
from headway_runtime.quantization.fp8 import read_fp8
from headway_runtime.quantization.gptq_awq import read_awq, read_gptq
from headway_runtime.quantization.scheme import CheckpointQuantization, Scheme, part_of_name

# What weights of an unquantized checkpoint may become.
Online = Literal["fp8", "int8", "int4"]
ONLINE: tuple[Online, ...] = get_args(Online)
READERS = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
}
QUANTIZATIONS = ("auto", "none", *ONLINE, "awq", "gptq", "compressed-tensors")
# Where configurations stand in config.json, and the files in which older tools leave them beside it, with
# what they do not say themselves.
CONFIG_FIELDS = ("quantization_config", "compression_config")
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
OTHER_FILES = ("hf_quant_config.json",)
# The head is a small part of a model and says which token it is to be: it loses no more than to 8 bits.
HEAD = part_of_name("lm_head")


@dataclass(frozen=True, slots=True)
class Quantization:
    """name: what is in force, as `--quantization` has it, never "auto". One of the others is set, or none."""

    name: str
    stored: CheckpointQuantization | None = None
    online: Online | None = None

    @property
    def has_integer_inputs(self) -> bool:
        """Whether products of some module turn their input into integers."""
        return self.stored is not None and any(one.input is not None for one in self.stored.schemes)

    @property
    def is_int4(self) -> bool:
        """Whether every module that is quantized is in 4 bits, but perhaps the head."""
        if self.stored is None:
            return self.online == "int4"
        schemes = self.stored.schemes
        return bool(schemes) and all(scheme.form == "int4" for scheme in schemes)

    def of_module(self, module: str) -> Scheme | Online | None:
        """How a module's weights lie in the checkpoint, or what plain ones become."""
        if self.stored is not None:
            return self.stored.scheme_of(module)
        if self.online is None:
            return None
        return "int8" if self.online == "int4" and HEAD.fullmatch(module) else self.online


def choose_quantization(wanted: str, folder: Path) -> Quantization:
    """wanted: one of QUANTIZATIONS. ConfigError if the checkpoint contradicts it."""
    stored = read_quantization(folder)
    if stored is None:
        if wanted in ("auto", "none"):
            return Quantization("none")
        for online in ONLINE:
            if wanted == online:
                return Quantization(online, online=online)
        raise ConfigError(
            f"--quantization={wanted!r}: the model in {str(folder)!r} is not quantized; leave the flag out, "
            f"serve a model quantized so, or have it quantized at load by one of {', '.join(ONLINE)}"
        )
    if wanted not in ("auto", stored.method):
        raise ConfigError(
            f"--quantization={wanted!r}: the model in {str(folder)!r} is quantized as {stored.method!r}; "
            "leave the flag out, or serve an unquantized model"
        )
    return Quantization(stored.method, stored)


def read_quantization(folder: Path) -> CheckpointQuantization | None:
    """What the checkpoint says; None if it is not quantized. ModelLoadError for what is not known."""
    config = read_object(folder / "config.json")
    for name in CONFIG_FIELDS:
        values = config.get(name)
        if values is None:
            continue
        if not isinstance(values, dict):
            raise ModelLoadError(f"config.json: {name}={values!r}: want an object; correct the model's file")
        return _read(Fields(values, f"config.json: {name}"), None)
    for file_name, method in OLD_FILES.items():
        if (folder / file_name).is_file():
            return _read(Fields(read_object(folder / file_name), file_name), method)
    for file_name in OTHER_FILES:
        if (folder / file_name).is_file():
            raise ModelLoadError(
                f"{file_name}: quantization of that tool is not supported; quantize the model anew with "
                "llm-compressor, GPTQModel or AutoAWQ, or serve it without"
            )
    return None


def _read(fields: Fields, default_method: str | None) -> CheckpointQuantization | None:
    method = fields.choice("quant_method", tuple(READERS), default_method)
    return READERS[method](fields)
