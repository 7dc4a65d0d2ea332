"""Each peer run over the whole plan: one that serves over HTTP, or one that is called in a process.

A result is a dictionary ready for JSON: seconds of each start, and each batch size's `workload.BatchResult`.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu import load, servers
from benchmarks.cpu.environments import HERE, cache_folder, peer_python
from benchmarks.cpu.workload import (
    OUTPUT_TOKENS,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    SUFFIX_TOKENS,
    Answer,
    BatchResult,
    Plan,
    PrefixResult,
    prompts,
)

JOB_TIMEOUT_SECONDS = 400.0
WARM_UP_SEED = 10_000
PREFIX_SEED = 20_000
SERVED = ("headway", "vllm", *servers.LEVERS)
IN_PROCESS = ("llama.cpp", "transformers generate", "transformers continuous")


class PeerError(Exception):
    """A peer's process ended or kept silent."""


@dataclass(slots=True)
class ServedPeer:
    """One that serves over HTTP, visited one time or several; all visits count alike."""

    name: str
    starts: list[float] = field(default_factory=list)
    batches: dict[int, BatchResult] = field(default_factory=dict)
    prefixes: PrefixResult = field(default_factory=PrefixResult)

    def visit(self, folder: Path, config: dict[str, Any], plan: Plan, log: Path) -> dict[str, Any]:
        """Start to first token, the batches, then cached prefixes. Returns what all visits found so far."""
        vocab_size = config["vocab_size"]
        seed = len(self.starts)
        with servers.running(self.name, folder, log) as server:
            warm_up = prompts(WARM_UP_SEED, 1, PROMPT_TOKENS, vocab_size)
            (first,) = load.send_together(server.url, warm_up, 4)
            self.starts.append(first.first_at - server.started_at)
            for batch, rounds in plan.rounds.items():
                warm_up = prompts(WARM_UP_SEED + batch, batch, PROMPT_TOKENS, vocab_size)
                load.send_together(server.url, warm_up, 4)
                result = self.batches.setdefault(batch, BatchResult())
                for index in range(rounds):
                    work = prompts(1000 * batch + 100 * seed + index, batch, PROMPT_TOKENS, vocab_size)
                    result.add(load.send_together(server.url, work, OUTPUT_TOKENS))
            self._visit_prefixes(server.url, vocab_size, plan)
        return {
            "start_seconds": self.starts,
            "batches": {batch: result.summary() for batch, result in self.batches.items()},
            "prefix": self.prefixes.summary(),
        }

    def _visit_prefixes(self, url: str, vocab_size: int, plan: Plan) -> None:
        """Time to the first token of prompts whose first 1,500 tokens are new, and then are cached."""
        for index in range(plan.num_prefixes):
            (prefix,) = prompts(PREFIX_SEED + index, 1, PREFIX_TOKENS, vocab_size)
            seconds = []
            for suffix in prompts(PREFIX_SEED + 100 + index, 3, SUFFIX_TOKENS, vocab_size):
                (answer,) = load.send_together(url, [prefix + suffix], 2)
                seconds.append(answer.ttft_seconds)
            self.prefixes.misses.append(seconds[0])
            self.prefixes.hits += seconds[1:]


def measure_in_process(
    name: str, folder: Path, config: dict[str, Any], plan: Plan, log: Path
) -> dict[str, Any]:
    """The same work given as one call per batch; the start ends with the first answer of one token."""
    vocab_size = config["vocab_size"]
    started_at = time.perf_counter()
    with _worker(_worker_command(name, folder), log) as ask:
        ask(prompts(WARM_UP_SEED, 1, PROMPT_TOKENS, vocab_size), 1)
        start_seconds = time.perf_counter() - started_at
        batches = {}
        for batch, rounds in plan.rounds.items():
            ask(prompts(WARM_UP_SEED + batch, batch, PROMPT_TOKENS, vocab_size), 4)
            result = BatchResult()
            for index in range(rounds):
                work = prompts(1000 * batch + index, batch, PROMPT_TOKENS, vocab_size)
                report = ask(work, OUTPUT_TOKENS)
                if report["num_tokens"] != batch * OUTPUT_TOKENS:
                    raise PeerError(f"{name} gave {report['num_tokens']} tokens for a batch of {batch}")
                result.add(_answers(report, batch))
            batches[batch] = result.summary()
            if not report["ttft_seconds"]:
                batches[batch] |= dict.fromkeys(
                    ("ttft_p50_milliseconds", "ttft_p95_milliseconds", "decode_tokens_per_second")
                )
    return {"start_seconds": [start_seconds], "batches": batches, "prefix": None}


def _answers(report: dict[str, Any], batch: int) -> list[Answer]:
    """All end together; where first tokens are not timed, the numbers that need them are left out later."""
    firsts = report["ttft_seconds"] or [report["seconds"]] * batch
    return [Answer(0.0, first, report["seconds"], OUTPUT_TOKENS) for first in firsts]


def _worker_command(name: str, folder: Path) -> list[str]:
    environment, _, mode = name.partition(" ")
    python = str(peer_python(environment))
    if environment == "transformers":
        return [python, str(HERE / "in_process" / "transformers_peer.py"), mode, str(folder)]
    target = cache_folder() / f"{folder.name}.gguf"
    threads = str(len(os.sched_getaffinity(0)))
    return [python, str(HERE / "in_process" / "llama_cpp_peer.py"), str(folder), str(target), threads]


@contextmanager
def _worker(command: list[str], log_file: Path) -> Iterator[Any]:
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def read() -> dict[str, Any]:
            while True:
                if not select.select([stdout], [], [], JOB_TIMEOUT_SECONDS)[0]:
                    raise PeerError(f"no answer within {JOB_TIMEOUT_SECONDS:.0f} s")
                line = stdout.readline()
                if not line:
                    tail = log_file.read_bytes()[-3000:].decode(errors="replace")
                    raise PeerError(f"the process ended with status {process.wait()}: {tail}")
                if line.startswith("{"):
                    report: dict[str, Any] = json.loads(line)
                    return report

        def ask(work: list[list[int]], max_tokens: int) -> dict[str, Any]:
            stdin.write(json.dumps({"prompts": work, "max_tokens": max_tokens}) + "\n")
            return read()

        try:
            read()
            yield ask
        finally:
            process.kill()
            process.wait()
            stdin.close()
            stdout.close()
