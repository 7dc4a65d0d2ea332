"""The JSON of `/v1/responses`: one response object, or the events of its stream, which number themselves.

A stream ends with response.completed, response.incomplete (the answer was cut at its length) or
response.failed; no [DONE] follows.
"""

import time
from collections.abc import Sequence
from typing import Any

from headway_runtime.choice import Delta
from headway_runtime.server.chat_format import ChatFormat
from headway_runtime.server.chat_tools_format import CallReader, CallRules
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.responses import AnswerHead, Usage, WholeChoice, encode_json
from headway_runtime.server.responses_endpoint_items import Event, OutputItems
from headway_runtime.server.responses_endpoint_protocol import ResponsesBody
from headway_runtime.server.tool_calls.pieces import Piece


class ResponsesFormat(ChatFormat):
    """/v1/responses, of one choice. rules: None where the answer holds no calls."""

    stream_end = b""

    def __init__(self, head: AnswerHead, body: ResponsesBody, rules: CallRules | None) -> None:
        super().__init__(head)
        self._response = _response(head, body)
        self._items = OutputItems()
        self._reader = None if rules is None else CallReader(rules)
        self._waiting_logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._num_events = 0

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        """The events of one delta; none if all of it is held back."""
        events: list[Event] = []
        if is_first:
            begun = self._snapshot(None)
            events += [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        events += self._take(delta)
        return b"".join(map(self._encode, events))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event: the whole response."""
        return self._encode({"type": f"response.{self._status}", "response": self._snapshot(usage)})

    def error_event(self, error: HttpError) -> bytes:
        """What a stream ends with that has failed."""
        self._status = "failed"
        failure = {"code": "server_error", "message": error.message}
        return self._encode({"type": "response.failed", "response": self._snapshot(None, failure)})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._take(Delta(choice.text, choice.entries, choice.finish_reason))
        return encode_json(self._snapshot(usage))

    def _take(self, delta: Delta) -> list[Event]:
        if delta.entries:
            self._waiting_logprobs += self._logprobs_of(delta.entries)["content"]
        is_last = delta.finish_reason is not None
        pieces: list[Piece] = [delta.text] if delta.text else []
        if self._reader is not None:
            pieces = self._reader.read(delta.text, is_last=is_last)
        logprobs = []
        if any(isinstance(piece, str) for piece in pieces):
            logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        events = self._items.add(pieces, logprobs)
        if is_last:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._items.finish(self._status, self._waiting_logprobs)
        return events

    def _snapshot(self, usage: Usage | None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._response,
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": error,
            "incomplete_details": details,
            "output": list(self._items.items),
            "usage": None if usage is None else _usage(usage),
        }

    def _encode(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(numbered))


def _response(head: AnswerHead, body: ResponsesBody) -> dict[str, Any]:
    """What stays the same of a response. What was not sent says what it defaults to."""
    text = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    choice = body.tool_choice or "auto"
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": head.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        # Nothing is ever stored, whatever was asked for.
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **({} if usage.timings is None else {"headway": usage.timings}),
    }
