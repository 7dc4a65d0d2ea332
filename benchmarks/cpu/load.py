"""Simultaneous streamed completions against one OpenAI server, timed at the client."""

import asyncio
import json
import time
from typing import Any

import aiohttp
from benchmarks.cpu.workload import Answer

REQUEST_TIMEOUT_SECONDS = 400.0


class LoadError(Exception):
    """A server answered with something that is no completion."""


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> Answer:
    """One greedy completion of exactly max_tokens tokens."""
    body: dict[str, Any] = {
        "model": "benchmark",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_at = time.perf_counter()
    first_at = last_at = 0.0
    num_tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise LoadError(f"{url} answered {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if event.get("choices"):
                first_at = first_at or now
                last_at = now
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    if num_tokens != max_tokens or not first_at:
        raise LoadError(f"{url} gave {num_tokens} tokens, {max_tokens} were asked for")
    return Answer(sent_at, first_at, last_at, num_tokens)


async def _together(url: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:
        return await asyncio.gather(*(complete(session, url, prompt, max_tokens) for prompt in prompts))


def send_together(url: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """All prompts at once; returns when the last has ended. LoadError, aiohttp.ClientError, TimeoutError."""
    return asyncio.run(_together(url, prompts, max_tokens))
