"""Asks the server, before any load, what must be known to load it; measures nothing.

Which model, which version; whether it tells token counts with each event; how many tokens it adds to a
message (a chat template, a first token); and, where no tokenizer is given, which words are one token to it.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_bench.answer import Answer, WholeBody
from headway_bench.config import ServerConfig
from headway_bench.errors import NotReadyError, TargetError
from headway_bench.http_client import Client, ConnectError, DisconnectedError, ProtocolError, Response
from headway_bench.prompts import COMMON_WORDS, CountTokens, Prompt
from headway_bench.record import Record
from headway_bench.sender import PATHS, History, Sender, Target
from headway_bench.workload import Turn

PROBE_TIMEOUT_SECONDS = 60.0
START_REMEDY = "start the server, or name another with --base-url"
BUSY_REMEDY = "see its log for what it waits for, or wait longer with --ready-timeout-seconds"
UNAVAILABLE = 503
_USAGE = {"include_usage": True}
_NOT_READY_FAILURES = ("connect", "disconnected", f"http_{UNAVAILABLE}")
# From the most telling to none at all; the first that the server does not refuse is used.
_STREAM_OPTIONS: tuple[Mapping[str, bool] | None, ...] = (
    {**_USAGE, "continuous_usage_stats": True},
    _USAGE,
    None,
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Who the server is. `model` is what requests name."""

    model: str
    version: str | None
    server_header: str | None


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What the first requests taught. `prompt_tokens` of the probe by the server's count, if it tells."""

    target: Target
    stream_options: Mapping[str, bool] | None
    prompt_tokens: int | None


async def find_server(client: Client, server: ServerConfig) -> ServerFacts:
    """NotReadyError when nothing answers yet, TargetError when no model is named and none listed."""
    version, _ = await _call(client, "/version", None)
    listed, response = await _call(client, "/v1/models", None)
    name = version.get("version") if isinstance(version, dict) else None
    model = server.model
    if model is None:
        try:
            model = str(listed["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            said = response.body.decode("utf-8", "replace")[:200]
            raise TargetError(
                f"{server.base_url} lists no model (GET /v1/models: status {response.status} {said}); "
                "name it with --model, or give --api-key"
            ) from error
    return ServerFacts(model, None if name is None else str(name), response.headers.get("server"))


async def try_requests(client: Client, server: ServerConfig, model: str, prompt: Prompt) -> FirstAnswer:
    """Ask `prompt` for one token; keeps the richest stream options that the server takes."""
    tried = _STREAM_OPTIONS if server.stream else (None,)
    if "stream_options" in server.extra_body:
        tried = (server.extra_body["stream_options"],)
    refusal = ""
    for options in tried:
        target = _target(server, model, options)
        record = Record(0, 0, True, 0.0, None, 1)
        turn = Turn(prompt, None, 1)
        body = target.body(turn, History(server.endpoint))
        answer: Answer = await Sender(client, target).send(body, record, keep_texts=False)
        if not record.failure:
            return FirstAnswer(target, options, answer.prompt_tokens)
        refusal = f"{record.failure}: {record.failure_detail}"
        if record.status not in (400, 422):
            break
    refused = f"{server.base_url}{PATHS[server.endpoint]} does not answer a first request: {refusal}"
    if record.failure in _NOT_READY_FAILURES:
        raise NotReadyError(f"{refused}; {BUSY_REMEDY if record.status else START_REMEDY}")
    raise TargetError(refused)


async def tokenize(client: Client, model: str, text: str) -> list[int] | None:
    """The ids of a text by the server's /tokenize, as vLLM and Headway have it; None where it has none."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer, _ = await _call(client, "/tokenize", body)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
        return tokens
    return None


async def common_token_ids(client: Client, model: str) -> list[int]:
    """Ids that the server gives to common words: certainly in its vocabulary, and none of them special."""
    tokens = await tokenize(client, model, " ".join(COMMON_WORDS))
    if not tokens:
        raise TargetError("the server has no /tokenize to learn token ids from; give --tokenizer")
    return sorted(set(tokens))


def counting_by_server(client: Client, model: str) -> CountTokens:
    """Counts tokens from a thread beside the loop that this is called in."""
    loop = asyncio.get_running_loop()
    known: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in known:
            tokens = asyncio.run_coroutine_threadsafe(tokenize(client, model, text), loop).result()
            if tokens is None:
                raise TargetError(f"/tokenize answered once but not for {text[:80]!r}")
            known[text] = len(tokens)
        return known[text]

    return count


def _target(server: ServerConfig, model: str, stream_options: Mapping[str, bool] | None) -> Target:
    fields: dict[str, Any] = {"model": model, "stream": server.stream}
    if server.temperature is not None:
        fields["temperature"] = server.temperature
    if server.ignore_eos:
        fields["ignore_eos"] = True
    if stream_options is not None:
        fields["stream_options"] = stream_options
    fields.update(server.extra_body)
    return Target(server.endpoint, fields, server.max_tokens_field, server.timeout_seconds)


async def _call(client: Client, path: str, body: Mapping[str, Any] | None) -> tuple[Any, Response]:
    """A short exchange: the JSON of a 200, else None.

    NotReadyError when nothing answers at all or with a 503, TargetError for what is no HTTP.
    """
    whole, response = WholeBody(), Response()
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            if body is None:
                await client.get(path, whole, response)
            else:
                await client.post(path, json.dumps(body).encode(), whole, response)
    except ProtocolError as error:
        raise TargetError(
            f"{client.base_url}{path} answers with what is no HTTP ({error}); name an OpenAI-compatible "
            "server with --base-url"
        ) from error
    except TimeoutError as error:
        raise NotReadyError(
            f"{client.base_url}{path} does not answer within {PROBE_TIMEOUT_SECONDS:g} s; {START_REMEDY}"
        ) from error
    except (ConnectError, DisconnectedError) as error:
        raise NotReadyError(f"{client.base_url}{path} does not answer ({error}); {START_REMEDY}") from error
    if response.status == UNAVAILABLE:
        said = response.body.decode("utf-8", "replace")[:200]
        raise NotReadyError(f"{client.base_url}{path} answers {UNAVAILABLE} ({said}); {BUSY_REMEDY}")
    if response.status != 200:
        return None, response
    try:
        return whole.json(), response
    except ValueError:
        return None, response
