"""One run of users against one server: what they see. Starts servers, keeps nothing."""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from benchmarks.cpu.servers import free_port, running_command
from benchmarks.levers.questions import Questions
from benchmarks.levers.rows import Asking, Row, Sizes

from headway_bench.answer import Answer
from headway_bench.drive import Drive, Extent, Lookahead
from headway_bench.http_client import Client, parse_base_url
from headway_bench.record import Record
from headway_bench.sender import History, Sender, Target
from headway_bench.summary import Summary, summarize

MODEL_NAME = "benchmark"
REQUEST_TIMEOUT_SECONDS = 600.0
CONFIDENCE = 0.95
# A fifth of them compute a whole document: with fewer, P95 says how many of those happened to meet.
REQUESTS_PER_USER = 6
LEAST_REQUESTS, MOST_REQUESTS = 12, 120


@dataclass(frozen=True, slots=True)
class Latency:
    """Of all requests of a run, in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Point:
    """One run. itl: None where answers come in one piece. right_share: of answers, those that begin as they
    must. cached_share: of prompts' tokens, those found in the prefix cache."""

    row: str
    users: int
    num_requests: int
    num_failed: int
    ttft: Latency
    itl: Latency | None
    e2e: Latency
    output_tokens_per_second: float
    requests_per_second: float
    cached_share: float
    right_share: float

    def is_within(self, sizes: Sizes) -> bool:
        """Whether 95 of 100 requests and 99 of 100 gaps were in time, and nobody was turned away."""
        is_steady = self.itl is None or self.itl.p99 <= sizes.itl_milliseconds
        return not self.num_failed and self.ttft.p95 <= sizes.ttft_milliseconds and is_steady

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@contextmanager
def serving(row: Row, sizes: Sizes, model: str, device: str, log_file: Path) -> Iterator[str]:
    """The address of a server with a row's flags."""
    port = free_port()
    command = [sys.executable, "-m", "headway", "serve", model, "--port", str(port), "--device", device]
    flags = {
        "--served-model-name": MODEL_NAME,
        "--max-model-len": str(sizes.max_model_len),
        "--max-num-seqs": str(sizes.max_num_seqs),
        "--kv-cache-memory-bytes": sizes.kv_cache_memory,
        **row.flags,
    }
    for name, value in flags.items():
        command += [name] if value is None else [name, value]
    with running_command(command, {}, port, log_file) as server:
        yield server.url


def measure(
    url: str, row: Row, users: int, run: int, sizes: Sizes, count_tokens: Callable[[str], int]
) -> Point:
    """So many users, each of whom asks again when answered. run: numbers the questions of this one."""
    questions = Questions(sizes, row.asking, run, count_tokens)
    num_requests = min(MOST_REQUESTS, max(LEAST_REQUESTS, REQUESTS_PER_USER * users))
    return asyncio.run(_measure(url, row, users, num_requests, questions))


async def _measure(url: str, row: Row, users: int, num_requests: int, questions: Questions) -> Point:
    client = Client(parse_base_url(url), {})
    target = Target("chat", _fields(row.asking), "max_completion_tokens", REQUEST_TIMEOUT_SECONDS)
    lookahead = Lookahead(questions.conversation, lambda turn: target.body(turn, History("chat")))
    verdicts: list[bool] = []

    def judge(answer: Answer, record: Record) -> None:
        verdicts.append(questions.is_right(record.conversation, "".join(answer.contents)))

    # As many are warm-up as start together: their burst is not what users meet later.
    await lookahead.prepare(num_requests + users)
    extent = Extent(num_requests, None, warmup_requests=users)
    drive = Drive(Sender(client, target), lookahead, extent, keep_texts=True, recount=judge)
    cpu_before, began = time.process_time(), time.perf_counter()
    try:
        await drive.closed_loop(users, 0.0)
    finally:
        client.close()
    cpu_seconds, wall_seconds = time.process_time() - cpu_before, time.perf_counter() - began
    drive.finish_counts()
    random = numpy.random.default_rng(0)
    summary = summarize(drive.records, {}, CONFIDENCE, random, cpu_seconds, wall_seconds, client.num_opened)
    return _point(row, users, summary, statistics.fmean(verdicts) if verdicts else 0.0)


def _fields(asking: Asking) -> dict[str, object]:
    fields: dict[str, object] = {
        "model": MODEL_NAME,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": asking.is_streamed,
    }
    if asking.is_streamed:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return fields


def _point(row: Row, users: int, summary: Summary, right_share: float) -> Point:
    if summary.num_failed:
        kinds = {kind: one.example for kind, one in summary.failures.items()}
        print(f"{row.name}, {users} users: {summary.num_failed} requests failed: {kinds}", file=sys.stderr)
    ttft, itl, e2e = (_latency(summary, name) for name in ("ttft", "itl", "e2e"))
    tokens = summary.tokens
    if ttft is None or e2e is None or tokens is None:
        raise SystemExit(f"{row.name}, {users} users: no request was answered")
    return Point(
        row.name,
        users,
        summary.num_measured,
        summary.num_failed,
        ttft,
        itl if row.asking.is_streamed else None,
        e2e,
        summary.output_tokens_per_second,
        summary.completed_per_second,
        (tokens.cached_tokens or 0) / max(1, tokens.input_tokens),
        right_share,
    )


def _latency(summary: Summary, name: str) -> Latency | None:
    found = summary.latency_milliseconds[name]
    if found is None:
        return None
    return Latency(*(found.percentiles[percent].value for percent in (50, 95, 99)))


def commit() -> str:
    """Of this checkout, as git names it."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.strip()
