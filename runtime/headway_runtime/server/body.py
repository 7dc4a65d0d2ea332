"""What every request body is made of: strict, every field known, and errors that name the field at fault.

Knows no endpoint, no model and no engine. How an error is put into words is `body_errors`' business.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headway_runtime.server.body_errors import FieldError, explain, explain_syntax
from headway_runtime.server.body_schema import INSTEAD, NOT_SERVED

__all__ = [
    "FIRST_FAULT",
    "WHOLE",
    "AtMost",
    "FieldError",
    "JsonObject",
    "StrictBody",
    "check_body",
    "parse_body",
]

# Longer numbers are cut before they are looked at: Python takes a while for each, and refuses the longest.
_MAX_DIGITS = 1000
# No kind of body has so many.
_MAX_MEMBERS = 1000


def _whole_number(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


# For integers: many a client's language knows one kind of number, and writes 5 as 5.0.
WHOLE = BeforeValidator(_whole_number)


# For lists: to find fault with each of a million items would hold up everybody else.
FIRST_FAULT: Any = Field(fail_fast=True)


def AtMost(count: int) -> BeforeValidator:  # noqa: N802 - reads as the types of pydantic that it stands beside
    """For objects: bounds their members before any is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise FieldError(
                "",
                f"has {len(value)} members, more than {count}; send fewer",
                "object_above_max_properties",
            )
        return value

    return BeforeValidator(check)


def _only_json(value: dict[str, Any]) -> dict[str, Any]:
    for one in _numbers_in(value):
        if not math.isfinite(one):
            raise FieldError("", f"holds {one!r}, which is no JSON; send finite numbers")
    return value


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(one)


# An object with anything in it.
JsonObject = Annotated[dict[str, Any], AfterValidator(_only_json)]


def _describe_what_is_not_served(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Put the fields that are not served into a body's schema, with the only values that they may have."""
    assert issubclass(kind, StrictBody)
    for name, values in {**dict.fromkeys(kind.refusals, ()), **kind.neutral}.items():
        known: dict[str, Any] = {"enum": [None, *values], "description": NOT_SERVED}
        if name in kind.refusals:
            known[INSTEAD] = kind.refusals[name]
        schema.setdefault("properties", {}).setdefault(name, known)


class StrictBody(BaseModel):
    """Strict: no number is taken out of a string, and no field is unknown.

    neutral: fields that are not served, and the values at which they ask for nothing, besides null.
    refusals: what to do instead of a field that is refused, by its name.
    refused_types: what to do instead of a part, an item or a tool whose `type` is not served.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, json_schema_extra=_describe_what_is_not_served
    )
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    refusals: ClassVar[Mapping[str, str]] = {}
    refused_types: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > _MAX_MEMBERS:
            known = {name for one in (cls.model_fields, cls.neutral, cls.refusals) for name in one}
            stranger = next(name for name in values if name not in known)
            raise FieldError(
                stranger,
                f"is one of {len(values)} members, most of which are not known; leave them out",
                "unknown_parameter",
            )
        neutral, served = cls.neutral, cls.model_fields

        def changes_nothing(name: str, value: object) -> bool:
            if name in served:
                return False
            if value is None:
                return name in neutral or name in cls.refusals
            # `type` keeps False from passing as 0: what is equal but of another type is a client's mistake.
            return any(
                value == one and isinstance(value, bool) == isinstance(one, bool)
                for one in neutral.get(name, ())
            )

        return {name: value for name, value in values.items() if not changes_nothing(name, value)}


AnyBody = TypeVar("AnyBody", bound=StrictBody)


def parse_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """The checked body. InvalidRequestError names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        syntax = explain_syntax(error)
        if syntax is not None:
            raise syntax from error
        value = json.loads(body, parse_int=lambda digits: int(digits[:_MAX_DIGITS]))
        raise explain(error, value, kind) from error


def check_body(value: dict[str, Any], kind: type[AnyBody]) -> AnyBody:
    """The same of a body that is no longer, or was never, JSON."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise explain(error, value, kind) from error
