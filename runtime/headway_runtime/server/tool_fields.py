"""The fields of a body that offer tools to a model, and say whether it has to use them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from headway_runtime.server.body import FIRST_FAULT, FieldError, JsonObject, StrictBody

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
# All tools are told to the model at once.
_NEUTRAL_IN_TOOL: Mapping[str, tuple[object, ...]] = {"defer_loading": (False,)}


def check_tool_names(names: Sequence[str]) -> None:
    """FieldError for a name that is there twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FieldError("tools", f"defines {name!r} more than once; name each tool once")


def check_tool_choice(names: Sequence[str], named: str | None, *, must_call: bool) -> None:
    """FieldError if there is no such tool. named: the one that has to be called."""
    if not names and (must_call or named is not None):
        raise FieldError("tool_choice", "asks for a call, but there are no tools; send tools")
    if named is not None and named not in names:
        raise FieldError(
            "tool_choice",
            f"names {named!r}; of the tools, there are {', '.join(names)}; use one",
        )


class FunctionDefinition(StrictBody):
    """A function. parameters: the JSON schema of its arguments; without one, any object will do.

    strict: its arguments have to match the schema, and a schema that cannot be enforced is refused.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL_IN_TOOL

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL_IN_TOOL

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """What chat templates read: what was sent, but for what is said to the server."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionName(StrictBody):
    name: str


class NamedTool(StrictBody):
    type: Literal["function"]
    function: FunctionName


class OfferedTools(StrictBody):
    """A part of other bodies: the tools that a model is told of."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> "OfferedTools":
        check_tool_names(self.tool_names)
        return self

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools or ())


class ToolFields(OfferedTools):
    """A part of other bodies: the tools, and whether they are to be called."""

    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _tools_fit_the_choice(self) -> "ToolFields":
        check_tool_choice(self.tool_names, self.named_tool, must_call=self.must_call)
        return self

    @property
    def named_tool(self) -> str | None:
        """The one tool that has to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold calls at all."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def has_strict_tools(self) -> bool:
        """Whether the arguments of one at least have to match their schema."""
        return any(tool.function.strict for tool in self.tools or ())

    @property
    def must_call(self) -> bool:
        """Whether it has to be one."""
        return self.tool_choice == "required" or self.named_tool is not None
