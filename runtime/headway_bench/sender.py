"""Sends one request and fills in its record; decides neither what is asked nor when."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headway_bench.answer import Answer, MalformedAnswerError, UnstreamedAnswer
from headway_bench.http_client import Client, ConnectError, DisconnectedError, ProtocolError, Response
from headway_bench.prompts import Prompt
from headway_bench.record import INTERRUPTED, Record
from headway_bench.workload import Turn

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """How requests to one server are made. `fields` are the same in every body."""

    endpoint: Endpoint
    fields: Mapping[str, Any]
    max_tokens_field: str
    timeout_seconds: float

    def body(self, turn: Turn, history: "History") -> bytes:
        """The request for a turn, with all that was said before it."""
        content = history.with_prompt(turn.prompt)
        name = "messages" if self.endpoint == "chat" else "prompt"
        body = {**self.fields, name: content, self.max_tokens_field: turn.output_tokens}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


class History:
    """What was said so far in one conversation: messages for a chat, one text for a completion."""

    __slots__ = ("_endpoint", "_messages", "_text")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def with_prompt(self, prompt: Prompt) -> Any:
        """What is to be sent to ask `prompt` now."""
        if self._endpoint == "chat":
            return [*self._messages, {"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            return self._text + prompt
        assert not self._text, "the options refuse several turns of token ids"
        return prompt

    def add(self, prompt: Prompt, answer: str) -> None:
        """Keep what was asked and what was answered."""
        if self._endpoint == "chat":
            assert isinstance(prompt, str), "the options refuse token ids in a chat"
            self._messages += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        else:
            self._text += f"{prompt}{answer}\n"


class Sender:
    """One server and the connections to it."""

    def __init__(self, client: Client, target: Target) -> None:
        self.client = client
        self.target = target

    async def send(self, body: bytes, record: Record, *, keep_texts: bool) -> Answer:
        """Send it now and fill in `record`. A cancellation is noted there and goes on."""
        is_streamed = self.target.fields.get("stream", False)
        answer = (Answer if is_streamed else UnstreamedAnswer)(keep_texts=keep_texts)
        response = Response()
        record.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout_seconds):
                await self.client.post(PATHS[self.target.endpoint], body, answer, response)
            answer.end(response.ended_at_seconds)
            _judge(record, answer, response)
        except asyncio.CancelledError:
            record.failure = INTERRUPTED
            raise
        except TimeoutError:
            record.failure = "timeout"
            record.failure_detail = f"over {self.target.timeout_seconds:g} s"
        except ConnectError as error:
            record.failure, record.failure_detail = "connect", str(error)
        except DisconnectedError as error:
            record.failure, record.failure_detail = "disconnected", str(error)
        except (ProtocolError, MalformedAnswerError) as error:
            record.failure, record.failure_detail = "protocol", str(error)
        finally:
            record.ended_at = response.ended_at_seconds or time.perf_counter()
            record.connect_seconds, record.status = response.connect_seconds, response.status
            record.failure_detail = record.failure_detail[:_DETAIL_CHARACTERS]
            record.token_times, record.token_counts = answer.token_times, answer.token_counts
            record.count_source = answer.count_source
            record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
            record.completion_tokens = answer.completion_tokens
            record.finish_reason = answer.finish_reason
        return answer


def _judge(record: Record, answer: Answer, response: Response) -> None:
    """What an exchange that HTTP calls whole was worth."""
    if response.status != 200:
        record.failure = f"http_{response.status}"
        record.failure_detail = response.body.decode("utf-8", "replace")
    elif answer.error is not None:
        record.failure, record.failure_detail = "stream_error", answer.error
    elif not answer.is_done and answer.finish_reason is None:
        record.failure = "truncated"
        record.failure_detail = "the stream ended without [DONE] and without a finish reason"
