"""`headway status` against an API server that answers over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator.commands.status import main

DECISION = {
    "since": 0.0,
    "at": 60.0,
    "replicas": 3,
    "maxNumSeqs": 64,
    "maxNumBatchedTokens": 2048,
    "cause": "AtMaxReplicas",
    "blocker": "AtMaxReplicas",
    "message": "12.00 requests/s expected, 3.00 per replica",
    "inputs": {"recommended_replicas": 4, "kappa": 0.9},
}
SERVICE = {
    "metadata": {"namespace": "team", "name": "demo"},
    "status": {
        "display": {"replicas": "3/3", "ttft": "P95 300/500 ms"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "3 of 3"}],
        "recommendation": "prefill alone takes 640 ms",
        "lastDecision": {
            "time": "2027-01-15T08:01:00Z",
            "since": "2027-01-15T08:00:00Z",
            "replicas": 3,
            "candidateReplicas": 4,
            "maxNumSeqs": 64,
            "maxNumBatchedTokens": 2048,
            "cause": "AtMaxReplicas",
            "blocker": "AtMaxReplicas",
            "message": "12.50 requests/s expected, 3.00 per replica",
        },
    },
}
OBJECTS: dict[str, Any] = {
    "/apis/serving.headway.dev/v1alpha1/namespaces/team/inferenceservices/demo": SERVICE,
    "/api/v1/namespaces/team/configmaps/demo-memory": {
        "data": {"memory.json": json.dumps({"decisions": [{**DECISION, "cause": "Steady"}, DECISION]})}
    },
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = OBJECTS.get(self.path)
        body = json.dumps(found or {"kind": "Status", "code": 404, "reason": "NotFound"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = tmp_path / "config"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    yield path
    server.shutdown()
    server.server_close()


def test_conditions_advice_and_the_last_decisions_are_told(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "-n", "team", "--decisions", "1", "--inputs", "--kubeconfig", str(kubeconfig)]) == 0
    told = capsys.readouterr().out
    assert "team/demo: replicas 3/3, ttft P95 300/500 ms" in told
    assert "Ready is True (Serving): 3 of 3" in told
    assert "recommended: prefill alone takes 640 ms" in told
    assert (
        "wanted since 2027-01-15T08:00:00Z: 3 replicas (the load asks for 4), 64 sequences, 2048 tokens: "
        "AtMaxReplicas, blocked by AtMaxReplicas\n  12.50 requests/s expected, 3.00 per replica\n"
    ) in told
    assert "AtMaxReplicas, blocked by AtMaxReplicas: 3 replicas, 64 sequences, 2048 tokens" in told
    assert "recommended_replicas 4" in told
    assert "Steady" not in told


def test_all_of_it_as_json(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-n", "team", "--json", "--kubeconfig", str(kubeconfig)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["cause"] for one in told["decisions"]] == ["Steady", "AtMaxReplicas"]
    assert told["status"] == SERVICE["status"]


def test_a_service_that_is_not_there_is_named(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["other", "-n", "team", "--kubeconfig", str(kubeconfig)]) == 1
    assert "there is no InferenceService 'other' in namespace 'team'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "want"),
    [
        pytest.param(None, "there is no such file", id="no file"),
        pytest.param("not: [yaml", "is no usable kubeconfig: while parsing", id="no YAML"),
        pytest.param("- a\n- list\n", "is no usable kubeconfig: ", id="YAML of something else"),
        pytest.param("apiVersion: v1\n", "is no usable kubeconfig: ", id="no kubeconfig"),
        pytest.param("", "is no usable kubeconfig: ", id="empty"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, want: str
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["demo", "--kubeconfig", str(path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"--kubeconfig={str(path)!r}" in line
    assert want in line
