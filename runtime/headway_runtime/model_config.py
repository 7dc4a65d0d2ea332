"""What a model is, read from its `config.json` (Hugging Face's layout, old and new spellings).

Owns the meaning of that file's fields. Anything in it that would change the model's results and that the
engine does not do is refused here by name, never passed over. Imports neither torch nor transformers.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headway_runtime.model_config_families import FAMILIES, Family
from headway_runtime.model_config_fields import Fields, read_object
from headway_runtime.model_config_layers import ExpertsConfig, LayerConfig, read_experts, read_layers
from headway_runtime.model_config_rope import Rope, read_rope, read_ropes_by_layer_type

StoredDtype = Literal["bfloat16", "float16", "float32"]
STORED_DTYPES: tuple[StoredDtype, ...] = ("bfloat16", "float16", "float32")

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    # The same, written out.
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that decide a model's tensors and arithmetic.

    normalizes_heads: queries and keys, each head by itself, before they are rotated.
    attention_scale: what scores are multiplied by; soft caps: scores or logits become cap * tanh(x / cap).
    tensor_prefixes: of the names of all tensors but the head's; the first that fits counts.
    foreign_prefixes: of names of tensors that a checkpoint may hold and that belong to no text model.
    dtype: what "auto" means for this model.
    eos_token_ids: those of config.json and of generation_config.json together.
    chunked_positions: max_position_embeddings as the file has it, where it counts on dual chunk attention.
        That is not done, so max_position_embeddings is its first chunk here.
    unknown_fields: those of the file that nobody reads and that are not known to have no effect.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    normalizes_heads: bool
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    tensor_prefixes: tuple[str, ...]
    foreign_prefixes: tuple[str, ...]
    dtype: StoredDtype
    eos_token_ids: frozenset[int]
    chunked_positions: int | None = None
    # No part of what the model is.
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """The most tokens that a sequence may have.

        More than `max_position_embeddings` where that is a length which the rotation's scaling stretches.
        """
        return min(rope.longest_context(self.max_position_embeddings) for rope in self.ropes)

    @property
    def told_longest_context(self) -> str:
        """The same for people."""
        own, longest = self.max_position_embeddings, self.longest_context
        if self.chunked_positions is not None:
            return (
                f"dual_chunk_attention_config.chunk_size, {own}: of its max_position_embeddings, "
                f"{self.chunked_positions}, more need dual chunk attention, which is not done"
            )
        stretched = f", stretched by its rotary scaling to {longest}" if longest > own else ""
        return f"max_position_embeddings, {own}{stretched}"


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`'s config.json. ModelLoadError names the field that is missing, wrong or unsupported."""
    whole = Fields(read_object(folder / "config.json"), "config.json")
    architecture = _architecture(whole)
    family = FAMILIES[architecture]
    fields = _text_fields(whole, family)
    _refuse_unsupported(fields, whole, family)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"num_attention_heads ({num_heads}) must be a multiple of it; correct the model's file",
        )
    if head_dim % 2 or not head_dim:
        raise fields.error("head_dim", "rotary embeddings need an even number; correct the model's file")
    num_positions = fields.integer("max_position_embeddings")
    first_chunk = _first_chunk(fields) or num_positions
    has_attention_bias = "attention_bias" in family.defaults and fields.boolean("attention_bias")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        activation=_activation(fields, family),
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=min(num_positions, first_chunk),
        rms_norm_eps=fields.number("rms_norm_eps"),
        ropes=_ropes(fields, family, head_dim),
        layers=read_layers(fields, family),
        experts=read_experts(fields, family),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias or has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias="mlp_bias" in family.defaults and fields.boolean("mlp_bias"),
        normalizes_heads=family.normalizes_heads,
        attention_scale=_attention_scale(fields, family, head_dim),
        attention_soft_cap=_soft_cap(fields, family, "attn_logit_softcapping"),
        logit_soft_cap=_soft_cap(fields, family, "final_logit_softcapping"),
        tensor_prefixes=family.tensor_prefixes,
        foreign_prefixes=family.foreign,
        dtype=_dtype(fields),
        eos_token_ids=_token_ids(whole) | _token_ids(fields) | _generation_eos_token_ids(folder),
        chunked_positions=num_positions if first_chunk < num_positions else None,
    )
    return replace(config, unknown_fields=_unknown_fields(fields, whole, family))


def _first_chunk(fields: Fields) -> int | None:
    """Up to where dual chunk attention (arXiv 2402.17463) is attention as usual."""
    chunks = fields.object("dual_chunk_attention_config")
    if not chunks:
        return None
    return Fields(chunks, f"{fields.where}: dual_chunk_attention_config").integer("chunk_size")


def _unknown_fields(fields: Fields, whole: Fields, family: Family) -> tuple[str, ...]:
    if family.text_field is None:
        return tuple(family.unknown(fields.unread & whole.unread))
    own = (f"{family.text_field}.{name}" for name in family.unknown(fields.unread))
    return (*family.unknown(whole.unread), *own)


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.error("architectures", f"supported are {', '.join(FAMILIES)}; serve such a model")
    want = FAMILIES[name].model_type
    if fields.values.get("model_type", want) != want:
        raise fields.error(
            "model_type", f"{name} is of type {want!r}, and both say what the model is; correct the file"
        )
    return name


def _text_fields(whole: Fields, family: Family) -> Fields:
    """The text model's own fields; where they lie in an object, some of those beside it count for them."""
    if family.text_field is None:
        return Fields(whole.raw, whole.where, family.defaults)
    text = whole.object(family.text_field)
    if text.get("model_type", f"{family.model_type}_text") != f"{family.model_type}_text":
        raise Fields(text, f"{whole.where}: {family.text_field}").error(
            "model_type", f"want '{family.model_type}_text'; serve another model"
        )
    beside = {
        name: whole.values[name]
        for name in ("dtype", "torch_dtype", "tie_word_embeddings")
        if name in whole.values
    }
    return Fields(text | beside, f"{whole.where}: {family.text_field}", family.defaults)


def _refuse_unsupported(fields: Fields, whole: Fields, family: Family) -> None:
    for some in (fields, whole):
        name = family.unmet(some.values)
        if name is not None:
            raise some.error(
                name, "would change this architecture's results and is not done; serve another model"
            )


def _activation(fields: Fields, family: Family) -> Activation:
    """Gemma has a field of its own for it, and then does not look at the usual one."""
    name = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    value = fields.get(name)
    activation = ACTIVATIONS.get(value) if isinstance(value, str) else None
    if activation is None:
        raise fields.error(name, f"supported are {', '.join(map(repr, ACTIVATIONS))}; serve another model")
    return activation


def _ropes(fields: Fields, family: Family, head_dim: int) -> tuple[Rope, ...]:
    """Of all layers; or, where they differ, of those that attend to everything and of those with a window."""
    if not family.differs_by_window:
        return (read_rope(fields, head_dim, family.rope_theta),)
    return read_ropes_by_layer_type(fields, head_dim, family.rope_theta)


def _attention_scale(fields: Fields, family: Family, head_dim: int) -> float:
    is_told = "query_pre_attn_scalar" in family.defaults
    size = fields.number("query_pre_attn_scalar") if is_told else float(head_dim)
    return float(size**-0.5)


def _soft_cap(fields: Fields, family: Family, name: str) -> float | None:
    is_honoured = name in family.defaults and name not in family.neutral
    return fields.optional_number(name) if is_honoured else None


def _dtype(fields: Fields) -> StoredDtype:
    """transformers 5 writes `dtype`, before it was `torch_dtype`; float32 where neither is given."""
    name = "dtype" if "dtype" in fields.values else "torch_dtype"
    value = fields.values.get(name, "float32")
    for dtype in STORED_DTYPES:
        if value == dtype:
            return dtype
    raise fields.error(name, f"supported are {', '.join(STORED_DTYPES)}; convert the checkpoint")


def _generation_eos_token_ids(folder: Path) -> frozenset[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return frozenset()
    return _token_ids(Fields(read_object(path), "generation_config.json"))


def _token_ids(fields: Fields) -> frozenset[int]:
    value = fields.values.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise fields.error("eos_token_id", "want a token id or a list of them; correct the model's file")
    return frozenset(ids)
