"""What every request body is made of: strict, every field known, and errors that name the field at fault.

Knows no endpoint, no model and no engine.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headway_runtime.errors import InvalidRequestError


class FieldError(ValueError):
    """A field that does not agree with others; raised by validators of whole bodies."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class StrictBody(BaseModel):
    """Strict: no number is taken out of a string, and no field is unknown.

    neutral: fields that are not served, and the values at which they ask for nothing, besides null.
    refusals: what to do instead of a field that is refused, by its name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    refusals: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        neutral, served = cls.neutral, cls.model_fields

        def changes_nothing(name: str, value: object) -> bool:
            # `type` keeps False from passing as 0: what is equal but of another type is a client's mistake.
            return (
                name in neutral
                and name not in served
                and (
                    value is None
                    or any(
                        value == one and isinstance(value, bool) == isinstance(one, bool)
                        for one in neutral[name]
                    )
                )
            )

        return {name: value for name, value in values.items() if not changes_nothing(name, value)}


AnyBody = TypeVar("AnyBody", bound=StrictBody)


def parse_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """The checked body. InvalidRequestError names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, body, kind) from error


def _explain(error: ValidationError, body: bytes, kind: type[StrictBody]) -> InvalidRequestError:
    problems = error.errors(include_url=False)
    # Among the members of a union, the complaint that went deepest is about what the client meant to send.
    problem = max(problems, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    if problem["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON ({problem['msg']}); send a JSON object")
    is_missing = problem["type"] == "missing"
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None  # what pydantic reads and Python does not: a number of thousands of digits
    param = _path_in_body(problem["loc"], value, is_missing=is_missing) or None
    shown = _shorten(problem["input"])
    if problem["type"] == "extra_forbidden":
        return _unknown(problem["loc"], param or "", shown, kind)
    if is_missing:
        return InvalidRequestError(f"{param} is missing; it is required", param=param)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{param}.{cause.field}" if param else cause.field
        return InvalidRequestError(f"{param}: {cause}", param=param)
    if param is None:
        return InvalidRequestError(problem["msg"].removeprefix("Value error, "))
    return InvalidRequestError(f"{param}={shown}: {problem['msg']}", param=param)


def _unknown(
    location: tuple[int | str, ...], param: str, shown: str, kind: type[StrictBody]
) -> InvalidRequestError:
    """A field that is not served: what to do instead, or what may have been meant."""
    *path, last = location
    owners: list[type[BaseModel]] = [kind]
    for part in path:
        inner = [
            found
            for owner in owners
            if part in owner.model_fields
            for found in _models_in(owner.model_fields[str(part)].annotation)
        ]
        owners = inner or owners
    known = sorted({name for owner in owners for name in owner.model_fields})
    name = str(last)
    remedy = "leave the field out"
    if name in kind.refusals:
        remedy = f"{kind.refusals[name]}, or leave the field out"
    elif name not in kind.neutral and (near := difflib.get_close_matches(name, known, 1, 0.75)):
        remedy = f"did you mean {near[0]!r}?"
    code = "unsupported_parameter" if name in kind.neutral or name in kind.refusals else "unknown_parameter"
    return InvalidRequestError(
        f"{param}={shown} is not supported by this server; {remedy}", param=param, code=code
    )


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _path_in_body(location: tuple[int | str, ...], value: Any, *, is_missing: bool) -> str:
    """The path without the names of union members, which pydantic puts in and no client has sent."""
    path: list[str] = []
    for part in location:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            path.append(str(part))
    if is_missing:
        path.append(str(location[-1]))
    return ".".join(path)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
