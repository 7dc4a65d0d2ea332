"""The grammar of an answer that has to be a call of a tool.

With tool_choice "required" the answer is a list of {"name", "arguments"}, with a named tool it is that tool's
arguments: the same whatever the model, as the grammar leaves it no choice. Nobody reads a call's white
space, so it has none to spend tokens on. Schemas that refer to their own parts keep doing so from where they
are put.
"""

from collections.abc import Sequence
from typing import Any

from headway_runtime.grammar import COMPACT_JSON
from headway_runtime.request import Grammar, GrammarPart
from headway_runtime.server.tool_fields import Tool, ToolFields
from headway_runtime.structured_outputs import own_schema, schema_text

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


def forced_call_grammar(body: ToolFields) -> Grammar | None:
    """None if the answer need not be a call."""
    if not body.must_call:
        return None
    tools = body.tools or []
    named = body.named_tool
    if named is not None:
        (tool,) = [one for one in tools if one.function.name == named]
        schema = arguments_schema(tool)
        tools = [tool]
    else:
        schema = {
            "type": "array",
            "items": {"anyOf": [call_schema(index, tool) for index, tool in enumerate(tools)]},
            "minItems": 1,
            "$defs": {f"tool_{index}": arguments_schema(tool, index) for index, tool in enumerate(tools)},
        }
        if body.parallel_tool_calls is False:
            schema["maxItems"] = 1
    is_strict = any(tool.function.strict for tool in tools)
    source = schema_text(schema, strict=is_strict, layout=COMPACT_JSON)
    return Grammar("json_schema", source, "tools", tool_parts(body))


def tool_parts(body: ToolFields) -> tuple[GrammarPart, ...]:
    """The parameters that calls are held to, so that what is at fault can be told from the others."""
    all_strict = body.tool_choice == "required" and body.has_strict_tools
    parts = []
    for index, tool in enumerate(body.tools or ()):
        function, strict = tool.function, all_strict or bool(tool.function.strict)
        if function.name == body.named_tool if body.named_tool else body.must_call or strict:
            param, owner = f"tools[{index}].function.parameters", f"tool {function.name!r}"
            parts.append(GrammarPart(param, owner, schema_text(arguments_schema(tool), strict=strict)))
    return tuple(parts)


def arguments_schema(tool: Tool, index: int | None = None) -> dict[str, Any]:
    """What a tool's arguments must match. index: it stands in the definitions, as that tool's."""
    schema = {**ANY_ARGUMENTS, **own_schema(tool.function.parameters or {})}
    return schema if index is None else _moved(schema, f"#/$defs/tool_{index}")


def call_schema(index: int, tool: Tool, member: str = "arguments") -> dict[str, Any]:
    """One call of a tool whose arguments are among the definitions. member: what they are called."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            member: {"$ref": f"#/$defs/tool_{index}"},
        },
        "required": ["name", member],
        "additionalProperties": False,
    }


def _moved(value: Any, root: str) -> Any:
    """A schema whose references to its own root lead to where it stands now."""
    if isinstance(value, dict):
        found = {name: _moved(one, root) for name, one in value.items()}
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            found["$ref"] = root + reference[1:]
        return found
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_moved(one, root) for one in value]
    return value
