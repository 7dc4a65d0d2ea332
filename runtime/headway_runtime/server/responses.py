"""The JSON of answers, whole and in chunks, for the completion endpoints.

Chunks are the hot path: each is put together from bytes made once per stream and the few parts that change,
so that a token costs one string encoding and no model of anything.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from headway_runtime.choice import Delta, DeltaDetails, TokenEntry
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.long_answers import encode_list
from headway_runtime.tokenizer import Vocabulary

# JSON has no infinity; this is what others write for a token that cannot come.
LOWEST_LOGPROB = -9999.0

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one whole HTTP request. timings: milliseconds by name, for who asked for them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        timings = {} if self.timings is None else {"headway": self.timings}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **timings,
        }


@dataclass(slots=True)
class WholeChoice:
    """A finished choice of an answer that is not streamed. What was not asked for is None.

    prompt_entries: the prompt's tokens with their log-probabilities.
    """

    text: str
    entries: list[TokenEntry]
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_entries: Sequence[TokenEntry] | None = None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer share. kind: its `object`.

    with_usage: a chunk of usage follows the last one. logprobs: the tokens' are sent.
    tokens_as_ids: in log-probabilities a token is written token_id:42, not as its text.
    """

    answer_id: str
    model: str
    vocabulary: Vocabulary
    with_usage: bool = False
    logprobs: bool = False
    tokens_as_ids: bool = False


class AnswerFormat(Protocol):
    """What differs between the endpoints. stream_end: what follows the last chunk of a stream."""

    stream_end: ClassVar[bytes]

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        """Server-sent events: one, none if the format holds the text back, more if it has some of its own.

        The last delta of a choice always makes one.
        """
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def error_event(self, error: HttpError) -> bytes:
        """The last event of a stream that fails."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


class Format:
    """What both completion endpoints share.

    prompt_is_of_the_answer: whether the prompt's token ids stand beside the choices, or in each.
    """

    prompt_is_of_the_answer: ClassVar[bool]
    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, kind: str, head: AnswerHead) -> None:
        self._head = {
            "id": head.answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": head.model,
        }
        # {"id":...,"model":"..."  and from there on by hand
        self._prefix = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.with_usage else b"]}\n\n"
        self._vocabulary = head.vocabulary
        self._logprobs = head.logprobs
        self._tokens_as_ids = head.tokens_as_ids

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + encode_json(usage.as_json()) + b"}\n\n"

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _event(self, index: int, content: bytes, logprobs: bytes, delta: Delta) -> bytes:
        """One event. Of `delta`, everything but its text and its log-probabilities goes in here."""
        if delta.finish_reason is None and delta.details is None:
            return b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":null,"stop_reason":null}%s' % (
                self._prefix,
                index,
                content,
                logprobs,
                self._suffix,
            )
        members, suffix = b"", self._suffix
        if delta.details is not None:
            members, suffix = self._detailed(delta.details)
        return b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s%s}%s' % (
            self._prefix,
            index,
            content,
            logprobs,
            encode_json(delta.finish_reason),
            encode_json(delta.stop_reason),
            members,
            suffix,
        )

    def _detailed(self, details: DeltaDetails) -> tuple[bytes, bytes]:
        """What a chunk's choice carries besides, and what follows the choice."""
        members, suffix = b"", self._suffix
        if details.token_ids is not None:
            members += b',"token_ids":' + encode_json(details.token_ids)
        if details.usage is not None:
            suffix = b'],"usage":' + encode_json(Usage(*details.usage).as_json()) + b"}\n\n"
        if details.prompt_token_ids is not None:
            prompt = b',"prompt_token_ids":' + encode_json(details.prompt_token_ids)
            if self.prompt_is_of_the_answer:
                suffix = suffix.replace(b"]", b"]" + prompt, 1)
            else:
                members += prompt
        return members, suffix

    def _ending_of(self, choice: WholeChoice) -> dict[str, Any]:
        """The members of a whole choice that follow what is the endpoint's own."""
        found: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if choice.token_ids is not None:
            found["token_ids"] = choice.token_ids
        return found if self.prompt_is_of_the_answer else found | self._prompt_of(choice)

    def _prompt_of(self, choice: WholeChoice) -> dict[str, Any]:
        """What was asked for of the prompt."""
        found: dict[str, Any] = {}
        if choice.prompt_token_ids is not None:
            found["prompt_token_ids"] = choice.prompt_token_ids
        if choice.prompt_entries is not None:
            found["prompt_logprobs"] = encode_list(map(self._prompt_entry, choice.prompt_entries))
        return found

    def _prompt_entry(self, entry: TokenEntry) -> dict[str, Any] | None:
        """One position of a prompt: its own token and the best ones, by token id."""
        logprobs = entry.logprobs
        if logprobs is None:
            return None
        # Its own token first, as vLLM has it.
        ranks = {entry.token_id: logprobs.rank}
        ranks |= {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, 1)}
        listed = {entry.token_id: logprobs.chosen, **dict(logprobs.top)}
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": self._spell(token_id)[0],
            }
            for token_id, logprob in listed.items()
        }

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        raw = self._vocabulary.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._tokens_as_ids else raw.decode("utf-8", "replace")
        return text, list(raw)


class CompletionFormat(Format):
    """/v1/completions."""

    prompt_is_of_the_answer = False

    def __init__(self, head: AnswerHead) -> None:
        super().__init__("text_completion", head)

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        logprobs = encode_json(self._logprobs_of(delta.entries)) if delta.entries else b"null"
        return self._event(index, b'"text":' + encode_json(delta.text), logprobs, delta)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        listed = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": self._logprobs_of(choice.entries) if self._logprobs else None,
                **self._ending_of(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return encode_json({**self._head, "choices": listed, "usage": usage.as_json()})

    def _logprobs_of(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {
            "tokens": [self._spell(entry.token_id)[0] for entry in entries],
            "token_logprobs": [
                None if entry.logprobs is None else max(entry.logprobs.chosen, LOWEST_LOGPROB)
                for entry in entries
            ],
            "top_logprobs": encode_list(map(self._top, entries)),
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float] | None:
        """The best tokens by their text, and always the token's own."""
        if entry.logprobs is None:
            return None
        listed = [*entry.logprobs.top, (entry.token_id, entry.logprobs.chosen)]
        found: dict[str, float] = {}
        for token_id, logprob in listed:
            # Of several tokens with one text, the best.
            found.setdefault(self._spell(token_id)[0], max(logprob, LOWEST_LOGPROB))
        return found
