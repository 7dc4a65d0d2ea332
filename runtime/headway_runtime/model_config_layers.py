"""What differs from layer to layer of a model: windows of attention, and mixtures of experts."""

from dataclasses import dataclass

from headway_runtime.model_config_families import Family, Windows
from headway_runtime.model_config_fields import Fields

# Each has a row here before any weight is looked for.
MOST_LAYERS = 10_000
KINDS = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer.

    window: a token attends to itself and the `window - 1` before it; None for all of them.
    rope: which of the model's rotations. has_experts: a mixture in place of one MLP.
    """

    window: int | None
    rope: int
    has_experts: bool


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A layer's mixture of experts. size: of each one's middle.

    num_used: how many a token goes through, those of the highest probability; normalizes: whether these
    probabilities are divided by their sum.
    """

    num_experts: int
    num_used: int
    size: int
    normalizes: bool


def read_layers(fields: Fields, family: Family) -> tuple[LayerConfig, ...]:
    windows = _windows(fields, family)
    have_experts = _have_experts(fields, family)
    return tuple(
        LayerConfig(window, int(family.differs_by_window and window is not None), has_experts)
        for window, has_experts in zip(windows, have_experts, strict=True)
    )


def _windows(fields: Fields, family: Family) -> list[int | None]:
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if family.windows is Windows.NONE:
        return [None] * num_layers
    window = fields.optional_integer("sliding_window")
    if family.windows in (Windows.UPPER, Windows.ALL_IF_USED) and not fields.boolean("use_sliding_window"):
        window = None
    if family.windows in (Windows.ALL, Windows.ALL_IF_USED):
        return [window] * num_layers
    slides = _sliding_layers(fields, family, num_layers, has_window=window is not None)
    if any(slides) and window is None:
        raise fields.error("sliding_window", "some layers want a window and there is none; correct the file")
    return [window if one else None for one in slides]


def _sliding_layers(fields: Fields, family: Family, num_layers: int, *, has_window: bool) -> list[bool]:
    types = fields.entries("layer_types")
    if types is not None:
        if len(types) != num_layers or not all(one in KINDS for one in types):
            raise fields.error(
                "layer_types",
                f"want {num_layers} of 'full_attention' and 'sliding_attention'; correct the file",
            )
        return [one == "sliding_attention" for one in types]
    if family.windows is Windows.UPPER:
        first = fields.integer("max_window_layers", least=0)
        return [has_window and index >= first for index in range(num_layers)]
    pattern = fields.integer("sliding_window_pattern", 2)
    return [bool((index + 1) % pattern) for index in range(num_layers)]


def read_experts(fields: Fields, family: Family) -> ExpertsConfig | None:
    if not family.has_experts:
        return None
    num_experts = fields.integer(_name_of_number(fields))
    num_used = fields.integer("num_experts_per_tok")
    if num_used > num_experts:
        raise fields.error("num_experts_per_tok", f"there are {num_experts} experts; correct the file")
    has_own_size = "moe_intermediate_size" in family.defaults
    return ExpertsConfig(
        num_experts,
        num_used,
        fields.integer("moe_intermediate_size" if has_own_size else "intermediate_size"),
        fields.boolean("norm_topk_prob") if "norm_topk_prob" in family.defaults else True,
    )


def _name_of_number(fields: Fields) -> str:
    """Versions of transformers write the number of experts under one name or the other."""
    names = ("num_experts", "num_local_experts")
    given = [name for name in names if name in fields.values]
    if len({fields.integer(name) for name in given}) > 1:
        raise fields.error(names[0], f"{names[1]} is {fields.get(names[1])!r}; correct the model's file")
    return given[0] if given else next(name for name in names if fields.get(name) is not None)


def _have_experts(fields: Fields, family: Family) -> list[bool]:
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if "decoder_sparse_step" not in family.defaults:
        return [family.has_experts] * num_layers
    step, without = fields.integer("decoder_sparse_step"), fields.entries("mlp_only_layers") or []
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in without):
        raise fields.error("mlp_only_layers", "want indices of layers; correct the model's file")
    return [index not in without and (index + 1) % step == 0 for index in range(num_layers)]
