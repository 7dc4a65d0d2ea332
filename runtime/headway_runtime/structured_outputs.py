"""The form that an answer is asked to have, in vLLM's words, and the grammar that it comes to.

Also how a JSON schema is written for the library of grammars, which requests of OpenAI's form and tools need.
"""

import contextlib
import json as json_texts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any

from headway_runtime.errors import InvalidRequestError
from headway_runtime.grammar import COMPACT_JSON, OPTIONS_KEYWORD
from headway_runtime.request import Grammar

NO_LAYOUT: Mapping[str, Any] = MappingProxyType({})
FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """vLLM's class of that name: exactly one of the first five. InvalidRequestError for anything else.

    json: a schema, as a dict or as text. regex: of the whole answer. choice: the answers that there may be.
    grammar: GBNF, or Lark's syntax. json_object: any object. disable_any_whitespace: of JSON, no white space
    but that of the separators.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        asked = [name for name in FORMS if getattr(self, name) is not None]
        if len(asked) != 1 or self.json_object is False:
            raise _wrong(
                self.form, f"holds {', '.join(asked) or 'nothing'}; give one of {', '.join(FORMS)}=True"
            )
        texts = [one for one in (self.regex, self.grammar) if one is not None]
        texts += [] if self.choice is None else list(self.choice)
        is_schema = self.json is None or isinstance(self.json, str | Mapping)
        if not is_schema or isinstance(self.choice, str) or not all(isinstance(one, str) for one in texts):
            given = shortened(getattr(self, self.form))
            raise _wrong(self.form, f"={given}: want a text, of json also a dict, of choice a list of texts")
        if self.disable_any_whitespace and self.json is None and not self.json_object:
            raise _wrong("disable_any_whitespace", "is for json and json_object; leave it out")

    @property
    def form(self) -> str:
        """The one that was given."""
        return next((name for name in FORMS if getattr(self, name) is not None), "")

    def as_grammar(self) -> Grammar:
        """The same for the engine; its param names the form."""
        param, layout = f"structured_outputs.{self.form}", NO_LAYOUT
        if self.disable_any_whitespace:
            layout = COMPACT_JSON
        if self.json is not None:
            return Grammar("json_schema", _schema_as_text(self.json, layout), param)
        if self.regex is not None:
            return Grammar("regex", self.regex, param)
        if self.choice is not None:
            return Grammar("choice", json_texts.dumps(list(self.choice)), param)
        if self.grammar is not None:
            return Grammar("ebnf", self.grammar, param)
        if layout:
            return Grammar("json_schema", schema_text({"type": "object"}, strict=True, layout=layout), param)
        return Grammar("json_object", param=param)


def schema_text(schema: Mapping[str, Any], *, strict: bool, layout: Mapping[str, Any] = NO_LAYOUT) -> str:
    """A schema as its library reads it. Not strict: keywords that it does not know are passed over.

    layout: COMPACT_JSON, or READABLE_JSON where the schema becomes a part of another grammar.
    """
    own = schema.get(OPTIONS_KEYWORD)
    options: dict[str, Any] = {} if strict else {"lenient": True}
    options |= own if isinstance(own, dict) else {}
    options |= layout
    return json_texts.dumps({**schema, OPTIONS_KEYWORD: options} if options else schema)


def own_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A client's schema without what would be the library's options in it: those are ours to choose."""
    return {name: value for name, value in schema.items() if name != OPTIONS_KEYWORD}


def _schema_as_text(schema: Mapping[str, Any] | str, layout: Mapping[str, Any]) -> str:
    if isinstance(schema, str) and (layout or OPTIONS_KEYWORD in schema):
        # What is no schema at all is left for the compiler to refuse.
        with contextlib.suppress(ValueError, RecursionError):
            read = json_texts.loads(schema)
            schema = read if isinstance(read, dict) else schema
    return schema if isinstance(schema, str) else schema_text(own_schema(schema), strict=True, layout=layout)


def _wrong(field: str, fault: str) -> InvalidRequestError:
    name = f"structured_outputs.{field}" if field else "structured_outputs"
    between = "" if fault.startswith("=") else " "
    return InvalidRequestError(f"{name}{between}{fault}", param=name)
