"""A small stand-in for `headway serve` and `headway gateway`: the same flags and paths, no model.

Environment: STANDIN_FAIL=TEXT writes TEXT to stderr and exits 1. STANDIN_READY_FILE=PATH: ready while PATH is
there. STANDIN_HEALTH_FILE=PATH: healthy while PATH is there. STANDIN_IGNORE_TERM=1 ignores SIGTERM.
STANDIN_LOG_FILE=PATH: never listens, and writes what is written to PATH.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
TARGETS = {"ttft_milliseconds": 300.0, "tpot_milliseconds": None, "epoch": 1}
STARTED = time.monotonic()


def sample() -> dict[str, object]:
    empty = {"first": 0, "counts": [], "sum": 0.0}
    names = (
        "received finished aborted rejected errors ttft_met ttft_missed tpot_met tpot_missed "
        "prompt_tokens cached_tokens generated_tokens preemptions steps"
    )
    return {
        "version": 1,
        "instance": f"standin-{os.getpid()}",
        "uptime_seconds": time.monotonic() - STARTED,
        "limits": LIMITS,
        "envelope": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "targets": TARGETS,
        "draining": False,
        "gauges": {
            "running": 0,
            "waiting": 0,
            "oldest_waiting_seconds": 0.0,
            "kv_blocks_used": 0,
            "kv_blocks_total": 512,
        },
        "counters": dict.fromkeys(names.split(), 0),
        "edges": {"first_milliseconds": 1.0, "ratio": 1.12, "count": 105},
        "histograms": dict.fromkeys(("ttft", "queue", "prefill", "tpot", "step"), empty),
    }


def gateway_sample() -> dict[str, object]:
    names = "received forwarded finished rejected retried failed client_aborted"
    return {
        "version": 1,
        "kind": "gateway",
        "instance": f"standin-{os.getpid()}",
        "uptime_seconds": time.monotonic() - STARTED,
        "gauges": {
            "waiting": 0,
            "oldest_waiting_seconds": 0.0,
            "in_flight": 0,
            "backends": 0,
            "backends_ready": 0,
        },
        "counters": dict.fromkeys(names.split(), 0),
    }


class Handler(BaseHTTPRequestHandler):
    is_gateway = False

    def do_GET(self) -> None:
        if self.path in ("/ready", "/health"):
            gate = os.environ.get(f"STANDIN_{self.path[1:].upper()}_FILE")
            is_open = gate is None or Path(gate).exists()
            self._answer(200 if is_open else 503, {} if is_open else {"error": {"message": "gate is shut"}})
        elif self.path == "/admin/sample":
            self._answer(200, gateway_sample() if self.is_gateway else sample())
        else:
            self._answer(404, {})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for name, value in body.items():
            (LIMITS if name in LIMITS else TARGETS)[name] = value
        self._answer(200, {"limits": LIMITS})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("serve", "gateway"))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--backends-file")
    arguments, _ = parser.parse_known_args()
    print(" ".join(sys.argv), f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}", flush=True)
    if failure := os.environ.get("STANDIN_FAIL"):
        print(failure, file=sys.stderr)
        sys.exit(1)
    Handler.is_gateway = arguments.command == "gateway"
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    if arguments.lifeline_fd is not None:
        threading.Thread(target=die_with_parent, args=(arguments.lifeline_fd,), daemon=True).start()
    if log := os.environ.get("STANDIN_LOG_FILE"):
        copy_for_ever(Path(log))
    if os.environ.get("STANDIN_IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    temporary = arguments.port_file.with_suffix(".new")
    temporary.write_text(str(server.server_address[1]))
    temporary.replace(arguments.port_file)
    server.serve_forever()


def copy_for_ever(log: Path) -> None:
    with log.open() as lines:
        while True:
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            time.sleep(0.05)


def die_with_parent(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
