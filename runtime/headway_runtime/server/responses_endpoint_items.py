"""The output items of one response, and the events that tell of them as they grow.

An answer's text becomes messages and its calls become function calls, in the order in which the model wrote
them; one item is open at a time. Makes plain dictionaries, as they go into JSON.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from headway_runtime.server.chat_tools_format import new_call_id
from headway_runtime.server.tool_calls.pieces import CallPiece, Piece

Event = dict[str, Any]


class OutputItems:
    """The state of one response's output. items: the finished ones."""

    __slots__ = ("_item", "_logprobs", "_parts", "items")

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, pieces: Sequence[Piece], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Take in what the answer goes on with; the log-probabilities go with its text."""
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                events += self._add_to_call(piece)
            else:
                events += self._add_to_message(piece, logprobs)
                logprobs = []
        return events

    def finish(self, status: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """The answer has ended; one without anything in it is an empty message.

        logprobs: of tokens at the end that have no text, such as the one that ends an answer.
        """
        events: list[Event] = []
        if self._item is None and not self.items:
            events += self._open_message()
        self._logprobs += logprobs
        return events + self._close(status)

    def _add_to_message(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if self._item is None or self._item["type"] != "message":
            events += self._close("completed") + self._open_message()
        self._parts.append(text)
        self._logprobs += logprobs
        return [*events, self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _add_to_call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            item_id = f"fc_{uuid.uuid4().hex}"
            events += self._close("completed")
            events += self._open(
                {
                    "type": "function_call",
                    "id": item_id,
                    "call_id": new_call_id(),
                    "name": piece.name,
                    "arguments": "",
                }
            )
        if piece.arguments:
            self._parts.append(piece.arguments)
            events.append(self._event("response.function_call_arguments.delta", delta=piece.arguments))
        return events

    def _open_message(self) -> list[Event]:
        item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        return [*self._open(item), self._part_event("response.content_part.added", part=_part("", []))]

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self._item, self._parts, self._logprobs = {**item, "status": "in_progress"}, [], []
        return [
            {"type": "response.output_item.added", "output_index": len(self.items), "item": dict(self._item)}
        ]

    def _close(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        text = "".join(self._parts)
        if item["type"] == "message":
            part = _part(text, self._logprobs)
            events = [
                self._part_event("response.output_text.done", text=text, logprobs=self._logprobs),
                self._part_event("response.content_part.done", part=part),
            ]
            item["content"] = [part]
        else:
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        item["status"] = status
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._item = None
        return events

    def _event(self, kind: str, **members: Any) -> Event:
        assert self._item is not None
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.items), **members}

    def _part_event(self, kind: str, **members: Any) -> Event:
        return self._event(kind, content_index=0, **members)


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
