"""A proxied request's whole life, from its body to exactly one of the four ends that `counters.py` names.

    read the body -> [ lease a replica (may wait) -> send ] -> relay the answer
                     ^-- again, while nobody can have accepted it

Another attempt follows only a failure to connect, a connection proven to have been closed before the request
arrived, a replica's own 503 with Retry-After, or its death before the first byte of its answer's body; no
replica is asked again after its 503, and when all have said it, to this request or to others just now, the
last one is passed on. Who had waited for a replica waits on instead. Two replicas that die of one request are
enough: it may be the cause. Nothing is sent again once a byte has gone to the client.

Waiting is counted from the request's last byte: how slowly a client uploads is not the service's latency.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal

import aiohttp
from aiohttp import web

from headway_gateway import headers, replies
from headway_gateway.backend import Backend
from headway_gateway.body import asks_for_stream, read_body
from headway_gateway.config import GatewayConfig
from headway_gateway.counters import Counters, End
from headway_gateway.error_codes import GatewayCode
from headway_gateway.errors import (
    AnswerError,
    BodyError,
    BrokenStreamError,
    HeaderError,
    NotAcceptedError,
    ReplicaDiedError,
)
from headway_gateway.exchange import Exchange
from headway_gateway.held_bodies import BodyBudget, HeldBody
from headway_gateway.last_answers import LARGEST_BYTES, LastAnswers
from headway_gateway.lease import Lease
from headway_gateway.metrics import Latencies
from headway_gateway.pool import BackendPool
from headway_gateway.relay import ClientGoneError, Relay
from headway_gateway.rests import LONGEST_REST_SECONDS
from headway_gateway.upstream import Upstream, read_refusal

REPLICA_DIED: Literal["replica_died"] = "replica_died"
log = logging.getLogger(__name__)


class Proxy:
    """Proxies requests to the pool's replicas and counts how they end."""

    def __init__(
        self,
        config: GatewayConfig,
        pool: BackendPool,
        upstream: Upstream,
        counters: Counters,
        latencies: Latencies,
        bodies: BodyBudget,
        last_answers: LastAnswers,
    ) -> None:
        self._config = config
        self._pool = pool
        self._upstream = upstream
        self._counters = counters
        self._latencies = latencies
        self._bodies = bodies
        self._last_answers = last_answers
        self._exchanges: set[Exchange] = set()
        self._is_ending = False
        self.is_draining = False
        self.last_request_at: float | None = None  # of the event loop's clock

    @property
    def num_exchanges(self) -> int:
        """Requests from their first byte to the end of their answer."""
        return len(self._exchanges)

    def end_all(self) -> None:
        """End what still runs: with an error event where a stream has begun, else with 503."""
        self._is_ending = True
        for exchange in self._exchanges:
            exchange.limit.reschedule(0.0)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        request_id = headers.request_id_of(request.headers)
        try:
            forwarded = headers.to_replica(request.headers, request_id=request_id, peer=request.remote)
        except HeaderError as error:
            log.warning("answered 400 (invalid_http): %s", error, extra={"request_id": request_id})
            refusal = replies.error_response(
                400, str(error), code="invalid_http", headers={headers.REQUEST_ID: request_id}
            )
            replies.let_pages_read(refusal, request)
            refusal.force_close()  # its body has not been read
            return refusal
        exchange = Exchange(
            request,
            request_id,
            forwarded,
            Relay(request, request_id, self._config.idle_timeout_seconds),
            HeldBody(self._bodies),
        )
        self.last_request_at = asyncio.get_running_loop().time()
        try:
            return await self._within_limit(exchange)
        except BodyError as error:
            own = _retry_after(error.retry_after_seconds)
            return self._answer(
                exchange, error.status, str(error), code=error.code, own_headers=own, closes=True
            )
        except ClientGoneError as error:
            self._end_left(exchange)
            log.info("the client has gone: %s", error, extra=exchange.log_fields())
            return exchange.relay.abandoned()
        except asyncio.CancelledError:
            self._end_left(exchange)
            raise
        finally:
            self._end(exchange, "failed", "internal_error")  # a fault of our own, unless it has ended already
            exchange.body.drop()
            self._exchanges.discard(exchange)

    async def _within_limit(self, exchange: Exchange) -> web.StreamResponse:
        try:
            async with exchange.limit:
                self._exchanges.add(exchange)
                if self._is_ending:
                    exchange.limit.reschedule(0.0)
                return await self._serve(exchange)
        except TimeoutError:  # set by `end_all` alone
            message = "the gateway is shutting down; send the request again"
            if exchange.received_at is None:
                raise BodyError(408, message, code="shutting_down") from None
            if exchange.relay.is_started:
                return await self._break_off(exchange, BrokenStreamError("shutting_down", message))
            return self._reject(exchange, AnswerError(503, "shutting_down", message, retry_after_seconds=1))

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        exchange.body.data = (
            await read_body(
                exchange.request,
                max_bytes=self._config.max_body_bytes,
                timeout_seconds=self._config.idle_timeout_seconds,
                held=exchange.body,
            )
            or b""
        )
        exchange.received_at = asyncio.get_running_loop().time()
        self._counters.received += 1
        if self.is_draining and not self._pool.num_ready:
            # The operator need not ask a gateway that ends who waits there, so nobody might wake a replica.
            message = "the gateway is shutting down and no replica is ready; send the request again"
            return self._reject(exchange, AnswerError(503, "shutting_down", message, retry_after_seconds=1))
        try:
            response = await self._forward(exchange)
        except AnswerError as error:
            return self._reject(exchange, error)
        except BrokenStreamError as error:
            return await self._break_off(exchange, error)
        if exchange.refusal_reason is None:
            self._end(exchange, "finished")
        else:
            self._end(exchange, "rejected", exchange.refusal_reason)
        return response

    async def _forward(self, exchange: Exchange) -> web.StreamResponse:
        is_streamed = asks_for_stream(exchange.body.data)
        while True:
            lease = await self._pool.acquire(
                refused_by=exchange.refused_by,
                since=exchange.received_at or 0.0,
                num_bytes=len(exchange.body),
                is_streamed=is_streamed,
                is_again=exchange.retry_reason is not None,
                was_held=exchange.was_held,
                least_until=exchange.least_until,
            )
            if lease is None:
                return self._pass_on_refusal(exchange)
            if lease.was_held:
                # Whoever had no room may have by now.
                exchange.was_held = True
                exchange.refused_by.clear()
            with lease:
                try:
                    upstream = await self._send(exchange, lease)
                    if upstream is None:
                        continue
                    async with upstream:
                        if upstream.status == 503 and "Retry-After" in upstream.headers:
                            lease.mark_busy()
                            await self._note_refusal(exchange, lease.backend, upstream)
                            continue
                        lease.mark_taken(is_error=upstream.status >= 500)
                        late_share = headers.late_share_of(upstream.headers)
                        if late_share is not None:
                            lease.mark_late_share(late_share)
                        max_num_seqs = headers.max_num_seqs_of(upstream.headers)
                        if max_num_seqs is not None:
                            lease.mark_max_num_seqs(max_num_seqs)
                        await self._await_first(exchange, upstream, lease.backend.revision)
                        # What says how many it computes at once is the answer to a generation.
                        lease.mark_answered(is_measured=max_num_seqs is not None)
                        response = await self._relay(exchange, upstream, lease.backend.revision)
                        lease.mark_ended()
                        return response
                except ReplicaDiedError as error:
                    self._note_death(exchange, lease, error)

    async def _send(self, exchange: Exchange, lease: Lease) -> aiohttp.ClientResponse | None:
        """The answer's head, or None where the request may be sent again."""
        waited = asyncio.get_running_loop().time() - (exchange.received_at or 0.0)
        if exchange.retry_reason is None:
            self._latencies.waited.observe(waited)
        else:
            self._counters.retried[exchange.retry_reason] += 1
        exchange.forwarded_headers[headers.WAITED] = f"{waited * 1000:.3f}"
        backend = lease.backend

        def note_reached() -> None:
            lease.mark_reached()
            exchange.awaited_revision = backend.revision

        try:
            return await self._upstream.send(
                exchange.request.method,
                backend.url + exchange.request.rel_url.raw_path_qs,
                exchange.forwarded_headers,
                exchange.body,
                note_reached,
            )
        except NotAcceptedError as error:
            exchange.awaited_revision = None
            # Losing an idle connection is nothing; losing one after another means that nobody is at home.
            if error.reason == "connect" or backend in exchange.closed_by:
                lease.mark_unreachable()
            else:
                exchange.closed_by.add(backend)
            self._note_attempt(exchange, backend, error.reason, str(error))
            return None
        except AnswerError:
            self._count_accepted(exchange, backend.revision, is_error=True)
            lease.mark_taken(is_error=True)
            raise

    async def _await_first(self, exchange: Exchange, upstream: aiohttp.ClientResponse, revision: str) -> None:
        exchange.head_at = asyncio.get_running_loop().time()
        try:
            is_wanted = self._last_answers.is_wanted(exchange.request)
            await exchange.relay.await_first(upstream, least_bytes=LARGEST_BYTES if is_wanted else 1)
        except BrokenStreamError:
            self._count_accepted(exchange, revision, is_error=True)
            raise
        exchange.body.drop()  # no other replica will be sent it, and answers may take minutes

    async def _relay(
        self, exchange: Exchange, upstream: aiohttp.ClientResponse, revision: str
    ) -> web.StreamResponse:
        revision = self._told(revision)
        self._count_accepted(exchange, revision, is_error=upstream.status >= 500)
        if upstream.status == 503:
            exchange.refusal_reason = "replica_unavailable"
        else:
            self._counters.forwarded += 1
            took = exchange.head_at - (exchange.received_at or 0.0)
            self._latencies.answered.observe(took)
            self._latencies.of_revision(revision).observe(took)
        try:
            response = await exchange.relay.pass_on(upstream, closes=self.is_draining)
        except BrokenStreamError:
            if upstream.status < 500 and revision == self._told(revision):
                self._counters.count_broken(revision)
            raise
        if self._last_answers.is_wanted(exchange.request):
            self._last_answers.note(exchange.request, upstream.status, response)
        return response

    def _note_death(self, exchange: Exchange, lease: Lease, error: ReplicaDiedError) -> None:
        """Raises AnswerError where it is the second one."""
        self._count_accepted(exchange, lease.backend.revision, is_error=True)
        lease.mark_unreachable()
        if exchange.has_lost_a_replica:
            raise AnswerError(502, REPLICA_DIED, str(error)) from error
        exchange.has_lost_a_replica = True
        # It may have been under way for longer than anybody may wait: a replica needs time to come back.
        exchange.least_until = asyncio.get_running_loop().time() + LONGEST_REST_SECONDS + 1.0
        self._note_attempt(exchange, lease.backend, REPLICA_DIED, str(error))

    async def _note_refusal(
        self, exchange: Exchange, backend: Backend, upstream: aiohttp.ClientResponse
    ) -> None:
        exchange.awaited_revision = None
        body = await read_refusal(upstream)
        exchange.refused_by.append(backend)
        if body is None:
            retry_after = upstream.headers["Retry-After"]
            exchange.refusal = replies.error_response(
                503,
                "no replica can take the request now",
                code="replicas_refused",
                headers={"Retry-After": retry_after},
            )
            replies.let_pages_read(exchange.refusal, exchange.request)
        else:
            passed = headers.to_client(upstream.headers, request_id=exchange.request_id)
            passed.popall("Content-Length", None)
            exchange.refusal = web.Response(status=503, headers=passed, body=body)
        self._note_attempt(exchange, backend, "refused", "the replica answered 503")

    def _pass_on_refusal(self, exchange: Exchange) -> web.Response:
        refusal = exchange.refusal
        assert refusal is not None, "without a refusal the pool waits or raises"
        exchange.refusal_reason = "replicas_refused"
        log.warning("answered 503 (replicas_refused): as the last replica did", extra=exchange.log_fields())
        refusal.headers[headers.REQUEST_ID] = exchange.request_id
        if self.is_draining:
            refusal.force_close()
        return refusal

    def _note_attempt(self, exchange: Exchange, backend: Backend, reason: str, message: str) -> None:
        exchange.retry_reason = reason
        log.warning("attempt failed (%s): %s", reason, message, extra=exchange.log_fields(backend))

    def _reject(self, exchange: Exchange, error: AnswerError) -> web.Response:
        self._end(exchange, "rejected", error.reason)
        own = _retry_after(error.retry_after_seconds)
        return self._answer(exchange, error.status, str(error), code=error.reason, own_headers=own)

    async def _break_off(self, exchange: Exchange, error: BrokenStreamError) -> web.StreamResponse:
        self._end(exchange, "failed", error.reason)
        log.error("the answer broke off (%s): %s", error.reason, error, extra=exchange.log_fields())
        if exchange.relay.is_started:
            return await exchange.relay.break_off(str(error), code=error.reason)
        return self._answer(exchange, 502, str(error), code=error.reason)

    def _answer(
        self,
        exchange: Exchange,
        status: int,
        message: str,
        *,
        code: GatewayCode,
        own_headers: Mapping[str, str] | None = None,
        closes: bool = False,
    ) -> web.Response:
        log.warning("answered %d (%s): %s", status, code, message, extra=exchange.log_fields())
        named = {headers.REQUEST_ID: exchange.request_id, **(own_headers or {})}
        response = replies.error_response(status, message, code=code, headers=named)
        replies.let_pages_read(response, exchange.request)
        if closes or self.is_draining:
            response.force_close()
        return response

    def _count_accepted(self, exchange: Exchange, revision: str, *, is_error: bool) -> None:
        exchange.awaited_revision = None
        self._counters.count_accepted(self._told(revision), is_error=is_error)

    def _told(self, revision: str) -> str:
        """What a revision counts as: what is gone while a request is at it would else never go."""
        return revision if revision in self._pool.routing.revisions else ""

    def _end_left(self, exchange: Exchange) -> None:
        """The client has gone; the revision counts it as well where it waited for a replica to begin."""
        if exchange.awaited_revision is not None:
            self._counters.count_left(self._told(exchange.awaited_revision))
            exchange.awaited_revision = None
        self._end(exchange, "client_aborted")

    def _end(self, exchange: Exchange, end: End, reason: str = "") -> None:
        """Count the request's end, once; one that was never received whole has none."""
        if exchange.received_at is None or exchange.is_over:
            return
        exchange.is_over = True
        self._counters.count_end(end, reason)


def _retry_after(seconds: int | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(seconds)}
