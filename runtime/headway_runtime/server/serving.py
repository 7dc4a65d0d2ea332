"""What the routes share: the options, the engine's client, the tokenizer, and who may come in.

One object per server, made before the engine is ready. Routes ask it for what they need and get an
`HttpError` where that cannot be had: no engine yet, no right, no such model, too large a body.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway_runtime.errors import InvalidRequestError
from headway_runtime.sampling_params import shown
from headway_runtime.server.admin_tokens import AdminTokens
from headway_runtime.server.api_keys import ApiKeys, Tenant
from headway_runtime.server.desk import Desk, load_model_files, name_of, served_model, with_adapter
from headway_runtime.server.edge import CONTEXT_KEY, RequestContext
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.engine_watch import EngineWatch
from headway_runtime.server.http_errors import HttpError, overloaded
from headway_runtime.server.lifecycle import Lifecycle
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.prompts import ServedModel
from headway_runtime.server.reading_pool import ReadingPool
from headway_runtime.server.reading_process import ReadingLaunch
from headway_runtime.server.tracing import start_tracing

# Smaller bodies are parsed and tokenized at once: that takes less time than a change of threads.
INLINE_BODY_BYTES = 4 * 2**10
# Larger ones keep the interpreter's lock so long that streams wait for them, even in a thread.
THREAD_BODY_BYTES = 256 * 2**10
NUM_TOKENIZER_THREADS = 4
# How long the rest of a body that is too large is read and thrown away.
DISCARD_SECONDS = 10.0
TOKENIZER_NICENESS = 5
TENANT_KEY = "headway.tenant"

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Serving:
    """The state behind the routes."""

    def __init__(self, options: ServeOptions, client: EngineClient, lifecycle: Lifecycle) -> None:
        """Reads the tokenizer and the key files. ConfigError if one of them is not usable."""
        self.options = options
        self.client = client
        self.lifecycle = lifecycle
        self.watch = EngineWatch(client, options.http.engine_timeout_seconds)
        self.started_at_unix = int(time.time())
        self._api_keys = ApiKeys(options.api_keys)
        self._admin_tokens = None
        if options.admin_public_key_file is not None and options.admin_audience is not None:
            self._admin_tokens = AdminTokens(Path(options.admin_public_key_file), options.admin_audience)
        self._files = load_model_files(options)
        self._model: ServedModel | None = None
        self.tracer = start_tracing(options.tracing)
        self._threads = ThreadPoolExecutor(
            NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer", initializer=_give_way
        )
        self._reading = ReadingPool(self._reading_launch)

    def close(self) -> None:
        """May wait a few seconds for a collector of traces."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reading.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def why_not_ready(self) -> str | None:
        """Why `/ready` fails; None if this server can take new work."""
        if not self.client.is_alive:
            return "the engine process has ended"
        if self.watch.is_stalled:
            return f"the engine has not answered for {self.watch.timeout_seconds:g} s"
        if self.lifecycle.is_draining:
            return "the server is draining"
        if not self.client.is_ready:
            return "the engine is starting"
        return None

    def model(self) -> ServedModel:
        """The model, for a request that needs the engine."""
        self.require_engine()
        if self._model is None:
            info = self.client.info
            assert info is not None
            self._model = served_model(self._files, self.options, info.max_model_len, info.num_kv_tokens)
        return self._model

    def _reading_launch(self) -> ReadingLaunch:
        model = self.model()
        # Keys stay where they are needed.
        options = replace(self.options, api_keys=())
        return ReadingLaunch(options, model.max_model_len, model.num_kv_tokens, os.getpid())

    def require_engine(self) -> None:
        if not self.client.is_alive:
            raise overloaded("the engine process has ended; this server ends, too", "engine_dead", 1)
        if self.watch.is_stalled:
            seconds = self.watch.timeout_seconds
            raise overloaded(f"the engine has not answered for {seconds:g} s", "engine_stalled", 1)
        if not self.client.is_ready:
            raise overloaded("the engine is starting; retry in a second", "engine_starting", 1)

    async def require_api_key(self, request: Request) -> None:
        """A dependency of the routes that use the model."""
        tenant = self._api_keys.tenant_of(request.headers.get("authorization"))
        if tenant is None:
            raise HttpError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request.scope[TENANT_KEY] = tenant

    async def require_sole_user(self, request: Request) -> None:
        """A dependency of what slows everybody down.

        For the operator; and for whoever may use the model, unless API keys tell several users apart.
        """
        if self._admin_tokens is not None:
            authorization = request.headers.get("authorization")
            if self._admin_tokens.refusal(authorization) is None:
                return
        await self.require_api_key(request)
        if len(self.options.api_keys) > 1:
            raise HttpError(
                403,
                "this server has several API keys, whose users share what this would take away; "
                "ask with the operator's token",
                code="not_the_operator",
            )

    async def require_adapter_manager(self, request: Request) -> None:
        """A dependency of what loads and unloads LoRA adapters: it reads files, fetches, and takes memory.

        For the operator; and, if the server was started so, for its sole user.
        """
        if self.options.engine.lora is None:
            raise HttpError(
                403,
                "this server has no LoRA adapters; start it with --enable-lora",
                code="lora_disabled",
            )
        if self._admin_tokens is not None:
            authorization = request.headers.get("authorization")
            if self._admin_tokens.refusal(authorization) is None:
                return
        if self.options.allows_runtime_lora_updating:
            await self.require_sole_user(request)
            return
        await self.require_api_key(request)
        raise HttpError(
            403,
            "adapters are loaded and unloaded by the operator alone; ask with its token, or start the server "
            "with --allow-runtime-lora-updating",
            code="lora_updating_disabled",
        )

    async def require_operator(self, request: Request) -> None:
        """A dependency of the admin routes."""
        if self._admin_tokens is None:
            raise HttpError(
                403,
                "the admin API is off, which is for the operator's token; start the server with "
                "--admin-public-key-file and --admin-audience",
                code="admin_disabled",
            )
        refusal = self._admin_tokens.refusal(request.headers.get("authorization"))
        if refusal is not None:
            raise HttpError(401, refusal, code="invalid_admin_token", headers={"WWW-Authenticate": "Bearer"})

    def served_name(self, wanted: str | None) -> str:
        """The name that the answer carries. 404 for a model that is not served here."""
        return name_of((*self.options.served_model_names, *self._adapter_names), wanted)

    def model_for(self, wanted: str | None) -> ServedModel:
        """The model for a request that names it or one of its adapters, by a name that was checked."""
        return with_adapter(self.model(), wanted, self.options.served_model_names)

    @property
    def _adapter_names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.client.adapters)

    async def hear_of_adapters(self) -> bool:
        """Ask the engine which adapters there are; whether that is news to this process.

        A client may name one that another process of this server has loaded a moment ago.
        """
        if self.options.engine.lora is None or not self.client.is_ready:
            return False
        before = self.client.adapters
        return await self.client.latest_adapters() != before

    async def read_body(self, request: Request) -> bytes:
        """The whole body, within its limits of size and time."""
        most, seconds = self.options.http.max_body_bytes, self.options.http.body_timeout_seconds
        declared = request.headers.get("content-length", "0")
        is_too_large = declared.isdecimal() and int(declared) > most
        if is_too_large and "expect" in request.headers:
            raise _too_large(most)  # it asks before it sends
        body = bytearray()
        try:
            async with asyncio.timeout(min(seconds, DISCARD_SECONDS) if is_too_large else seconds) as limit:
                async for part in request.stream():
                    # What is too large is read to its end, and thrown away: most clients send everything
                    # before they look at an answer, and would see a broken connection instead of one.
                    if is_too_large:
                        continue
                    body += part
                    if len(body) > most:
                        is_too_large = True
                        limit.reschedule(asyncio.get_running_loop().time() + DISCARD_SECONDS)
            if is_too_large:
                raise _too_large(most)
        except TimeoutError:
            if is_too_large:
                raise _too_large(most) from None
            message = f"the body did not arrive within {seconds:g} s; send it faster"
            raise HttpError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
        return bytes(body)

    async def read(
        self,
        read: Callable[[Desk, bytes, *Arguments], Result],
        raw: bytes,
        *arguments: *Arguments,
    ) -> Result:
        """Parse and tokenize: small bodies here and now, larger ones in a thread, the largest in a process.

        read: a function of a module, as it may be called in another process; arguments go by position.
        """
        self.require_engine()
        try:
            return await self._read(read, raw, *arguments)
        except HttpError as error:
            if error.code != "model_not_found" or not await self.hear_of_adapters():
                raise
        return await self._read(read, raw, *arguments)

    async def _read(
        self,
        read: Callable[[Desk, bytes, *Arguments], Result],
        raw: bytes,
        *arguments: *Arguments,
    ) -> Result:
        if len(raw) <= INLINE_BODY_BYTES:
            return read(self, raw, *arguments)
        if len(raw) <= THREAD_BODY_BYTES:
            return await self.compute_in_thread(partial(read, self, raw, *arguments))
        work = partial(self._reading.read, read, raw, arguments, self._adapter_names)
        return cast("Result", await asyncio.get_running_loop().run_in_executor(self._reading.threads, work))

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        """What may take milliseconds, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _give_way() -> None:
    """Let the event loop, and the engine's threads, go first wherever processors are short (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden by a sandbox
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness + TOKENIZER_NICENESS))


def context_of(request: Request) -> RequestContext:
    context = request.scope[CONTEXT_KEY]
    assert isinstance(context, RequestContext)
    return context


def tenant_of(request: Request) -> Tenant:
    """Whose API key let the request in."""
    tenant = request.scope[TENANT_KEY]
    assert isinstance(tenant, Tenant)
    return tenant


async def body_of(serving: Serving, request: Request) -> bytes:
    """The body of a request that is to be JSON."""
    require_json(request)
    return await serving.read_body(request)


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def require_json(request: Request) -> None:
    """A body that says it is something else than JSON is a mistake worth naming."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError(
            f"Content-Type={shown(content_type)} is not supported; send application/json",
            code="unsupported_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequestError(
            f"Content-Encoding={shown(encoding)} is not supported; send the body as it is",
            code="unsupported_content_type",
        )


def _too_large(most: int) -> HttpError:
    message = f"the body is larger than {most} bytes; send less"
    return HttpError(413, message, code="body_too_large", headers={"Connection": "close"})
