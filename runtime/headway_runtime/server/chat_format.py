"""The JSON of `/v1/chat/completions`, whole and in chunks."""

from collections.abc import Sequence
from typing import Any

from headway_runtime.choice import Delta, DeltaDetails, TokenEntry
from headway_runtime.server.long_answers import encode_list
from headway_runtime.server.responses import (
    LOWEST_LOGPROB,
    AnswerHead,
    Format,
    Usage,
    WholeChoice,
    encode_json,
)

NOTHING = Delta("", [], None)


def usage_alone(delta: Delta) -> Delta:
    """What goes with a chunk that is not the last of its delta: the usage, if every chunk is to have it."""
    if delta.details is None or delta.details.usage is None:
        return NOTHING
    return Delta("", [], None, details=DeltaDetails(usage=delta.details.usage))


def before(delta: Delta) -> Delta:
    """The same for the chunk of the role, which comes before the first token of `delta`."""
    if delta.details is None or delta.details.usage is None:
        return NOTHING
    num_prompt, _, num_cached = delta.details.usage
    return Delta("", [], None, details=DeltaDetails(usage=(num_prompt, 0, num_cached)))


class ChatFormat(Format):
    """/v1/chat/completions."""

    prompt_is_of_the_answer = True

    def __init__(self, head: AnswerHead) -> None:
        super().__init__("chat.completion.chunk", head)

    def chunk(self, index: int, delta: Delta, *, is_first: bool) -> bytes:
        logprobs = encode_json(self._logprobs_of(delta.entries)) if delta.entries else b"null"
        content = b'"delta":{}'
        if delta.text or delta.entries:
            content = b'"delta":{"content":' + encode_json(delta.text) + b"}"
        event = self._event(index, content, logprobs, delta)
        if not is_first:
            return event
        role = b'"delta":{"role":"assistant","content":""}'
        return self._event(index, role, b"null", before(delta)) + event

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        messages = [{"role": "assistant", "content": choice.text, "refusal": None} for choice in choices]
        return self._whole(choices, messages, usage)

    def _whole(
        self, choices: Sequence[WholeChoice], messages: Sequence[dict[str, Any]], usage: Usage
    ) -> bytes:
        listed = [
            {
                "index": index,
                "message": message,
                "logprobs": self._logprobs_of_whole(choice.entries) if self._logprobs else None,
                **self._ending_of(choice),
            }
            for index, (choice, message) in enumerate(zip(choices, messages, strict=True))
        ]
        head = {**self._head, "object": "chat.completion"}
        return encode_json(
            {**head, "choices": listed, "usage": usage.as_json(), **self._prompt_of(choices[0])}
        )

    def _logprobs_of(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _logprobs_of_whole(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": encode_list(map(self._entry, entries)), "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        assert entry.logprobs is not None, "chats do not echo their prompt"
        top = [self._token(token_id, logprob) for token_id, logprob in entry.logprobs.top]
        return {**self._token(entry.token_id, entry.logprobs.chosen), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._spell(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": raw}
