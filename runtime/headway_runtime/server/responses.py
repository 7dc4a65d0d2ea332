"""The JSON of answers, whole and in chunks, for both completion endpoints.

Chunks are the hot path: each is put together from bytes made once per stream and the few parts that change,
so that a token costs one string encoding and no model of anything.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway_runtime.request import TokenLogprobs
from headway_runtime.server.choice import Delta, TokenEntry
from headway_runtime.tokenizer import Vocabulary

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; this is what others write for a token that cannot come.
LOWEST_LOGPROB = -9999.0

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one whole HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class WholeChoice:
    """A finished choice of an answer that is not streamed."""

    text: str
    entries: list[TokenEntry]
    finish_reason: str


class AnswerFormat(Protocol):
    """What differs between the two endpoints."""

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        """One server-sent event (two, if the format begins with one of its own)."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


class _Format:
    def __init__(
        self,
        kind: str,
        answer_id: str,
        model: str,
        vocabulary: Vocabulary,
        *,
        with_usage: bool,
        logprobs: bool,
    ) -> None:
        self._head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        # {"id":...,"model":"..."  and from there on by hand
        self._prefix = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._vocabulary = vocabulary
        self._logprobs = logprobs

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + encode_json(usage.as_json()) + b"}\n\n"

    def _event(self, index: int, content: bytes, logprobs: bytes, finish_reason: str | None) -> bytes:
        reason = b"null" if finish_reason is None else b'"%s"' % finish_reason.encode()
        return b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._prefix,
            index,
            content,
            logprobs,
            reason,
            self._suffix,
        )

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        raw = self._vocabulary.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), list(raw)


class ChatFormat(_Format):
    """/v1/chat/completions."""

    def __init__(
        self, answer_id: str, model: str, vocabulary: Vocabulary, *, with_usage: bool, logprobs: bool
    ) -> None:
        super().__init__(
            "chat.completion.chunk", answer_id, model, vocabulary, with_usage=with_usage, logprobs=logprobs
        )

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        logprobs = encode_json(self._logprobs_of(delta.entries)) if delta.entries else b"null"
        content = b'"delta":{}'
        if delta.text or delta.entries:
            content = b'"delta":{"content":' + encode_json(delta.text) + b"}"
        event = self._event(index, content, logprobs, delta.finish_reason)
        if not is_first:
            return event
        return self._event(index, b'"delta":{"role":"assistant","content":""}', b"null", None) + event

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs_of(choice.entries) if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        head = {**self._head, "object": "chat.completion"}
        return encode_json({**head, "choices": listed, "usage": usage.as_json()})

    def _logprobs_of(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.logprobs.top]
        return {**self._token(entry.token_id, entry.logprobs.chosen), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._spell(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": raw}


class CompletionFormat(_Format):
    """/v1/completions."""

    def __init__(
        self, answer_id: str, model: str, vocabulary: Vocabulary, *, with_usage: bool, logprobs: bool
    ) -> None:
        super().__init__(
            "text_completion", answer_id, model, vocabulary, with_usage=with_usage, logprobs=logprobs
        )

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        logprobs = encode_json(self._logprobs_of(delta.entries)) if delta.entries else b"null"
        return self._event(index, b'"text":' + encode_json(delta.text), logprobs, delta.finish_reason)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        listed = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": self._logprobs_of(choice.entries) if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return encode_json({**self._head, "choices": listed, "usage": usage.as_json()})

    def _logprobs_of(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {
            "tokens": [self._spell(entry.token_id)[0] for entry in entries],
            "token_logprobs": [max(entry.logprobs.chosen, LOWEST_LOGPROB) for entry in entries],
            "top_logprobs": [self._top(entry.logprobs) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        return {self._spell(token_id)[0]: max(logprob, LOWEST_LOGPROB) for token_id, logprob in logprobs.top}
