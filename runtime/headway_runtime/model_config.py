"""What a model is, read from its `config.json` (Hugging Face's layout, old and new spellings).

Owns the meaning of that file's fields. Anything in it that would change the model's results and that the
engine does not do is refused here by name, never passed over. Imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway_runtime.errors import ModelLoadError

ARCHITECTURES = ("LlamaForCausalLM",)
StoredDtype = Literal["bfloat16", "float16", "float32"]
STORED_DTYPES: tuple[StoredDtype, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All rotary frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that decide a Llama-family model's tensors and arithmetic.

    dtype: what "auto" means for this model.
    eos_token_ids: those of config.json and of generation_config.json together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: LinearRope | Llama3Rope | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: StoredDtype
    eos_token_ids: frozenset[int]


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`'s config.json. ModelLoadError names the field that is missing, wrong or unsupported."""
    fields = _Fields(read_object(folder / "config.json"), "config.json")
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"num_attention_heads ({num_heads}) must be a multiple of it"
        )
    if head_dim % 2:
        raise fields.error("head_dim", "rotary embeddings need an even number")
    rope = _rope_fields(fields)
    return ModelConfig(
        architecture=_architecture(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(folder, fields),
    )


class _Fields:
    """One JSON object, read with checks; a null counts as absent, as it does for transformers."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def error(self, name: str, remedy: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {name}={self.values.get(name)!r}: {remedy}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "want a positive integer; correct the model's file")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "want a positive number; correct the model's file")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "want true or false; correct the model's file")
        return value


def read_object(path: Path) -> dict[str, object]:
    """One of the model's JSON files. ModelLoadError if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read ({error}); give a folder in Hugging Face layout"
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds no JSON object; give a folder in Hugging Face layout")
    return value


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise fields.error("architectures", f"supported are {', '.join(ARCHITECTURES)}; serve such a model")


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "only 'silu' is supported; serve another model")
    if fields.values.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error(
            "partial_rotary_factor", "only whole-head rotation is supported; serve another model"
        )


def _rope_fields(fields: _Fields) -> _Fields:
    """transformers 5 writes `rope_parameters`; before it was `rope_scaling`, with rope_theta beside it."""
    name = "rope_parameters" if "rope_parameters" in fields.values else "rope_scaling"
    values = fields.values.get(name, {})
    if not isinstance(values, dict):
        raise fields.error(name, "want an object; correct the model's file")
    rope = _Fields(values, f"config.json: {name}")
    if rope.values.get("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error(
            "partial_rotary_factor", "only whole-head rotation is supported; serve another model"
        )
    return rope


def _rope_scaling(rope: _Fields) -> LinearRope | Llama3Rope | None:
    kind_field = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(kind_field, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRope(rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("high_freq_factor", f"must be more than low_freq_factor ({low})")
        original = rope.integer("original_max_position_embeddings")
        return Llama3Rope(rope.number("factor"), low, high, original)
    raise rope.error(kind_field, "supported are 'default', 'linear' and 'llama3'; serve another model")


def _dtype(fields: _Fields) -> StoredDtype:
    """transformers 5 writes `dtype`, before it was `torch_dtype`; float32 where neither is given."""
    name = "dtype" if "dtype" in fields.values else "torch_dtype"
    value = fields.values.get(name, "float32")
    for dtype in STORED_DTYPES:
        if value == dtype:
            return dtype
    raise fields.error(name, f"supported are {', '.join(STORED_DTYPES)}; convert the checkpoint")


def _eos_token_ids(folder: Path, fields: _Fields) -> frozenset[int]:
    found = _token_ids(fields)
    path = folder / "generation_config.json"
    if path.is_file():
        found |= _token_ids(_Fields(read_object(path), "generation_config.json"))
    return found


def _token_ids(fields: _Fields) -> frozenset[int]:
    value = fields.values.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise fields.error("eos_token_id", "want a token id or a list of them; correct the model's file")
    return frozenset(ids)
