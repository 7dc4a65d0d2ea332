"""The JSON of `/v1/chat/completions` where the answer may hold calls of tools.

Puts a parser behind each choice's text: content goes out as content, a call as deltas, the first with its id
and name, the others with what is added to its arguments. Chats without tools do not come here.
"""

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway_runtime.choice import Delta
from headway_runtime.server.chat_format import ChatFormat, before, usage_alone
from headway_runtime.server.responses import AnswerHead, Usage, WholeChoice, encode_json
from headway_runtime.server.tool_calls.pieces import CallPiece, Piece, ToolCallParser

_ROLE = b'"delta":{"role":"assistant","content":null}'


@dataclass(frozen=True, slots=True)
class CallRules:
    """How calls are found. make_parser: for one choice. hidden_tags: never part of the content.

    is_parallel: an answer may hold several calls; else the first one alone is sent.
    is_named: the request named the function to be called.
    """

    make_parser: Callable[[], ToolCallParser]
    hidden_tags: Collection[str] = ()
    is_parallel: bool = True
    is_named: bool = False


class CallReader:
    """The calls and the content of one choice."""

    __slots__ = ("_arguments", "_parser", "_rules", "num_calls")

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._parser = rules.make_parser()
        self.num_calls = 0
        # Of the last call.
        self._arguments: list[str] = []

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """What of the text so far is certain, without what is not to be sent."""
        pieces = self._parser.push(text) if text else []
        if is_last:
            pieces += self._parser.finish()
        return [kept for piece in pieces if (kept := self._kept(piece))]

    def finish_reason(self, reason: str) -> str:
        """An answer that ended by itself, with calls, ended for them; not one cut within a call.

        One whose call was named by the request just stopped, as OpenAI and vLLM have it.
        """
        if reason != "stop" or self._rules.is_named:
            return reason
        return "tool_calls" if self.num_calls and self._is_whole() else reason

    def _is_whole(self) -> bool:
        """Whether the last call's arguments have come to their end."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def _kept(self, piece: Piece) -> Piece | None:
        if isinstance(piece, CallPiece):
            if piece.index and not self._rules.is_parallel:
                return None
            if piece.index >= self.num_calls:
                self.num_calls = piece.index + 1
                self._arguments.clear()
            self._arguments.append(piece.arguments)
            return piece
        for tag in self._rules.hidden_tags:
            piece = piece.replace(tag, "")
        return piece


@dataclass(slots=True)
class WholeCall:
    """A call of an answer that is not streamed."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


def read_whole(text: str, reader: CallReader) -> tuple[str, list[WholeCall]]:
    """The content and the calls of a whole answer."""
    content: list[str] = []
    calls: list[WholeCall] = []
    for piece in reader.read(text, is_last=True):
        if isinstance(piece, str):
            content.append(piece)
            continue
        if piece.name is not None:
            calls.append(WholeCall(new_call_id(), piece.name))
        calls[piece.index].arguments.append(piece.arguments)
    return "".join(content), calls


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolChatFormat(ChatFormat):
    """/v1/chat/completions with tools."""

    def __init__(self, head: AnswerHead, rules: CallRules) -> None:
        super().__init__(head)
        self._rules = rules
        self._readers: dict[int, CallReader] = {}

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        """The events of one delta; none if all of it is held back."""
        reader = (
            self._readers.setdefault(index, CallReader(self._rules)) if is_first else self._readers[index]
        )
        reason = delta.finish_reason
        pieces = reader.read(delta.text, is_last=reason is not None)
        events = [self._event(index, _ROLE, b"null", before(delta))] if is_first else []
        usage = usage_alone(delta)
        events += [self._piece_event(index, piece, usage) for piece in pieces]
        if reason is not None or delta.entries or delta.details is not None:
            logprobs = encode_json(self._logprobs_of(delta.entries)) if delta.entries else b"null"
            ended = None if reason is None else reader.finish_reason(reason)
            rest = replace(delta, finish_reason=ended)
            events.append(self._event(index, b'"delta":{}', logprobs, rest))
        return b"".join(events)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        messages = []
        for choice in choices:
            reader = CallReader(self._rules)
            content, calls = read_whole(choice.text, reader)
            choice.finish_reason = reader.finish_reason(choice.finish_reason)
            messages.append(_message(content, calls))
        return self._whole(choices, messages, usage)

    def _piece_event(self, index: int, piece: Piece, usage: Delta) -> bytes:
        if isinstance(piece, str):
            return self._event(index, b'"delta":{"content":' + encode_json(piece) + b"}", b"null", usage)
        call: dict[str, Any] = {"index": piece.index}
        if piece.name is not None:
            call |= {"id": new_call_id(), "type": "function"}
            call["function"] = {"name": piece.name, "arguments": piece.arguments}
        else:
            call["function"] = {"arguments": piece.arguments}
        return self._event(index, b'"delta":{"tool_calls":[' + encode_json(call) + b"]}", b"null", usage)


def _message(content: str, calls: Sequence[WholeCall]) -> dict[str, Any]:
    if not calls:
        # A call that was cut before it began leaves no content either, as in a stream.
        return {"role": "assistant", "content": content or None, "refusal": None}
    listed = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": "".join(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": listed}
