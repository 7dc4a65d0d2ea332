"""The HTTP application: routes, error bodies, and the edge around them. Imports no torch."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from headway import __version__
from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.server.adapter_routes import adapter_routes
from headway_runtime.server.admin import admin_routes, cache_routes
from headway_runtime.server.completions import completion_routes
from headway_runtime.server.cors_options import CorsOptions
from headway_runtime.server.edge import Edge
from headway_runtime.server.http_errors import HttpError, http_error_of
from headway_runtime.server.metrics_page import render_metrics
from headway_runtime.server.openapi import openapi_json
from headway_runtime.server.reject_reasons import asks_for_model, reason_of
from headway_runtime.server.responses_endpoint import responses_routes
from headway_runtime.server.serving import Serving, json_response
from headway_runtime.server.tokenize_routes import tokenize_routes
from headway_runtime.server.wrong_paths import UNOFFERED, no_such_method, no_such_path


def build_app(serving: Serving) -> Edge:
    """The ASGI application of one server."""
    app = FastAPI(
        title="Headway",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would name this process's address, which clients behind a gateway cannot reach.
        redirect_slashes=False,
    )
    app.include_router(completion_routes(serving))
    app.include_router(responses_routes(serving))
    app.include_router(tokenize_routes(serving))
    app.include_router(adapter_routes(serving))
    app.include_router(admin_routes(serving))
    app.include_router(cache_routes(serving))
    _add_status_routes(app, serving)
    _add_error_handlers(app, serving)
    _let_pages_in(app, serving.options.cors)
    return Edge(app, serving.lifecycle, serving.tracer)


def _add_status_routes(app: FastAPI, serving: Serving) -> None:
    """Open to everyone, as probes and scrapers carry no keys."""

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        if not serving.client.is_alive:
            return HttpError(503, "the engine process has ended", code="engine_dead").response()
        if serving.watch.is_stalled:
            seconds = serving.watch.timeout_seconds
            message = f"the engine has not answered for {seconds:g} s; restart this server"
            return HttpError(503, message, code="engine_stalled").response()
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        reason = serving.why_not_ready
        if reason is None:
            return json_response({"status": "ready"})
        return HttpError(503, reason, code="not_ready").response()

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        # It is made when it is first asked for, which takes a while.
        return Response(await asyncio.to_thread(openapi_json), media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        serving.require_engine()
        state = await serving.client.state()
        info = serving.client.info
        body, content_type = render_metrics(
            state,
            {
                "version": __version__,
                "model": serving.options.served_model_names[0],
                "device": info.device if info else "",
                "quantization": serving.options.engine.quantization,
                "kv_dtype": info.kv_dtype if info else "",
                "weight_compression": info.weight_compression if info else "",
                "instance": state.instance,
            },
            serving.options.engine,
            is_draining=serving.lifecycle.is_draining,
            accept=request.headers.get("accept", ""),
        )
        return Response(body, headers={"Content-Type": content_type})


def _let_pages_in(app: FastAPI, cors: CorsOptions) -> None:
    if cors.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.allowed_origins,
            allow_methods=cors.allowed_methods,
            allow_headers=cors.allowed_headers,
            allow_credentials=cors.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )


def _add_error_handlers(app: FastAPI, serving: Serving) -> None:
    async def known(request: Request, error: Any) -> Response:
        answer = http_error_of(error)
        reason = reason_of(answer)
        if reason is not None and asks_for_model(request.method, request.url.path):
            serving.client.report_refused(reason)
        return answer.response()

    async def of_starlette(request: Request, error: Any) -> Response:
        if error.status_code == 405 and request.url.path not in UNOFFERED:
            return no_such_method(request, app.routes).response()
        return no_such_path(request).response()

    async def client_gone(_: Request, __: Any) -> Response:
        return Response(status_code=499)  # written to nobody

    async def unexpected(_: Request, error: Any) -> Response:
        return HttpError(500, f"internal error: {type(error).__name__}", code="internal_error").response()

    app.add_exception_handler(HeadwayRuntimeError, known)
    app.add_exception_handler(TimeoutError, known)
    app.add_exception_handler(HTTPException, of_starlette)
    app.add_exception_handler(ClientDisconnect, client_gone)
    # Starlette raises it again after this answer, so that it is logged with its traceback.
    app.add_exception_handler(Exception, unexpected)
