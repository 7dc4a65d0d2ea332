"""What is wrong with a body, for its sender: the field as the body has it, its value, and what it may be.

Pydantic finds what is wrong; of what it says only the kind of fault and the place are used. Each member of a
union has a complaint of its own; the one that was meant is the one that took in most of the value.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway_runtime.errors import InvalidRequestError, RequestCode
from headway_runtime.sampling_params import shown
from headway_runtime.server.body_schema import (
    INSTEAD,
    BodySchema,
    Path,
    is_served,
    json_type,
    number_text,
    path_name,
    schema_of,
)

if TYPE_CHECKING:
    from headway_runtime.server.body import StrictBody

# Values that say what an object is: a wrong one of these is why its other members are wrong.
_DISCRIMINATORS = ("type", "role")
# An object of thousands of members may bring as many complaints.
_MAX_PROBLEMS = 1000
# Complaints that a value is nothing of what was wanted; others are about what it is.
_WRONG_KIND = ("_type", "literal_error", "int_parsing_size")


class FieldError(ValueError):
    """A field that does not agree with others; raised by validators of whole bodies.

    field: its name in the body that the validator is of, or "" for that body itself.
    message: what follows the field's name and value, ending with the remedy.
    """

    def __init__(self, field: str, message: str, code: RequestCode = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@dataclass(frozen=True, slots=True)
class _Problem:
    """One complaint. path: where in the body, as its sender wrote it."""

    kind: str
    path: Path
    context: Mapping[str, Any]


def explain_syntax(error: ValidationError) -> InvalidRequestError | None:
    """What is wrong with a body that is no JSON object; None if it is one."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        cause = problem["msg"].removeprefix("Invalid JSON: ")
        return InvalidRequestError(
            f"the body is not valid JSON ({cause}); send a JSON object", code="invalid_json"
        )
    if problem["loc"] or problem["type"] not in ("model_type", "model_attributes_type", "dict_type"):
        return None
    value = problem["input"]
    return InvalidRequestError(
        f"the body is {shown(value)}, of type {json_type(value)}; send a JSON object with the fields",
        code="invalid_type",
    )


def explain(error: ValidationError, value: Any, kind: "type[StrictBody]") -> InvalidRequestError:
    """The error of `value`, a body of this kind."""
    found = error.errors(include_url=False, include_input=False)[:_MAX_PROBLEMS]
    problems = [_placed(one, value) for one in found]
    problem = _foremost(problems)
    schema = schema_of(kind)
    if problem.kind == "extra_forbidden":
        return _unknown(problem.path, value, schema)
    if problem.kind == "missing":
        name, (_, words) = path_name(problem.path), schema.expectation(problem.path)
        return InvalidRequestError(
            f"{name} is missing; send {words}", param=name, code="missing_required_parameter"
        )
    cause = problem.context.get("error")
    if isinstance(cause, FieldError):
        return _disagreeing(problem.path, cause, value)
    return _wrong(problem, value, kind, schema)


def _placed(problem: Any, body: Any) -> _Problem:
    """The complaint with its path in the body: without names of union members, which no client sends."""
    path: list[int | str] = []
    value, location = body, problem["loc"]
    for part in location:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            path.append(part)
    if problem["type"] == "missing":
        path.append(location[-1])
    elif problem["type"] == "union_tag_invalid":
        path.append("type")
    return _Problem(problem["type"], tuple(path), problem.get("ctx", {}))


def _foremost(problems: Sequence[_Problem]) -> _Problem:
    """The complaint to be told: a stranger among the fields, else the one about the first wrong field."""
    for one in problems:
        if one.kind == "extra_forbidden" and len(one.path) == 1:
            return one
    first = problems[0].path[:1]
    return max((one for one in problems if one.path[:1] == first), key=_weight)


def _weight(problem: _Problem) -> tuple[bool, bool, int, int, bool]:
    """The more, the closer to what the sender meant."""
    path = problem.path
    is_choice = problem.kind in ("literal_error", "union_tag_invalid")
    is_discriminator = is_choice and bool(path) and path[-1] in _DISCRIMINATORS
    place = path[-1] if path and isinstance(path[-1], int) else 0
    is_about_value = not problem.kind.endswith(_WRONG_KIND)
    return is_discriminator, problem.kind == "extra_forbidden", len(path), place, is_about_value


def _unknown(path: Path, body: Any, schema: BodySchema) -> InvalidRequestError:
    """A field that is not served: what to do instead, or what may have been meant."""
    *outer, last = path
    known = schema.names(tuple(outer))
    name = str(last)
    found = known.get(name, {})
    is_known_elsewhere = not is_served(found)
    remedy = "leave the field out"
    if INSTEAD in found:
        remedy = f"{found[INSTEAD]}, or leave the field out"
    elif not is_known_elsewhere:
        served = [one for one, inner in known.items() if is_served(inner)]
        if near := difflib.get_close_matches(name, served, 1, 0.75):
            remedy = f"did you mean {near[0]!r}?"
    param = path_name(path)
    return InvalidRequestError(
        f"{param}={shown(_value_at(path, body))} is not supported by this server; {remedy}",
        param=param,
        code="unsupported_parameter" if is_known_elsewhere else "unknown_parameter",
    )


def _disagreeing(path: Path, cause: FieldError, body: Any) -> InvalidRequestError:
    """What a validator of a whole body has found; it says itself what is to be done."""
    full = (*path, cause.field) if cause.field else path
    name, sent = path_name(full), _value_at(full, body)
    # Null is as good as nothing, which is what such a message is about.
    is_there = sent is not _ABSENT and not (sent is None and cause.code.startswith("missing"))
    given = f"={shown(sent)}" if is_there else ""
    return InvalidRequestError(f"{name}{given} {cause}", param=name, code=cause.code)


def _wrong(problem: _Problem, body: Any, kind: "type[StrictBody]", schema: BodySchema) -> InvalidRequestError:
    """A value of the wrong type or out of its range."""
    path, value = problem.path, _value_at(problem.path, body)
    code, fault = _fault(problem, value, schema.types(path))
    owner, words = schema.expectation(path)
    if problem.kind == "union_tag_invalid":
        owner, words = path, schema.words(path)
    name = path_name(path)
    remedy = f"send {words}" if owner == path else f"{path_name(owner)} may be {words}"
    if path[-1:] == ("type",) and isinstance(value, str):
        remedy = kind.refused_types.get(value, remedy)
    return InvalidRequestError(f"{name}={shown(value)} {fault}; {remedy}", param=name, code=code)


def _fault(problem: _Problem, value: Any, allowed: set[str]) -> tuple[RequestCode, str]:
    """The code, and what is wrong in words that follow the value."""
    is_number = bool(allowed & {"integer", "number"})
    if isinstance(value, float) and not math.isfinite(value) and is_number:
        return "invalid_value", "is not a finite number"
    if isinstance(value, int) and problem.kind == "float_type" and not isinstance(value, bool):
        # More digits than any decimal has.
        is_above = value > 0
        code: RequestCode = "decimal_above_max_value" if is_above else "decimal_below_min_value"
        return code, "is too large" if is_above else "is too small"
    found = json_type(value)
    if found not in allowed or problem.kind.endswith("_type"):
        return "invalid_type", f"is of type {found}"
    is_decimal = "number" in allowed
    context = problem.context
    match problem.kind:
        case "greater_than_equal" | "greater_than":
            words = "is below" if "ge" in context else "is not above"
            words += f" {number_text(context.get('ge', context.get('gt')))}"
            return "decimal_below_min_value" if is_decimal else "integer_below_min_value", words
        case "less_than_equal":
            words = f"is above {number_text(context['le'])}"
            return "decimal_above_max_value" if is_decimal else "integer_above_max_value", words
        case "too_short":
            return "empty_array", "is empty"  # no list has to hold more than one
        case "too_long":
            return "array_above_max_length", f"has {len(value)} items, more than {context['max_length']}"
        case "string_too_short":
            return "empty_string", "is empty"
        case "string_too_long":
            most = context["max_length"]
            return "string_above_max_length", f"has {len(value)} characters, more than {most}"
        case "string_pattern_mismatch":
            return "invalid_value", "has another form"
        case _:
            return "invalid_value", "is not one of its values"


_ABSENT = object()


def _value_at(path: Path, body: Any) -> Any:
    for part in path:
        try:
            body = body[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return body
