"""Stands between an operator and the real API server, lets everything through, and misbehaves when told to.

Away: connections are cut and none is answered. Frozen: watches stay open and bring nothing. Told answers:
whatever `answer` returns for a request is sent instead of asking the API server. All that is let through is
noted.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

# Belong to one connection, not to what is passed on.
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "trailer", "upgrade")
)
MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Passed:
    """One request that reached the API server. at, ended_at: monotonic seconds; status: of its answer."""

    at: float
    ended_at: float
    method: str
    path: str
    status: int

    @property
    def is_write(self) -> bool:
        return self.method != "GET"

    @property
    def is_lease(self) -> bool:
        return "/leases" in self.path


Answer = Callable[[web.Request], web.Response | None]


class FaultProxy:
    """A proxy for one kubeconfig's server. Use it as `async with`."""

    def __init__(self, kubeconfig: Path) -> None:
        self.passed: list[Passed] = []
        self.is_away = False
        self.is_frozen = False
        self.answer: Answer = lambda request: None
        self.watch_events: asyncio.Queue[bytes] = asyncio.Queue()
        self._original = kubeconfig
        self._document: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
        self._upstream: str = self._document["clusters"][0]["cluster"]["server"]
        self._open: set[asyncio.Transport] = set()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.kubeconfig = kubeconfig

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self._document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig = self._original.with_name(f"kubeconfig-{port}")
        self.kubeconfig.write_text(yaml.safe_dump(self._document))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.go_away()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def go_away(self) -> None:
        """Cut every connection and answer none until `come_back`."""
        self.is_away = True
        for transport in list(self._open):
            transport.abort()

    def come_back(self) -> None:
        """Let everything through again."""
        self.is_away = False

    def writes(self) -> list[Passed]:
        """Everything that was written, but for the Lease."""
        return [one for one in self.passed if one.is_write and not one.is_lease]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert isinstance(transport, asyncio.Transport), "a request has a connection"
        if self.is_away:
            transport.abort()
            return web.Response(status=503)
        if (told := self.answer(request)) is not None:
            return told
        self._open.add(transport)
        try:
            return await self._pass_on(request)
        except (aiohttp.ClientError, ConnectionError):
            transport.abort()
            return web.Response(status=502)
        finally:
            self._open.discard(transport)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None, "the proxy runs inside its `async with` block"
        began = time.monotonic()
        async with self._session.request(
            request.method,
            f"{self._upstream}{request.raw_path}",
            headers=_passed_on(request.headers),
            data=await request.read() or None,
            ssl=False,
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            if "watch=true" not in request.query_string:
                body = await answer.read()
                self._note(request, began, answer.status)
                await response.prepare(request)
                await response.write(body)
                return response
            await response.prepare(request)
            await self._stream(answer, response)
            return response

    async def _stream(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        """Pass a watch on, line by line, with what the test wants in it."""
        reading = asyncio.ensure_future(answer.content.readline())
        injecting = asyncio.ensure_future(self.watch_events.get())
        try:
            while True:
                done, _ = await asyncio.wait({reading, injecting}, return_when=asyncio.FIRST_COMPLETED)
                if injecting in done:
                    await response.write(injecting.result())
                    injecting = asyncio.ensure_future(self.watch_events.get())
                if reading in done:
                    if not (line := reading.result()):
                        return
                    if not self.is_frozen:
                        await response.write(line)
                    reading = asyncio.ensure_future(answer.content.readline())
        finally:
            reading.cancel()
            injecting.cancel()
            await asyncio.gather(reading, injecting, return_exceptions=True)

    def _note(self, request: web.Request, began: float, status: int) -> None:
        self.passed.append(Passed(began, time.monotonic(), request.method, request.path, status))


def _passed_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
