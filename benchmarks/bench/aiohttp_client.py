"""The same open loop with aiohttp's client, to compare its cost with that of `headway bench`'s own.

    python -m benchmarks.bench.aiohttp_client PORT RATE SECONDS TOKENS

Prints one JSON object. It does less than the benchmark does: it makes no prompts, keeps no times but the
first, and parses an event only to see that it has content.
"""

import asyncio
import json
import resource
import sys
import time

import aiohttp
import numpy
import uvloop


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, errors: list[float]) -> None:
    sent_at, first_at = time.perf_counter(), 0.0
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        async for line in response.content:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"]["content"]:
                first_at = first_at or now
            elif "usage" in event:
                took = event["usage"]["prompt_tokens_details"]["cached_tokens"] / 1e6
                errors.append(first_at - sent_at - took)


async def main(port: int, rate: float, seconds: float, tokens: int) -> None:
    """Send, and print what it cost."""
    words = " ".join(["word"] * 128)
    message = {"role": "user", "content": words}
    body = json.dumps(
        {"model": "clock", "stream": True, "max_tokens": tokens, "messages": [message]}
    ).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    gaps = numpy.random.default_rng(0).exponential(1 / rate, size=int(rate * seconds))
    errors: list[float] = []
    lags: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for at_seconds in numpy.cumsum(gaps):
                due_at = began + float(at_seconds)
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                lags.append(time.perf_counter() - due_at)
                tasks.create_task(_ask(session, url, body, errors))
        wall_seconds = time.perf_counter() - began
        now_used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_seconds = now_used.ru_utime + now_used.ru_stime - used.ru_utime - used.ru_stime
    report = {
        "requests": len(errors),
        "wall_seconds": wall_seconds,
        "due_per_second": (len(lags) - 1) / float(gaps[1:].sum()),
        "sent_per_second": (len(lags) - 1) / float(gaps[1:].sum() + lags[-1] - lags[0]),
        "cpu_seconds": cpu_seconds,
        "lags_milliseconds": [1000 * lag for lag in lags],
        "errors_milliseconds": [1000 * error for error in errors],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
