"""One OpenTelemetry span per request for the model, continuing the trace that the client began.

A span is made when its request has ended, of what the access line knows; a thread of OpenTelemetry's own
sends spans in batches, so that no stream ever waits for a collector. What its queue cannot hold is dropped.
Names of attributes are those of the GenAI conventions, and vLLM's where these have none. No text of prompts
or answers is in a span. OpenTelemetry is imported only when an endpoint is set.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway_runtime.server.log import AccessEntry
from headway_runtime.server.protocol import GenerationBody
from headway_runtime.server.tracing_options import TracingOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from headway_runtime.server.tracing_delivery import CountingExporter

logger = logging.getLogger(__name__)

# Where a request's `notes` stand in its ASGI scope.
NOTES_KEY = "headway.trace"
# How long the end of the server may wait for a collector. Another second goes by before, while it drains.
FLUSH_SECONDS = 1.5
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
OTHER_PATHS = frozenset(("/v1/models", "/tokenize", "/detokenize"))
# Outcomes that are nobody's error besides the finish reasons.
CLIENT_OUTCOMES = frozenset(("client_gone", "client_stalled"))

Attributes = dict[str, Any]


def start_tracing(options: TracingOptions) -> "RequestTracer | None":
    """None where no traces are wanted."""
    if not options.is_on:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from headway_runtime.server.tracing_delivery import CountingExporter

    # What the standard variables say of the resource goes before what is said here.
    standard = dict(Resource.create().attributes)
    if str(standard["service.name"]).startswith("unknown_service"):
        standard["service.name"] = "headway"
    resource = Resource({"service.version": __version__, "service.instance.id": uuid.uuid4().hex, **standard})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = CountingExporter(OTLPSpanExporter(endpoint=options.endpoint))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, exporter)


def notes_of(body: GenerationBody, model: str) -> Attributes:
    """What a span says of the request's own options."""
    wanted = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": body.tokens_wanted,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.choice.count": body.n,
        "gen_ai.request.stream": bool(body.stream),
    }
    return {name: value for name, value in wanted.items() if value is not None}


class RequestTracer:
    """Makes spans of requests that have ended."""

    def __init__(self, provider: "TracerProvider", exporter: "CountingExporter") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._num_spans = 0
        self._tracer = provider.get_tracer("headway_runtime", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(self, scope: Mapping[str, Any], received_at: float, entry: AccessEntry) -> None:
        """received_at: `time.monotonic()`. The span ends now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in CONTEXT_HEADERS
        }
        ended_at = time.time_ns()
        started_at = ended_at - int((time.monotonic() - received_at) * 1e9)
        notes: Attributes = scope.get(NOTES_KEY, {})
        span = self._tracer.start_span(
            _span_name(entry, notes),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={**notes, **_attributes(entry)},
            start_time=started_at,
        )
        error = _error_of(entry)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        self._num_spans += span.is_recording()
        span.end(ended_at)

    def close(self) -> None:
        """Send what has not been sent, and wait for that no longer than a server's end may take.

        What is not delivered then is dropped, and counted in the log.
        """
        # The library has no time limit of its own here; its thread ends with the process.
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        num_lost = self._num_spans - self._exporter.num_delivered
        if num_lost:
            logger.warning("%d of %d spans were not delivered to the collector", num_lost, self._num_spans)


def _span_name(entry: AccessEntry, notes: Attributes) -> str:
    """Few different names: no path that a client made up, no id."""
    operation = OPERATIONS.get(entry.path)
    if operation is not None:
        model = notes.get("gen_ai.request.model")
        return operation if model is None else f"{operation} {model}"
    return f"{entry.method} {entry.path}" if entry.path in OTHER_PATHS else entry.method


def _attributes(entry: AccessEntry) -> Attributes:
    ttft = entry.ttft_milliseconds
    wanted: dict[str, Any] = {
        "http.request.method": entry.method,
        "http.response.status_code": entry.status,
        "url.path": entry.path,
        "client.address": entry.client,
        "gen_ai.provider.name": "headway",
        "gen_ai.operation.name": OPERATIONS.get(entry.path),
        "gen_ai.request.id": entry.request_id,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": entry.cached_tokens,
        "gen_ai.response.finish_reasons": entry.finish_reasons,
        "gen_ai.response.time_to_first_chunk": _seconds(ttft) if entry.streamed else None,
        "gen_ai.latency.time_to_first_token": _seconds(ttft),
        "gen_ai.latency.time_in_queue": _seconds(entry.queue_milliseconds),
        "gen_ai.latency.time_in_model_prefill": _seconds(entry.prefill_milliseconds),
        "gen_ai.latency.e2e": _seconds(entry.e2e_milliseconds),
        "headway.latency.time_per_output_token": _seconds(entry.tpot_milliseconds),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


def _error_of(entry: AccessEntry) -> str | None:
    """What went wrong, if it was the server: a stream can fail after its status said 200."""
    if entry.status >= 500:
        return entry.outcome or str(entry.status)
    has_failed = entry.outcome is not None and entry.outcome not in (entry.finish_reasons or ())
    if entry.status == 200 and has_failed and entry.outcome not in CLIENT_OUTCOMES:
        return entry.outcome
    return None
