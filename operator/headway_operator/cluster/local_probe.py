"""Asks a child process over HTTP whether it is ready or alive, as a kubelet does."""

import json

import aiohttp

MAX_REASON_BYTES = 4096


async def probe(session: aiohttp.ClientSession, url: str, timeout_seconds: float) -> str | None:
    """None when `url` answers 2xx or 3xx in time, else why not, in the server's own words if any."""
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            if 200 <= response.status < 400:
                return None
            body = await response.content.read(MAX_REASON_BYTES)
            return f"answered {response.status}: {_words(body)}".rstrip(": ")
    except TimeoutError:
        return f"no answer within {timeout_seconds:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return str(error) or type(error).__name__


def _words(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    if isinstance(parsed, dict):
        detail = parsed.get("reason") or parsed.get("error") or parsed
        if isinstance(detail, dict):
            detail = detail.get("message", detail)
        return str(detail)
    return text
