"""`spec.quality`: by what a model is judged before it takes traffic. Knows nothing of how that is run."""

import re
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from headway_operator.spec.base import QUANTITY_SCHEMA, PositiveTokens, SpecModel, rules
from headway_operator.spec.quantity import parse_quantity
from headway_operator.spec.resources import Resources
from headway_operator.spec.source import Source

BUNDLED, NONE = "bundled", "none"
MAX_TASK_FILES = 8

_NAME = "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_FORMS = (
    BUNDLED,
    NONE,
    "/.+",
    f"configmap://{_NAME}/[A-Za-z0-9_.-]+",
    f"pvc://{_NAME}/.+",
)
MATERIAL_PATTERN = f"^({'|'.join(_FORMS)})$"
EXCEPT_PATTERN = "^pvc://(.*/)?[.][.](/|$)|^configmap://.*/[.]+$"
MATERIAL_MESSAGE = (
    "must be bundled, none, /PATH/OF/A/FILE as the container sees it, configmap://NAME/KEY or "
    "pvc://CLAIM/PATH/OF/A/FILE"
)
MATERIAL_RULE = f"self.matches('{MATERIAL_PATTERN}') && !self.matches('{EXCEPT_PATTERN}')"
ALONE_RULE = "self.all(one, one != 'none') || size(self) == 1"
ALONE_MESSAGE = "none must stand alone: remove it, or the others"
NOTHING_RULE = (
    "!has(self.text) || self.text != 'none' || !has(self.tasks) || self.tasks.all(one, one != 'none')"
)
NOTHING_MESSAGE = "there must be something to judge by: set text or tasks to something else than none"


def _has_a_form(material: str) -> str:
    if not re.search(MATERIAL_PATTERN, material) or re.search(EXCEPT_PATTERN, material) or "\n" in material:
        raise ValueError(f"{MATERIAL_MESSAGE}; got {material!r}")
    return material


def _is_no_float(value: Any) -> Any:
    if isinstance(value, float):
        # As the API server has it, which knows quantities and no fractions.
        raise ValueError(f"{value!r} is a number with a fraction; write it as a text, as in '{value!r}'")
    return value


def _is_a_limit(value: str | int) -> str | int:
    parse_quantity(value)
    return value


Material = Annotated[
    str,
    AfterValidator(_has_a_form),
    Field(min_length=1, max_length=1024, json_schema_extra=rules((MATERIAL_RULE, MATERIAL_MESSAGE))),
]
Limit = Annotated[
    str | int, BeforeValidator(_is_no_float), AfterValidator(_is_a_limit), WithJsonSchema(QUANTITY_SCHEMA)
]


def config_map_key(material: str) -> tuple[str, str] | None:
    """Name and key of a file in a ConfigMap; None for any other."""
    scheme, _, rest = material.partition("://")
    if scheme != "configmap":
        return None
    name, _, key = rest.partition("/")
    return name, key


class Baseline(SpecModel):
    """What the model is held against; each field left out is as the served model has it without levers."""

    source: Source | None = None
    """Where the baseline's weights lie; same forms as model.source, opened by model.credentialsSecretRef,
    too. Default: the served model itself, which then must not be quantized in its checkpoint."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    """Number format of the baseline's weights and activations. Default: auto."""
    quantization: (
        Literal["auto", "none", "fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"] | None
    ) = None
    """How the baseline's weights are packed. Default: none for the served model itself, auto for another
    source."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"] | None = None
    """Number format of the baseline's KV cache. Default: as it computes for the served model itself, whatever
    its checkpoint asks for; auto for another source."""


class Thresholds(SpecModel):
    """Limits of what a lever may cost; quantities such as '0.02' or 20m, fractions as text. A number that is
    not finite passes none of them."""

    max_kl: Limit | None = None
    """Mean KL divergence of the next-token distribution from the baseline's, in nats (0 and more). Default
    0.01; 0.05 for weights of 4 bits."""
    max_perplexity_increase: Limit | None = None
    """Increase of perplexity, relative: '0.02' is two percent (0 and more); one that may be chance passes.
    Default 0.02; 0.05 for weights of 4 bits."""
    max_accuracy_drop: Limit | None = None
    """Drop of each file's share of right answers, in percentage points (0 and more); one that may be chance
    passes. Default 2."""

    def given(self) -> dict[str, Decimal]:
        """The limits that are set, by their names here."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: parse_quantity(value) for name, value in values.items() if value is not None}


class Quality(SpecModel):
    """Judgement before traffic. What already serves goes on, whatever the verdict on its successor."""

    model_config = ConfigDict(json_schema_extra=rules((NOTHING_RULE, NOTHING_MESSAGE)))
    baseline: Baseline = Baseline()
    """What the model is held against. Default: itself, not quantized and without other levers."""
    text: Material | None = None
    """Text that both score: bundled, none, or a file (plain text, or .jsonl with text or messages on each
    line) as /PATH in the container, configmap://NAME/KEY or pvc://CLAIM/PATH. Default: bundled for models
    with the bundled models' tokenizer, else none."""
    tasks: (
        Annotated[
            list[Material],
            Field(
                min_length=1, max_length=MAX_TASK_FILES, json_schema_extra=rules((ALONE_RULE, ALONE_MESSAGE))
            ),
        ]
        | None
    ) = None
    """Prompts with expected answers that both are given, up to 8 files of JSON lines, in the same forms as
    text. Default: bundled for models with the bundled models' tokenizer and chat template, else none."""
    max_tokens: PositiveTokens | None = None
    """Longest answer to a task that does not say it itself, in tokens (1 to 1048576). Default 256."""
    thresholds: Thresholds = Thresholds()
    """Limits of what the model may be worse by. Default: those of `headway eval`."""
    timeout_seconds: Annotated[int, Field(ge=60, le=86_400)] = 3600
    """Longest time that an evaluation may take, in seconds, waiting for a node included (60 to 86400).
    Default 3600."""
    resources: Resources | None = None
    """Resources of the evaluation, which holds model and baseline in memory at once. Default: those of a
    replica."""

    @model_validator(mode="after")
    def _has_something_to_judge_by(self) -> Self:
        tasks = self.tasks or []
        if NONE in tasks and len(tasks) > 1:
            raise ValueError(f"tasks: {ALONE_MESSAGE}")
        if self.text == NONE and NONE in tasks:
            raise ValueError(NOTHING_MESSAGE)
        return self

    def materials(self) -> tuple[str, ...]:
        """The files that are named, each once, in order."""
        named = [one for one in (self.text, *(self.tasks or ())) if one not in (None, BUNDLED, NONE)]
        return tuple(dict.fromkeys(one for one in named if one is not None))
