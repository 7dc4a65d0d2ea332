"""Which parser reads a model's tool calls: by its name, or by what the model's chat template writes.

hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen 2.5, Qwen 3
llama3_json  {"name": ..., "parameters": {...}}                            Llama 3.1, 3.2, 3.3
pythonic     [name(argument="value")]                                      Llama 4, some of Llama 3.2
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from headway_runtime.server.tool_calls.hermes import BEGIN_TAG, END_TAG, HermesParser
from headway_runtime.server.tool_calls.llama3_json import PYTHON_TAG, Llama3JsonParser
from headway_runtime.server.tool_calls.pieces import ToolCallParser
from headway_runtime.server.tool_calls.pythonic import END_TAG as PYTHON_END
from headway_runtime.server.tool_calls.pythonic import START_TAG as PYTHON_START
from headway_runtime.server.tool_calls.pythonic import PythonicParser


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """One way of writing calls. make: a parser for one answer, given the names of the tools.

    tags: texts that mark calls; where they are special tokens, their names must reach the parser.
    """

    name: str
    make: Callable[[Collection[str]], ToolCallParser]
    tags: tuple[str, ...]


_ALL = (
    ToolCallFormat("hermes", lambda _: HermesParser(), (BEGIN_TAG, END_TAG)),
    ToolCallFormat("llama3_json", Llama3JsonParser, (PYTHON_TAG,)),
    ToolCallFormat("pythonic", PythonicParser, (PYTHON_START, PYTHON_END)),
)
FORMATS: Mapping[str, ToolCallFormat] = {one.name: one for one in _ALL}


def detect_format(template: str) -> str | None:
    """The name of the format that a chat template asks its model for; None if it is none of these."""
    template = template.replace("\\", "")  # quotes within Jinja's own quotes
    if "tools" not in template:
        return None
    if BEGIN_TAG in template:
        # Qwen3-Coder writes XML between the same tags.
        return None if "<function=" in template else "hermes"
    if PYTHON_START in template or "[func_name1(" in template:
        return "pythonic"
    if '"parameters":' in template and ("ipython" in template or PYTHON_TAG in template):
        return "llama3_json"
    return None
