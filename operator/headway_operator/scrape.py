"""The only HTTP that the operator speaks to replicas and gateways: the paths below `/admin/`, and once
for each start of a replica its `/metrics`, for what the stages of the start took.

Every call has a time limit and all of one pass run at once. How a sample reads is `sample_wire`'s business,
what it means the controller's, and where replicas are the cluster's. Limits are written only while this
operator may write at all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from headway_operator.errors import NotLeadingError, ScrapeError
from headway_operator.keys import Signer
from headway_operator.sample_wire import (
    parse_demand,
    parse_gateway_sample,
    parse_replica_sample,
    routing_body,
)
from headway_operator.samples import GatewaySample, ReplicaSample, Routing, Sample
from headway_operator.state import Observed, ServiceKey

START_METRIC = "headway_start_seconds"

TIMEOUT_SECONDS = 2.0
# How long a gateway keeps the question open whether anybody waits; less than idle connections are let live.
DEMAND_SECONDS = 25.0
MAX_CONCURRENT = 64
MAX_BODY_BYTES = 65536
MAX_METRICS_BYTES = 2**20
# A replica that does not tell its start's stages is asked this often.
MAX_START_QUESTIONS = 5
MAX_ERROR_CHARACTERS = 200

AnySample = TypeVar("AnySample", ReplicaSample, GatewaySample)


class Scraper:
    """Takes the samples of one pass, all at once, each within its time limit. Use it as `async with`."""

    def __init__(
        self,
        keys: Signer,
        clock: Callable[[], float],
        timeout_seconds: float = TIMEOUT_SECONDS,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._may_write = may_write
        self._starts: dict[ServiceKey, dict[str, _StartStages]] = {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Pods have cluster addresses: a proxy from the environment must not see the operator's tokens.
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            trust_env=False,
            # Samples have their slots; questions that stay open must not keep them from being taken.
            connector=aiohttp.TCPConnector(limit=0),
        )
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
        unasked, stages = self._starts_to_ask(key, observed)
        replicas: dict[str, ReplicaSample | None] = {}
        gateway_samples: dict[str, GatewaySample | None] = {}
        await asyncio.gather(
            *(self._collect(self._replica, *one, token, replicas, errors) for one in ready.items()),
            *(self._collect(self._replica, *one, token, replicas) for one in draining.items()),
            *(self._collect(self._gateway, *one, token, gateway_samples, errors) for one in gateways.items()),
            *(self._ask_start(*one) for one in unasked),
        )
        in_order = {name: replicas[name] for name in (*ready, *draining) if name in replicas}
        told = {name: one.seconds for name, one in stages.items() if one.seconds is not None}
        return Sample(taken_at, in_order, gateway_samples, errors, told)

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        self._starts.pop(key, None)

    async def patch_limits(self, key: ServiceKey, address: str, body: Mapping[str, Any]) -> None:
        """PATCH /admin/limits of one replica. Raises ScrapeError with its own words when it refuses."""
        if not self._may_write():
            raise NotLeadingError(f"limits of {address}: this operator does not hold the Lease")
        token = self._keys.mint(key, self._clock())
        await self._request("PATCH", f"{address}/admin/limits", token, dict(body))

    async def route(self, key: ServiceKey, address: str, routing: Routing) -> None:
        """PUT /admin/routing of one gateway. Raises ScrapeError with its own words when it refuses."""
        if not self._may_write():
            raise NotLeadingError(f"routing of {address}: this operator does not hold the Lease")
        token = self._keys.mint(key, self._clock())
        await self._request("PUT", f"{address}/admin/routing", token, routing_body(routing))

    async def demand(self, key: ServiceKey, address: str) -> bool:
        """Whether a request waits at a gateway; answered as soon as one does, or after DEMAND_SECONDS.

        Raises ScrapeError.
        """
        token = self._keys.mint(key, self._clock())
        url = f"{address}/admin/demand?timeout_seconds={DEMAND_SECONDS:g}"
        body = await self._request("GET", url, token, timeout_seconds=DEMAND_SECONDS + TIMEOUT_SECONDS)
        return parse_demand(body) > 0

    async def _collect(
        self,
        read: Callable[[str, str], Awaitable[AnySample]],
        name: str,
        address: str,
        token: str,
        into: dict[str, AnySample | None],
        errors: dict[str, str] | None = None,
    ) -> None:
        """Put one sample in. errors: gets why there is none; without, nothing is put in then."""
        try:
            async with self._slots:
                into[name] = await read(address, token)
        except ScrapeError as error:
            if errors is not None:
                into[name], errors[name] = None, str(error)

    def _starts_to_ask(
        self, key: ServiceKey, observed: Observed
    ) -> tuple[list[tuple[str, "_StartStages"]], dict[str, "_StartStages"]]:
        """Addresses of replicas to be asked what their start took, and what each has said or will say."""
        started = {r.name: r.address for r in observed.replicas if r.start is not None and r.address}
        known = self._starts.get(key, {})
        stages = {name: known.get(name) or _StartStages() for name in started}
        self._starts[key] = stages
        return [(started[name], one) for name, one in stages.items() if one.seconds is None], stages

    async def _ask_start(self, address: str, answer: "_StartStages") -> None:
        answer.num_questions += 1
        try:
            async with self._slots:
                page = await self._request("GET", f"{address}/metrics", limit_bytes=MAX_METRICS_BYTES)
            answer.seconds = parse_start_stages(page)
        except ScrapeError:
            if answer.num_questions >= MAX_START_QUESTIONS:
                answer.seconds = {}

    async def _replica(self, address: str, token: str) -> ReplicaSample:
        body = await self._request("GET", f"{address}/admin/sample", token)
        return parse_replica_sample(body, self._clock())

    async def _gateway(self, address: str, token: str) -> GatewaySample:
        body = await self._request("GET", f"{address}/admin/sample", token)
        return parse_gateway_sample(body, self._clock())

    async def _request(
        self,
        method: str,
        url: str,
        token: str = "",
        json: dict[str, Any] | None = None,
        *,
        limit_bytes: int = MAX_BODY_BYTES,
        timeout_seconds: float | None = None,
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("Scraper is used outside its `async with` block")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = self._timeout if timeout_seconds is None else aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.request(
                method, url, headers=headers, json=json, allow_redirects=False, timeout=timeout
            ) as response:
                body = await response.content.read(limit_bytes + 1)
                while len(body) <= limit_bytes and (more := await response.content.read(limit_bytes)):
                    body += more
        except TimeoutError as error:
            raise ScrapeError(f"{method} {url}: no answer within {timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ScrapeError(f"{method} {url}: {error or type(error).__name__}") from error
        if response.status != 200:
            words = body[:MAX_ERROR_CHARACTERS].decode(errors="replace")
            raise ScrapeError(f"{method} {url}: answered {response.status}: {words}")
        if len(body) > limit_bytes:
            raise ScrapeError(f"{method} {url}: answered more than {limit_bytes} bytes")
        return body


@dataclass(slots=True)
class _StartStages:
    """What one replica said of its start; None as long as it has not answered."""

    seconds: dict[str, float] | None = None
    num_questions: int = 0


def parse_start_stages(page: bytes) -> dict[str, float]:
    """Seconds by stage from a page of metrics; {} where it has none. ScrapeError for what is no such page."""
    prefix = START_METRIC.encode()
    lines = [line for line in page.splitlines() if line.startswith(prefix)]
    try:
        text = b"\n".join(lines).decode()
        families = list(text_string_to_metric_families(text))
        samples = [sample for family in families for sample in family.samples]
        return {sample.labels["stage"]: float(sample.value) for sample in samples}
    except (ValueError, KeyError) as error:
        raise ScrapeError(f"metrics: {START_METRIC}: {error}") from error
