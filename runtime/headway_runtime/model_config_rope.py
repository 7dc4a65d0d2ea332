"""Rotary position embeddings as a model's `config.json` asks for them: the kinds, and how they are spelled.

transformers 5 writes `rope_parameters`; before it was `rope_scaling`, with rope_theta beside it, and its kind
in `type`. Values mean what they mean there. Knows no tensors: `layers/rotary.py` does the arithmetic.
"""

from dataclasses import dataclass
from typing import TypeAlias

from headway_runtime.model_config_fields import Fields

# Keys that some kind of scaling reads; a kind passes over those of others, as transformers does.
KNOWN_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
    }
)
# Notes to people.
HARMLESS_KEYS = frozenset({"finetuned"})
WHOLE_HEADS = (
    "these architectures rotate whole heads, but with rope_type 'proportional'; serve a model of an "
    "architecture that rotates a part, or remove the field"
)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All rotary frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Neural-tangent-kernel scaling: the base grows with the length, from `original` tokens on."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): dimensions of few turns are divided by `factor`, those of many kept.

    attention_factor: what cosines and sines are multiplied by; None is YaRN's own choice, by `mscale` and
    `mscale_all_dim` where both are given. truncate: whether the ramp between begins and ends at dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, others where sequences may be long.

    attention_factor: as YaRN's; None is LongRoPE's own choice, by `factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """Only the first of a head's pairs turn, so many of them; all frequencies divided by `factor`."""

    factor: float
    num_turning: int


RopeScaling: TypeAlias = LinearRope | DynamicRope | YarnRope | LongRope | Llama3Rope | ProportionalRope


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: the base of the wavelengths."""

    theta: float
    scaling: RopeScaling | None

    @property
    def goes_by_length(self) -> bool:
        """Whether a token's keys depend on how long a sequence may become."""
        return isinstance(self.scaling, DynamicRope | LongRope)

    def longest_context(self, max_position_embeddings: int) -> int:
        """How many positions it reaches, where the field may be the length before scaling."""
        match self.scaling:
            case LinearRope(factor) | DynamicRope(factor):
                return int(max_position_embeddings * max(factor, 1.0))
            case YarnRope(factor, original):
                return max(max_position_embeddings, int(original * factor))
            case _:
                return max_position_embeddings


def read_rope(fields: Fields, head_dim: int, theta: float) -> Rope:
    """The rotation of all layers alike. theta: where the file says none."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.object(name)
    return _rope(fields, f"{fields.where}: {name}", values, head_dim, fields.number("rope_theta", theta))


def read_ropes_by_layer_type(fields: Fields, head_dim: int, theta: float) -> tuple[Rope, Rope]:
    """Of layers that attend to everything, and of those with a window. theta: of the former, if none is said.

    Old: `rope_scaling` and `rope_theta` are of the former, `rope_local_base_freq` of the latter.
    """
    by_type = Fields(fields.object("rope_parameters"), f"{fields.where}: rope_parameters")
    for name in sorted(by_type.values.keys() - {"full_attention", "sliding_attention"}):
        raise by_type.error(
            name, "want one object each for full_attention and sliding_attention; correct the model's file"
        )
    full = by_type.object("full_attention") | fields.object("rope_scaling")
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters: full_attention"
    sliding = by_type.object("sliding_attention")
    return (
        _rope(fields, f"{fields.where}: {where}", full, head_dim, fields.number("rope_theta", theta)),
        _rope(
            fields,
            f"{fields.where}: rope_parameters: sliding_attention",
            sliding,
            head_dim,
            fields.number("rope_local_base_freq"),
        ),
    )


def _rope(fields: Fields, where: str, values: dict[str, object], head_dim: int, theta: float) -> Rope:
    rope = Fields(values, where, {"partial_rotary_factor": fields.get("partial_rotary_factor")})
    for name in sorted(rope.values.keys() - KNOWN_KEYS - HARMLESS_KEYS):
        raise rope.error(name, "not a field of any supported rotary embedding; serve another model")
    return Rope(rope.number("rope_theta", theta), _scaling(fields, rope, head_dim))


def _scaling(fields: Fields, rope: Fields, head_dim: int) -> RopeScaling | None:
    kind_field = "rope_type" if "rope_type" in rope.values else "type"
    kind = rope.values.get(kind_field, "default")
    if kind == "proportional":
        part = rope.number("partial_rotary_factor", 1.0)
        if part > 1:
            raise rope.error("partial_rotary_factor", "want at most 1; correct the model's file")
        return ProportionalRope(rope.number("factor", 1.0), int(part * head_dim // 2))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", WHOLE_HEADS)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(rope.number("factor"))
        case "dynamic":
            return _dynamic(fields, rope, head_dim)
        case "yarn":
            return _yarn(fields, rope)
        case "longrope":
            return _longrope(fields, rope, head_dim)
        case "llama3":
            return _llama3(fields, rope)
    supported = "'default', 'linear', 'dynamic', 'yarn', 'longrope', 'llama3' and 'proportional'"
    raise rope.error(kind_field, f"supported are {supported}; serve another model")


def _original_length(fields: Fields, rope: Fields) -> int:
    """The length before scaling; first what stands beside the rotary fields, last the model's own."""
    if fields.get("original_max_position_embeddings") is not None:
        return fields.integer("original_max_position_embeddings")
    return rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))


def _factor_by_lengths(fields: Fields, rope: Fields, original: int) -> float:
    return rope.number("factor", fields.integer("max_position_embeddings") / original)


def _dynamic(fields: Fields, rope: Fields, head_dim: int) -> DynamicRope:
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", "want at least 1; correct the model's file")
    if head_dim < 4:
        raise rope.error(
            "rope_type", f"wants a head_dim of at least 4, not {head_dim}; correct the model's file"
        )
    return DynamicRope(factor, fields.integer("max_position_embeddings"))


def _yarn(fields: Fields, rope: Fields) -> YarnRope:
    original = _original_length(fields, rope)
    return YarnRope(
        factor=_factor_by_lengths(fields, rope, original),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        # A zero counts as left out, as it does for transformers.
        beta_fast=rope.number("beta_fast", 32.0) if rope.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow", 1.0) if rope.get("beta_slow") else 1.0,
        mscale=rope.number("mscale") if rope.get("mscale") else None,
        mscale_all_dim=rope.number("mscale_all_dim") if rope.get("mscale_all_dim") else None,
        truncate=rope.boolean("truncate", default=True),
    )


def _longrope(fields: Fields, rope: Fields, head_dim: int) -> LongRope:
    original = _original_length(fields, rope)
    return LongRope(
        _divisors(rope, "short_factor", head_dim),
        _divisors(rope, "long_factor", head_dim),
        _factor_by_lengths(fields, rope, original),
        original,
        rope.optional_number("attention_factor"),
    )


def _divisors(rope: Fields, name: str, head_dim: int) -> tuple[float, ...]:
    values = rope.entries(name)
    numbers = [one for one in values or [] if isinstance(one, (int, float)) and one > 0]
    if values is None or len(numbers) != len(values) or len(numbers) != head_dim // 2:
        raise rope.error(
            name, f"want {head_dim // 2} positive numbers, half of head_dim; correct the model's file"
        )
    return tuple(map(float, numbers))


def _llama3(fields: Fields, rope: Fields) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(
            "high_freq_factor", f"must be more than low_freq_factor ({low}); correct the model's file"
        )
    return Llama3Rope(rope.number("factor"), low, high, _original_length(fields, rope))
