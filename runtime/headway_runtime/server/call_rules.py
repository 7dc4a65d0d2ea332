"""How the calls in the answer to one body are found."""

from functools import partial

from headway_runtime.server.chat_tools_format import CallRules
from headway_runtime.server.prompts import ServedModel
from headway_runtime.server.tool_calls.forced import NamedParser, RequiredParser
from headway_runtime.server.tool_fields import ToolFields


def call_rules(body: ToolFields, model: ServedModel) -> CallRules:
    """A call that a grammar dictates has a form of its own; any other has the model's."""
    is_parallel = body.parallel_tool_calls is not False
    if body.named_tool is not None:
        return CallRules(partial(NamedParser, body.named_tool), is_named=True)
    if body.must_call:
        return CallRules(RequiredParser, is_parallel=is_parallel)
    assert model.tool_calls is not None, "refused when the request was prepared"
    special = model.tokenizer.vocabulary.special_ids_of
    return CallRules(
        partial(model.tool_calls.make, frozenset(body.tool_names)),
        hidden_tags=tuple(tag for tag in model.tool_calls.tags if special((tag,))),
        is_parallel=is_parallel,
    )
