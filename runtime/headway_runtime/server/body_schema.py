"""What a field of a body may be, read from the body's JSON schema and put into words.

The schema is the one that clients get as OpenAPI document, so that a message cannot promise anything else.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]
Path = tuple[int | str, ...]

# The description of fields that are known and not served.
NOT_SERVED = "Not served; these values ask for nothing."
# What to do instead of such a field, where there is something to do.
INSTEAD = "x-instead"
ANYTHING: Schema = {}
_NOUNS = {
    "string": "strings",
    "integer": "integers",
    "number": "finite numbers",
    "array": "lists",
    "object": "objects",
}


class BodySchema:
    """One kind of body. Paths are those of values in it: names of members and places in lists."""

    def __init__(self, kind: type[BaseModel]) -> None:
        self._root: Schema = kind.model_json_schema()
        self._parts: Mapping[str, Schema] = self._root.get("$defs", {})

    def at(self, path: Path) -> list[Schema]:
        """All that a value there may be, without null; none if the path leads nowhere."""
        found: list[Schema] = [self._root]
        for part in path:
            found = [inner for one in self._plain(found) for inner in _members(one, part)]
        return [one for one in self._plain(found) if one.get("type") != "null"]

    def expectation(self, path: Path) -> tuple[Path, str]:
        """What a value there may be, in words; and of what that is said.

        Which is the path itself, unless it lies within a list that may be of several kinds: then what is to
        be known is what the whole may be.
        """
        owner: Path = ()
        for length in range(1, len(path) + 1):
            if not self.at(path[:length]):
                break
            if self._is_of_one_kind(path[:length]):
                owner = path[:length]
        return owner, self.words(owner)

    def words(self, path: Path) -> str:
        """What a value there may be, whatever the rest is."""
        return self._words(self.at(path))

    def names(self, path: Path) -> Mapping[str, Schema]:
        """The members that an object there may have."""
        return {name: inner for one in self.at(path) for name, inner in one.get("properties", {}).items()}

    def types(self, path: Path) -> set[str]:
        """The JSON types that a value there may have."""
        return {kind for one in self.at(path) for kind in _types(one)}

    def _is_of_one_kind(self, path: Path) -> bool:
        """Whether what is there does not depend on the kind of what it is in."""
        outer = [one for one in self.at(path[:-1]) if any(_members(one, path[-1]))]
        return len({self._words(self._inside(one, path[-1])) for one in outer}) == 1

    def _inside(self, outer: Schema, part: int | str) -> list[Schema]:
        return [one for one in self._plain(list(_members(outer, part))) if one.get("type") != "null"]

    def _plain(self, schemas: Sequence[Schema]) -> list[Schema]:
        """Without references and alternatives."""
        found: list[Schema] = []
        for one in schemas:
            if "$ref" in one:
                found += self._plain([self._parts[one["$ref"].rpartition("/")[2]]])
            elif "anyOf" in one or "oneOf" in one:
                found += self._plain([*one.get("anyOf", ()), *one.get("oneOf", ())])
            else:
                found.append(one)
        return found

    def _words(self, schemas: Sequence[Schema]) -> str:
        kinds = list(dict.fromkeys(self._kind(one) for one in schemas))
        return ", or ".join(kinds) if kinds else "anything"

    def _kind(self, schema: Schema) -> str:
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            return _listed([_literal(one) for one in values if one is not None], "or")
        match schema.get("type"):
            case "string":
                return "a string" + _string_bounds(schema)
            case "integer":
                return "an integer" + _number_bounds(schema)
            case "number":
                return "a finite number" + _number_bounds(schema)
            case "boolean":
                return "true or false"
            case "array":
                return "a list" + self._items(schema)
            case "object":
                return "an object" + self._object_members(schema)
            case _:
                return "anything"

    def _items(self, schema: Schema) -> str:
        items = self._inside(schema, 0)
        noun = "items"
        if len(items) == 1 and items[0].get("type") in _NOUNS and "enum" not in items[0]:
            (one,) = items
            noun = _NOUNS[one["type"]]
            match one["type"]:
                case "string":
                    noun += _string_bounds(one)
                case "integer" | "number":
                    noun += _number_bounds(one)
                case "array":
                    noun += self._items(one)
                case _:
                    noun += self._object_members(one)
            return _count(schema) + noun
        return f"{_count(schema)}{noun}, each {self._words(items)}"

    def _object_members(self, schema: Schema) -> str:
        if required := schema.get("required"):
            return " with " + _listed(required, "and")
        if served := [name for name, one in schema.get("properties", {}).items() if is_served(one)]:
            return " that may have " + _listed(served, "and")
        values = schema.get("additionalProperties")
        return f" with {self._plural(values)} as values" if isinstance(values, Mapping) else ""

    def _plural(self, schema: Schema) -> str:
        return self._items({"items": schema, "type": "array"}).removeprefix(" of ")


@functools.cache
def schema_of(kind: type[BaseModel]) -> BodySchema:
    """Made when the first body of its kind is wrong: takes some milliseconds."""
    return BodySchema(kind)


def json_type(value: object) -> str:
    """The type of a value as JSON has it; integers may be written as 5.0."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def path_name(path: Path) -> str:
    """As OpenAI writes it: messages[0].content."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _members(schema: Schema, part: int | str) -> Iterator[Schema]:
    if isinstance(part, int):
        if schema.get("type") == "array":
            yield schema.get("items", ANYTHING)
    elif part in schema.get("properties", {}):
        yield schema["properties"][part]
    elif values := schema.get("additionalProperties"):
        yield values if isinstance(values, Mapping) else ANYTHING


def _types(schema: Schema) -> list[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if values:
        return [json_type(one) for one in values]
    kind = schema.get("type")
    if kind is None:
        return ["string", "integer", "number", "boolean", "array", "object", "null"]
    return ["integer", "number"] if kind == "number" else [kind]


def is_served(schema: Schema) -> bool:
    """Whether a field works, and is not merely known."""
    return bool(schema.get("description") != NOT_SERVED)


def _listed(words: Sequence[str], last: str) -> str:
    *others, final = words
    return f"{', '.join(others)} {last} {final}" if others else final


def _literal(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _number_bounds(schema: Schema) -> str:
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f" above {above:g}" + ("" if high is None else f", at most {high:g}")
    if low is None:
        return ""
    return f" from {number_text(low)}" + ("" if high is None else f" to {number_text(high)}")


def number_text(value: float) -> str:
    """Integers in full, others without zeros at their end."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _string_bounds(schema: Schema) -> str:
    if "pattern" in schema:
        return f" that matches {schema['pattern']}"
    fewest, most = schema.get("minLength"), schema.get("maxLength")
    if most is not None:
        return f" of {fewest or 0} to {most} characters"
    return "" if fewest is None else f" of at least {fewest} characters"


def _count(schema: Schema) -> str:
    fewest, most = schema.get("minItems"), schema.get("maxItems")
    if most is not None:
        return f" of {fewest} to {most} " if fewest else f" of at most {most} "
    return " of one or more " if fewest == 1 else f" of at least {fewest} " if fewest else " of "
