"""What every model of the spec shares: the base class, CEL rules, quantities; the config of the status.

A cross-field rule is written as CEL in `rules(...)`, so that the API server holds it while the operator is
down. In the local world no API server stands in front, so each rule has the same check as a validator beside
it.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from headway_operator.spec.quantity import QUANTITY_PATTERN, parse_quantity


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules of a schema node, as (expression over `self`, message that names the remedy)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def with_empty_default(*pairs: tuple[str, str]) -> Callable[[dict[str, Any]], None]:
    """Let the API server fill in an omitted object from its fields' own defaults; adds rules as well."""

    def extend(schema: dict[str, Any]) -> None:
        schema["default"] = {}
        if pairs:
            schema.update(rules(*pairs))

    return extend


def _is_quantity(value: str | int) -> str | int:
    parse_quantity(value)
    return value


def _is_memory(value: str | int) -> str | int:
    if parse_quantity(value) < 1:
        raise ValueError(f"{value!r} is less than one byte; write for example 512Mi")
    return value


QUANTITY_SCHEMA = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": QUANTITY_PATTERN,
    "x-kubernetes-int-or-string": True,
}
Quantity = Annotated[str | int, AfterValidator(_is_quantity), WithJsonSchema(QUANTITY_SCHEMA)]
MemoryQuantity = Annotated[str | int, AfterValidator(_is_memory), WithJsonSchema(QUANTITY_SCHEMA)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
PositiveTokens = Annotated[int, Field(ge=1, le=1_048_576)]
PodTemplateDict = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


STATUS_CONFIG = ConfigDict(
    alias_generator=to_camel, extra="forbid", populate_by_name=True, use_attribute_docstrings=True
)


class SpecModel(BaseModel):
    """camelCase outside, unknown fields refused, never changed after it was read."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )
