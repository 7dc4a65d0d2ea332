"""Traces as a collector sees them: one span per request, in the client's trace; nobody waits for it."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from headway_runtime.errors import ConfigError
from headway_runtime.server import tracing_options
from headway_runtime.server.options import parse_options
from headway_runtime.server.tracing import start_tracing
from headway_runtime.server.tracing_options import TracingOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}


@dataclass
class Span:
    name: str
    kind: int
    trace_id: str
    parent_id: str
    started_at: float
    seconds: float
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@dataclass
class Collector:
    """A real OTLP/HTTP receiver. is_silent: it takes what is sent and never answers."""

    is_silent: bool = False
    spans: queue.SimpleQueue[Span] = field(default_factory=queue.SimpleQueue)
    paths: set[str] = field(default_factory=set)
    port: int = 0
    may_answer: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = values(group.resource.attributes)
            for span in (one for scope in group.scope_spans for one in scope.spans):
                self.spans.put(
                    Span(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano / 1e9,
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        span.status.code,
                        values(span.attributes),
                        resource,
                    )
                )

    def span_of(self, request_id: str) -> Span:
        """The span of a request; others before it are dropped."""
        while True:
            span = self.spans.get(timeout=20)
            if span.attributes["gen_ai.request.id"] == request_id:
                return span


def serve(collector: Collector, port: int = 0) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if collector.is_silent:
                collector.may_answer.wait(60)
                return
            collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        collector.may_answer.set()
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    yield from serve(Collector())


@pytest.fixture(scope="module")
def server(start_shared_server: StartServer, collector: Collector) -> RunningServer:
    return start_shared_server(
        f"--otlp-traces-endpoint=http://127.0.0.1:{collector.port}",
        "--num-threads=1",
        fake=False,
        environment={"OTEL_BSP_SCHEDULE_DELAY": "50"},
    )


def post(server: RunningServer, path: str, body: object, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=30)


def test_a_span_continues_the_clients_trace_and_says_what_happened(
    server: RunningServer, collector: Collector
) -> None:
    before = time.time()
    parent = f"00-{TRACE_ID}-{SPAN_ID}-01"
    assert post(server, "/v1/completions", BODY, traceparent=parent, x_request_id="t-1").is_success
    span = collector.span_of("t-1")
    assert collector.paths == {"/v1/traces"}
    assert (span.trace_id, span.parent_id) == (TRACE_ID, SPAN_ID)
    assert (span.name, span.kind, span.status) == ("text_completion tiny", 2, 0)
    assert before - 0.1 <= span.started_at <= time.time()
    want = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert {name: span.attributes.get(name) for name in want} == want
    times = {name.rpartition(".")[2]: value for name, value in span.attributes.items() if ".latency." in name}
    assert times["time_in_queue"] + times["time_in_model_prefill"] <= times["time_to_first_token"] + 0.001
    assert times["time_to_first_token"] <= times["e2e"] == pytest.approx(span.seconds, abs=0.05)
    assert times["time_per_output_token"] > 0
    assert span.resource["service.name"] == "headway"
    assert span.resource["service.version"]


def test_a_streamed_chat_has_its_span_when_it_has_ended(server: RunningServer, collector: Collector) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    assert post(server, "/v1/chat/completions", body, x_request_id="t-2").is_success
    span = collector.span_of("t-2")
    assert span.name == "chat tiny"
    assert len(span.parent_id) == 0
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0
    texts = str(span.attributes)
    assert "hi" not in span.attributes.values()
    assert "content" not in texts


def test_what_the_client_does_not_sample_is_not_sent(server: RunningServer, collector: Collector) -> None:
    unsampled = f"00-{'1' * 32}-{SPAN_ID}-00"
    assert post(server, "/v1/completions", BODY, traceparent=unsampled, x_request_id="no").is_success
    for broken in ("00-xyz", f"00-{'0' * 32}-{SPAN_ID}-01"):
        assert post(server, "/v1/completions", BODY, traceparent=broken, x_request_id="own").is_success
        span = collector.spans.get(timeout=20)
        assert span.attributes["gen_ai.request.id"] == "own"
        assert span.trace_id.strip("0")
        assert span.parent_id == ""


def test_a_refusal_is_a_span_that_is_not_the_servers_error(
    server: RunningServer, collector: Collector
) -> None:
    post(server, "/v1/completions", {**BODY, "n": 0}, x_request_id="t-3")
    span = collector.span_of("t-3")
    assert (span.name, span.status) == ("text_completion", 0)
    assert span.attributes["http.response.status_code"] == 400
    post(server, "/v1/no/such/path", {}, x_request_id="t-4")
    assert collector.span_of("t-4").name == "POST"


def test_probes_have_no_span(server: RunningServer, collector: Collector) -> None:
    httpx.get(f"{server.url}/health", headers={"X-Request-Id": "probe"})
    httpx.get(f"{server.url}/metrics", headers={"X-Request-Id": "probe"})
    httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "t-5"})
    assert collector.spans.get(timeout=20).attributes["gen_ai.request.id"] == "t-5"


def test_the_standard_variables_are_enough_and_the_last_spans_are_sent_at_the_end(
    start_server: StartServer,
) -> None:
    for collector in serve(Collector()):
        server = start_server(
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
                "OTEL_SERVICE_NAME": "mine",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
                "OTEL_BSP_SCHEDULE_DELAY": "600000",
            }
        )
        assert post(server, "/v1/completions", BODY, x_request_id="last").is_success
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        span = collector.span_of("last")
        assert span.resource["service.name"] == "mine"
        assert span.resource["deployment.environment"] == "test"


def test_a_failed_stream_is_an_error_though_its_status_was_200(start_server: StartServer) -> None:
    for collector in serve(Collector()):
        server = start_server(
            f"--otlp-traces-endpoint=http://127.0.0.1:{collector.port}/v1/traces",
            environment={"OTEL_BSP_SCHEDULE_DELAY": "50"},
        )
        fail_later = {**BODY, "prompt": [4, 5], "stream": True}  # what the fake engine takes for that
        post(server, "/v1/completions", fail_later, x_request_id="failed")
        span = collector.span_of("failed")
        assert (span.status, span.attributes["http.response.status_code"]) == (2, 200)
        assert span.attributes["error.type"] == "engine_error"


@pytest.mark.parametrize("kind", ["nobody", "silent"])
def test_a_collector_that_is_not_there_holds_nobody_up(start_server: StartServer, kind: str) -> None:
    for collector in serve(Collector(is_silent=True)):
        port = collector.port
        if kind == "nobody":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
        server = start_server(
            f"--otlp-traces-endpoint=http://127.0.0.1:{port}", environment={"OTEL_BSP_SCHEDULE_DELAY": "20"}
        )
        for _ in range(5):
            began_at = time.monotonic()
            assert post(server, "/v1/completions", BODY).is_success
            assert time.monotonic() - began_at < 5
        began_at = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        # A second of it is for those who have not heard yet that the server drains.
        assert time.monotonic() - began_at < 3.5
        assert "5 of 5 spans were not delivered" in server.log
        assert server.log.count("opentelemetry") <= 1, "the reason is told once"


def wait_for_log(server: RunningServer, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def test_a_collector_that_comes_back_is_told_of_once(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = start_server(
        f"--otlp-traces-endpoint=http://127.0.0.1:{port}",
        environment={"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"},
    )
    post(server, "/v1/completions", BODY)
    wait_for_log(server, "does not take spans")
    collector = Collector()
    for _ in serve(collector, port):
        post(server, "/v1/completions", BODY, x_request_id="back")
        collector.span_of("back")
        wait_for_log(server, "takes spans again; 1 before were dropped")
    assert server.log.count("does not take spans") == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["collector:4318"], {}, "--otlp-traces-endpoint='collector:4318': want a URL such as"),
        (["grpc://collector:4317"], {}, "want a URL such as"),
        (["http://collector:99999"], {}, "want a URL such as"),
        (["http://c"], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL='grpc': only"),
        (
            [],
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL='http/json': only",
        ),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_named(
    model_folder: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    flags = [f"--otlp-traces-endpoint={one}" for one in arguments]
    with pytest.raises(ConfigError) as caught:
        parse_options([str(model_folder), *flags], environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "environment", "want"),
    [
        ([], {}, TracingOptions()),
        (["http://c:4318"], {}, TracingOptions(is_on=True, endpoint="http://c:4318/v1/traces")),
        (["https://c/x/v1/traces"], {}, TracingOptions(is_on=True, endpoint="https://c/x/v1/traces")),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, TracingOptions(is_on=True)),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, TracingOptions()),
        (["http://c"], {"OTEL_SDK_DISABLED": "true"}, TracingOptions()),
    ],
)
def test_where_traces_go(
    model_folder: Path, arguments: list[str], environment: dict[str, str], want: TracingOptions
) -> None:
    flags = [f"--otlp-traces-endpoint={one}" for one in arguments]
    assert parse_options([str(model_folder), *flags], environment).tracing == want


@pytest.mark.parametrize("environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}])
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.setattr(tracing_options, "_has_library", lambda: False)
    flags = [] if environment else ["--otlp-traces-endpoint=http://c"]
    with pytest.raises(ConfigError, match=r"install -e .\.\[runtime,tracing\]."):
        parse_options([str(model_folder), *flags], environment)


def test_without_an_endpoint_none_of_the_libraries_that_send_is_imported() -> None:
    assert start_tracing(TracingOptions()) is None
    # The web framework imports OpenTelemetry's interface by itself, where that is installed.
    senders = "{'opentelemetry.sdk', 'opentelemetry.exporter', 'requests'}"
    code = f"import sys, headway_runtime.server.app; assert not {senders} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
