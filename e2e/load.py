"""A closed-loop load for demonstrations and end-to-end tests: N users who each wait for their answer.

It measures what a client sees (time to first token, failures) and nothing else; it is light enough to
share two cores with what it measures, and no benchmark: that is `headway bench`'s work.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

# A request is sent again after the first, and after twice as long each time: the openai client's pauses.
AGAIN_SECONDS = 0.5
LONGEST_AGAIN_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. Times are `time.monotonic()` seconds; `error` is "" on success."""

    sent_at: float
    ttft_seconds: float | None
    finished_at: float
    num_chunks: int
    error: str


@dataclass(slots=True)
class Load:
    """A running load: `outcomes` grows as requests end; `stop()` lets every request in hand finish.

    ignore_eos: whether every answer has `max_tokens` tokens. attempts: how often a request is sent whose
    connection fails before any byte of an answer; the openai client sends it `max_retries` + 1 times.
    pause_seconds: of each user after each answer.
    """

    base_url: str
    model: str
    prompts: Sequence[str]
    max_tokens: int
    ignore_eos: bool = False
    timeout_seconds: float = 120.0
    attempts: int = 1
    pause_seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    _users: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False
    _session: aiohttp.ClientSession | None = None

    async def start(self, users: int) -> None:
        """Add `users` users, spread over half a second so that they do not march in step."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.timeout_seconds),
            )
        for number in range(users):
            self._users.append(asyncio.create_task(self._user(number, 0.5 * number / users)))

    async def stop(self) -> None:
        """Send nothing more, wait for the answers that are due, close the connections."""
        self._stopping = True
        await asyncio.gather(*self._users)
        await self.abandon()

    async def abandon(self) -> None:
        """Wait for nobody: what is under way is given up, the connections are closed."""
        for user in self._users:
            user.cancel()
        await asyncio.gather(*self._users, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _user(self, number: int, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        for turn in itertools.count(number):
            if self._stopping:
                return
            await self.request(self.prompts[turn % len(self.prompts)])
            await asyncio.sleep(self.pause_seconds)

    async def request(self, prompt: str) -> Outcome:
        """Send one streamed chat request, record and return how it went."""
        assert self._session is not None, "start() first"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": 0,
            "stream": True,
        }
        self.sent += 1
        sent_at = time.monotonic()
        for attempt in range(1, self.attempts + 1):
            answer = _Answer()
            try:
                async with self._session.post(f"{self.base_url}/chat/completions", json=body) as response:
                    await answer.read(response)
            except (aiohttp.ClientError, TimeoutError) as failure:
                answer.error = f"{type(failure).__name__}: {failure}"
                if not answer.has_begun and attempt < self.attempts:
                    await asyncio.sleep(min(AGAIN_SECONDS * 2 ** (attempt - 1), LONGEST_AGAIN_SECONDS))
                    continue
            break
        ttft = None if answer.first_at is None else answer.first_at - sent_at
        outcome = Outcome(sent_at, ttft, time.monotonic(), answer.num_chunks, answer.error)
        self.outcomes.append(outcome)
        return outcome

    @property
    def failures(self) -> list[Outcome]:
        """The requests that did not end as they should."""
        return [outcome for outcome in self.outcomes if outcome.error]


@dataclass(slots=True)
class _Answer:
    """What has come of one."""

    error: str = "the stream ended without [DONE]"
    num_chunks: int = 0
    first_at: float | None = None
    has_begun: bool = False

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """To its end. Raises aiohttp's errors where it breaks off."""
        self.has_begun = True
        if response.status != 200:
            self.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                self.error = ""
                return
            if line.startswith(b'data: {"error"'):
                self.error = json.loads(line[6:])["error"]["message"]
                return
            self.num_chunks += 1
            self.first_at = self.first_at or time.monotonic()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of `values` do not exceed; values must not be empty."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def ttft_milliseconds(
    outcomes: Sequence[Outcome], since: float, until: float, percent: float = 95
) -> float | None:
    """The TTFT percentile in ms of requests *sent* in [since, until); None when none got a token."""
    seen = [o.ttft_seconds for o in outcomes if since <= o.sent_at < until and o.ttft_seconds is not None]
    return 1000 * percentile(seen, percent) if seen else None
