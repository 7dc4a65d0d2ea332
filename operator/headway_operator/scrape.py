"""The only HTTP that the operator speaks to replicas and gateways: `/admin/sample` and `/admin/limits`.

Every call has a time limit and all of one pass run at once. How a sample reads is `sample_wire`'s business,
what it means the controller's, and where replicas are the cluster's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from headway_operator.errors import ScrapeError
from headway_operator.keys import AdminKeys
from headway_operator.sample_wire import parse_gateway_sample, parse_replica_sample
from headway_operator.state import GatewaySample, Observed, ReplicaSample, Sample, ServiceKey

TIMEOUT_SECONDS = 2.0
MAX_CONCURRENT = 64
MAX_BODY_BYTES = 65536
MAX_ERROR_CHARACTERS = 200

AnySample = TypeVar("AnySample", ReplicaSample, GatewaySample)


class Scraper:
    """Takes the samples of one pass, all at once, each within its time limit. Use it as `async with`."""

    def __init__(
        self, keys: AdminKeys, clock: Callable[[], float], timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Pods have cluster addresses: a proxy from the environment must not see the operator's tokens.
        self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def sample(self, key: ServiceKey, observed: Observed) -> Sample:
        """Sample every ready and draining replica and every gateway process.

        A ready one that gives no usable sample maps to None with its error; a draining one that gives none is
        left out, for it may end at any moment and nothing waits for it.
        """
        taken_at = self._clock()
        token = self._keys.mint(key, taken_at)
        ready = {r.name: r.address for r in observed.replicas if r.phase == "ready" and r.address}
        draining = {r.name: r.address for r in observed.replicas if r.phase == "draining" and r.address}
        gateways = {address: address for address in observed.gateway.addresses}
        errors: dict[str, str] = {}
        ready_samples, draining_samples, gateway_samples = await asyncio.gather(
            self._collect(self._replica, ready, token, errors),
            self._collect(self._replica, draining, token, {}),
            self._collect(self._gateway, gateways, token, errors),
        )
        leaving = {name: sample for name, sample in draining_samples.items() if sample is not None}
        return Sample(taken_at, {**ready_samples, **leaving}, gateway_samples, errors)

    async def patch_limits(self, key: ServiceKey, address: str, body: Mapping[str, Any]) -> None:
        """PATCH /admin/limits of one replica. Raises ScrapeError with its own words when it refuses."""
        token = self._keys.mint(key, self._clock())
        await self._request("PATCH", f"{address}/admin/limits", token, dict(body))

    async def _collect(
        self,
        read: Callable[[str, str], Awaitable[AnySample]],
        addresses: Mapping[str, str],
        token: str,
        errors: dict[str, str],
    ) -> dict[str, AnySample | None]:
        async def attempt(name: str, address: str) -> tuple[str, AnySample | None]:
            try:
                async with self._slots:
                    return name, await read(address, token)
            except ScrapeError as error:
                errors[name] = str(error)
                return name, None

        return dict(await asyncio.gather(*(attempt(*item) for item in addresses.items())))

    async def _replica(self, address: str, token: str) -> ReplicaSample:
        body = await self._request("GET", f"{address}/admin/sample", token)
        return parse_replica_sample(body, self._clock())

    async def _gateway(self, address: str, token: str) -> GatewaySample:
        body = await self._request("GET", f"{address}/admin/sample", token)
        return parse_gateway_sample(body, self._clock())

    async def _request(self, method: str, url: str, token: str, json: dict[str, Any] | None = None) -> bytes:
        if self._session is None:
            raise RuntimeError("Scraper is used outside its `async with` block")
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.request(
                method, url, headers=headers, json=json, allow_redirects=False
            ) as response:
                body = await response.content.read(MAX_BODY_BYTES + 1)
                while len(body) <= MAX_BODY_BYTES and (more := await response.content.read(MAX_BODY_BYTES)):
                    body += more
        except TimeoutError as error:
            raise ScrapeError(f"{method} {url}: no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ScrapeError(f"{method} {url}: {error or type(error).__name__}") from error
        if response.status != 200:
            words = body[:MAX_ERROR_CHARACTERS].decode(errors="replace")
            raise ScrapeError(f"{method} {url}: answered {response.status}: {words}")
        if len(body) > MAX_BODY_BYTES:
            raise ScrapeError(f"{method} {url}: answered more than {MAX_BODY_BYTES} bytes")
        return body
