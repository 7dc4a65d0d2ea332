"""Reads one answer: which tokens came when. Knows the bodies of OpenAI's two endpoints, not HTTP.

A piece that carries no content (the role, the finish reason, the usage) is no token: the first token's time
is that of the first event with text, token ids, reasoning or a tool call. How many tokens an event brought is
told, best first, by its `token_ids`, by its own `usage` (vLLM's `continuous_usage_stats`), or else taken to
be one.
"""

import json
from array import array
from typing import Any, Literal

CountSource = Literal["token_ids", "usage", "events"]
_MAX_EVENT_BYTES = 16 * 1024 * 1024


class MalformedAnswerError(Exception):
    """The stream is not what the endpoint's documentation promises."""


class Answer:
    """What has arrived so far.

    `token_times`, `token_counts` and, if kept, `texts` have one entry for each event with content; `contents`
    are the texts without reasoning, `num_counted` is the sum of the counts.
    """

    __slots__ = (
        "_buffer",
        "_data",
        "cached_tokens",
        "completion_tokens",
        "contents",
        "count_source",
        "error",
        "finish_reason",
        "is_done",
        "num_counted",
        "prompt_tokens",
        "texts",
        "token_counts",
        "token_times",
    )

    def __init__(self, *, keep_texts: bool) -> None:
        self.token_times = array("d")
        self.token_counts = array("L")
        self.num_counted = 0
        self.texts: list[str] | None = [] if keep_texts else None
        self.contents: list[str] = []
        self.count_source: CountSource = "events"
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes, at_seconds: float) -> None:
        """A piece of the body; events may begin and end anywhere in it."""
        lines = (self._buffer + data).split(b"\n") if self._buffer else data.split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise MalformedAnswerError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                payload = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data.clear()
                self._take_event(payload, at_seconds)

    def end(self, at_seconds: float) -> None:
        """The body has ended."""

    def _take_event(self, payload: bytes, at_seconds: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            event: dict[str, Any] = json.loads(payload)
            if event.get("error"):
                error = event["error"]
                self.error = str(error.get("message", error) if isinstance(error, dict) else error)
                return
            usage = event.get("usage")
            choices = event.get("choices")
            if choices:
                self._take_choice(choices[0], usage, at_seconds)
            if usage:
                self._take_usage(usage)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise MalformedAnswerError(f"{payload[:200]!r}: {type(error).__name__}: {error}") from error

    def _take_choice(self, choice: dict[str, Any], usage: dict[str, Any] | None, at_seconds: float) -> None:
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
        delta, token_ids = choice.get("delta"), choice.get("token_ids")
        if delta is None:
            delta = choice.get("message")
        content = (choice.get("text") if delta is None else delta.get("content")) or ""
        text = content
        if delta is not None:
            text += delta.get("reasoning_content") or delta.get("reasoning") or ""
        if not (text or token_ids or (delta is not None and delta.get("tool_calls"))):
            return
        count = 1
        if token_ids:
            count, self.count_source = len(token_ids), "token_ids"
        elif usage:
            count, self.count_source = max(1, usage["completion_tokens"] - self.num_counted), "usage"
        self.num_counted += count
        self.token_times.append(at_seconds)
        self.token_counts.append(count)
        if self.texts is not None:
            self.texts.append(text)
            self.contents.append(content)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = int(usage["prompt_tokens"])
        self.completion_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            self.cached_tokens = int(details["cached_tokens"])


class UnstreamedAnswer(Answer):
    """An answer that comes in one piece: all its tokens at the end of its body."""

    __slots__ = ()

    def feed(self, data: bytes, at_seconds: float) -> None:
        """Keep it: a body has no meaning before its end."""
        del at_seconds
        self._data.append(data)

    def end(self, at_seconds: float) -> None:
        """Read it."""
        if self._data:
            self._take_event(b"".join(self._data), at_seconds)
            self.is_done = True
            self._data.clear()


class WholeBody:
    """A receiver for short answers that are read at their end."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, data: bytes, at_seconds: float) -> None:
        """Keep it."""
        del at_seconds
        self._pieces += data

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self._pieces)
