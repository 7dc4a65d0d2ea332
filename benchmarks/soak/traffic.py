"""What the users of a soak do, drawn from a seed: requests of many kinds, bad ones, and ones left half-way.

A user knows what each request must come to and says so when it does not: `Fault`s are collected, not
raised, so that one of them does not end the traffic. Knows nothing of processes or of the engine's counters.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_TIMEOUT_SECONDS = 120.0
PASSAGES = ("The harbour opens at dawn. ", "Every ship carries grain and salt. ", "Nobody counts the gulls. ")
# Bodies that no server may accept, and the path they are sent to.
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b""),
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", b'{"prompt": 7}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": "a", "temperature": "hot"}'),
    ("/v1/completions", b'{"prompt": [99999999]}'),
    ("/v1/completions", b'{"prompt": "a", "colour": "blue"}'),
    ("/v1/completions", b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "nobody", "content": "a"}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "model": "other"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "n": 100000}'),
)


@dataclass(slots=True)
class Seen:
    """What happened so far. done: requests by kind. texts: each greedy prompt's answer, seen first."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    num_refused_for_load: int = 0

    def fault(self, kind: str, message: str) -> None:
        self.faults.append(f"{kind}: {message}")


class User:
    """One client. It sends one request after the other until it is told to stop."""

    def __init__(self, url: str, headers: dict[str, str], seed: str, seen: Seen, max_model_len: int) -> None:
        self._url = url
        self._headers = headers
        self._random = random.Random(seed)
        self._seen = seen
        self._max_model_len = max_model_len
        self._kinds: dict[str, tuple[int, Callable[[aiohttp.ClientSession], Awaitable[None]]]] = {
            "streamed": (30, self._streamed),
            "whole": (20, self._whole),
            "greedy": (15, self._greedy),
            "long": (6, self._long),
            "left half-way": (12, self._left_half_way),
            "left at once": (6, self._left_at_once),
            "bad": (8, self._bad),
            "too long": (3, self._too_long),
            "cut off": (3, self._cut_off),
            "status": (3, self._status),
        }

    async def run(self, until: asyncio.Event) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(self._url, headers=self._headers, timeout=timeout) as session:
            while not until.is_set():
                names = tuple(self._kinds)
                (kind,) = self._random.choices(names, [weight for weight, _ in self._kinds.values()])
                try:
                    await self._kinds[kind][1](session)
                except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError) as error:
                    self._seen.fault(kind, f"{type(error).__name__}: {error}")
                except TimeoutError:
                    self._seen.fault(kind, f"no end within {REQUEST_TIMEOUT_SECONDS:g} s")
                self._seen.done[kind] += 1
                if self._random.random() < 0.1:
                    await asyncio.sleep(self._random.uniform(0, 0.3))

    # --- what is sent ---

    def _prompt(self) -> str:
        """Some share long beginnings, so that cached blocks are hit and evicted."""
        rng = self._random
        shared = rng.choice(PASSAGES) * rng.choice((0, 0, 1, 4, 12, 30))
        return f"{shared}Question {rng.randrange(50)}: what is {rng.randrange(99)} + {rng.randrange(99)}?"

    def _body(self) -> tuple[str, dict[str, Any]]:
        rng = self._random
        body: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 8, 20, 60))}
        options: list[tuple[float, dict[str, Any]]] = [
            (0.5, {"temperature": rng.choice((0, 0.7, 1.5))}),
            (0.3, {"top_p": rng.uniform(0.1, 1)}),
            (0.3, {"top_k": rng.randrange(1, 50)}),
            (0.2, {"min_p": rng.uniform(0, 0.3)}),
            (0.2, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
            (0.2, {"repetition_penalty": rng.uniform(0.5, 2)}),
            (0.2, {"logit_bias": {str(rng.randrange(1000)): rng.uniform(-100, 100)}}),
            (0.3, {"seed": rng.randrange(10)}),
            (0.2, {"n": rng.randrange(1, 4)}),
            (0.2, {"stop": rng.choice(("a", [".", "the"], "\n"))}),
            (0.2, {"ignore_eos": True}),
            (0.1, {"min_tokens": 1}),
            (0.1, {"priority": rng.randrange(-2, 3)}),
            (0.1, {"cache_salt": rng.choice("ab")}),
            (0.1, {"user": "soak"}),
        ]
        for chance, fields in options:
            if rng.random() < chance:
                body |= fields
        if rng.random() < 0.5:
            if rng.random() < 0.2:
                body |= {"logprobs": True, "top_logprobs": 2}
            body |= rng.choice(_FORMATS) if rng.random() < 0.15 else {}
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": self._prompt()}]}
        if rng.random() < 0.2:
            body |= {"logprobs": 2}
        if rng.random() < 0.1:
            body |= {"echo": True}
        return "/v1/completions", {**body, "prompt": self._prompt()}

    # --- the kinds of requests ---

    async def _streamed(self, session: aiohttp.ClientSession) -> None:
        path, body = self._body()
        await self._read_stream(session, path, body)

    async def _read_stream(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], leave_after: int | None = None
    ) -> None:
        ends: Counter[int] = Counter()
        is_done = False
        async with session.post(path, json={**body, "stream": True}) as response:
            if response.status != 200:
                await self._refused("streamed", response)
                return
            num_events = 0
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if is_done:
                    self._seen.fault("streamed", f"{line!r} after [DONE]")
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._seen.fault("streamed", f"{event['error']}")
                    return
                for choice in event["choices"]:
                    if ends[choice["index"]]:
                        self._seen.fault("streamed", f"choice {choice['index']} goes on after its end")
                    ends[choice["index"]] += choice["finish_reason"] is not None
                num_events += 1
                if leave_after is not None and num_events >= leave_after:
                    return
        if not is_done or ends != Counter(dict.fromkeys(range(body.get("n", 1)), 1)):
            self._seen.fault("streamed", f"ended with done={is_done}, ends={dict(ends)} for {body}")

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        path, body = self._body()
        async with session.post(path, json=body) as response:
            if response.status != 200:
                await self._refused("whole", response)
                return
            answer = await response.json()
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != body.get("n", 1) or not set(reasons) <= {"stop", "length", "tool_calls"}:
            self._seen.fault("whole", f"finish reasons {reasons} for {body}")

    async def _greedy(self, session: aiohttp.ClientSession) -> None:
        """The same prompt gives the same text whatever else runs: shared or overwritten KV would show."""
        index = self._random.randrange(24)
        prompt = f"{PASSAGES[index % 3] * (index % 8 * 3)}Say {index} + {index + 7}."
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                await self._refused("greedy", response)
                return
            text = (await response.json())["choices"][0]["text"]
        if self._seen.texts.setdefault(prompt, text) != text:
            self._seen.fault("greedy", f"{text!r} where {self._seen.texts[prompt]!r} was answered before")

    async def _long(self, session: aiohttp.ClientSession) -> None:
        """Answers that grow side by side until there is no room for all of them."""
        body = {"prompt": self._prompt(), "n": 3, "max_tokens": 120, "ignore_eos": True}
        await self._read_stream(session, "/v1/completions", body)

    async def _left_half_way(self, session: aiohttp.ClientSession) -> None:
        path, body = self._body()
        body = {**body, "max_tokens": 200, "ignore_eos": True}
        body.pop("stop", None)
        await self._read_stream(session, path, body, leave_after=self._random.randrange(1, 30))

    async def _left_at_once(self, session: aiohttp.ClientSession) -> None:
        path, body = self._body()
        task = asyncio.ensure_future(self._read_stream(session, path, {**body, "max_tokens": 100}))
        await asyncio.sleep(self._random.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _bad(self, session: aiohttp.ClientSession) -> None:
        path, body = self._random.choice(BAD_BODIES)
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            await self._must_be_refused("bad", response, body[:80])

    async def _too_long(self, session: aiohttp.ClientSession) -> None:
        body = {"prompt": [50] * (self._max_model_len + self._random.randrange(3)), "max_tokens": 4}
        async with session.post("/v1/completions", json=body) as response:
            await self._must_be_refused("too long", response, "a prompt beyond the context")

    async def _cut_off(self, session: aiohttp.ClientSession) -> None:
        """Half a request, or none at all, on a connection of its own; then gone."""
        host, _, port = self._url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: 100\r\n"
        writer.write(
            self._random.choice((b"", b"\x16\x03\x01 nonsense\r\n\r\n", head, head + b'\r\n{"prompt": "a'))
        )
        await writer.drain()
        await asyncio.sleep(self._random.uniform(0, 0.1))
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        del reader

    async def _status(self, session: aiohttp.ClientSession) -> None:
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/version"):
            async with session.get(path) as response:
                if response.status != 200:
                    self._seen.fault("status", f"{path} answers {response.status}")
                await response.read()

    # --- what refusals may be ---

    async def _refused(self, kind: str, response: aiohttp.ClientResponse) -> None:
        """A good request may be refused for load alone, and is told when to come back."""
        text = await response.text()
        if response.status == 503 and "Retry-After" in response.headers and "queue_full" in text:
            self._seen.num_refused_for_load += 1
            await asyncio.sleep(0.05)
        else:
            self._seen.fault(kind, f"{response.status} {text[:300]}")

    async def _must_be_refused(self, kind: str, response: aiohttp.ClientResponse, what: object) -> None:
        text = await response.text()
        if not 400 <= response.status < 500:
            self._seen.fault(kind, f"{what!r} is answered {response.status} {text[:200]}")
        elif "message" not in json.loads(text)["error"]:
            self._seen.fault(kind, f"{what!r} is refused without a message: {text[:200]}")


_FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]},
            },
        }
    },
    {"structured_outputs": {"regex": "[0-9]{1,3}( apples)?"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
)
