"""The fields of a body that prescribe the form of its answer, and the grammar that they come to.

`response_format` is OpenAI's, `structured_outputs` vLLM's. Whether a grammar can be compiled is its library's
to say, which only the engine asks, in a process that is watched (`grammar_trial.py`).
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from headway_runtime.grammar import OPTIONS_KEYWORD
from headway_runtime.request import Grammar
from headway_runtime.sampling_params import shown
from headway_runtime.server.body import FIRST_FAULT, FieldError, JsonObject, StrictBody
from headway_runtime.structured_outputs import StructuredOutputsParams, own_schema, schema_text

MAX_CHOICES_LISTED = 4096
NO_STRUCTURAL_TAG = "use tools for calls, or a grammar in structured_outputs"


class JsonSchema(StrictBody):
    """A named schema. strict: one that cannot be enforced in full is refused, not followed in part."""

    # `schema` is a method of pydantic's models, so it goes by another name inside.
    model_config = ConfigDict(populate_by_name=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    wanted: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_has_its_type(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError(
                "json_schema",
                "is missing; type 'json_schema' needs it, send both",
                "missing_required_parameter",
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise FieldError(
                "json_schema",
                f"is only allowed with type 'json_schema', which here is {self.type!r}; change it",
            )
        return self


class StructuredOutputs(StrictBody):
    """Exactly one of them. Clients of vLLM may write out its class whole, with what asks for nothing."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "_backend": (),
        "_backend_was_auto": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
    refusals: ClassVar[Mapping[str, str]] = {
        "disable_additional_properties": "set additionalProperties to false in the schema",
        "disable_fallback": "there is one library of grammars, and nothing to fall back to",
        "structural_tag": NO_STRUCTURAL_TAG,
        "whitespace_pattern": "use disable_any_whitespace=true, or a grammar",
    }

    json_: Annotated[JsonObject | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_LISTED), FIRST_FAULT] | None = (
        None
    )
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if self.json_object is False:
            raise FieldError("json_object", "asks for nothing; send true, or another form instead")
        if len(self.asked) != 1:
            raise FieldError(
                "",
                "is not exactly one of json, regex, choice, grammar and json_object=true; send one",
                "mutually_exclusive_parameters" if self.asked else "missing_mutually_exclusive_parameters",
            )
        if self.disable_any_whitespace and self.json_ is None and not self.json_object:
            raise FieldError("disable_any_whitespace", "is for json and json_object; leave it out")
        return self

    def as_params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            self.json_,
            self.regex,
            self.choice,
            self.grammar,
            self.json_object,
            bool(self.disable_any_whitespace),
        )

    @property
    def asked(self) -> list[str]:
        """The members that were sent."""
        members = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
        }
        return [name for name, value in members.items() if value is not None]


class OutputsField(StrictBody):
    """A part of other bodies."""

    structured_outputs: StructuredOutputs | None = None


class StructuredFields(OutputsField):
    """The same with what OpenAI has for it."""

    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "StructuredFields":
        is_free = self.response_format is None or self.response_format.type == "text"
        if self.structured_outputs is not None and not is_free:
            raise FieldError(
                "structured_outputs",
                "prescribes the answer, as response_format does; send one of them",
                "mutually_exclusive_parameters",
            )
        return self


def grammar_of(body: StructuredFields) -> Grammar | None:
    """What the answer has to match; None if anything will do."""
    if body.structured_outputs is not None:
        return body.structured_outputs.as_params().as_grammar()
    asked, param = body.response_format, "response_format"
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is None or asked.json_schema.wanted is None:
        return Grammar("json_object", param=param)
    source = schema_text(own_schema(asked.json_schema.wanted), strict=bool(asked.json_schema.strict))
    return Grammar("json_schema", source, param)


def as_sent(grammar: Grammar) -> str:
    """The grammar as it follows its field in a message; nothing if its sender knows no word of it."""
    if grammar.kind == "lark" or grammar.param == "tools":
        return ""
    return f"={_source_as_sent(grammar)}"


def _source_as_sent(grammar: Grammar) -> str:
    """Without the options that were put into a schema here."""
    if grammar.kind == "json_schema":
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(grammar.source)
            if isinstance(schema, dict):
                return shown(json.dumps({key: one for key, one in schema.items() if key != OPTIONS_KEYWORD}))
    return shown(grammar.source)
