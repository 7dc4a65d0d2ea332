"""Runs a benchmark's points one after the other against one server; prints and writes nothing but progress.

An interrupt (SIGINT or SIGTERM) ends the point under way and the sweep; what was measured until then is
returned.
"""

import asyncio
import contextlib
import gc
import math
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from headway_bench.answer import Answer
from headway_bench.config import BenchConfig
from headway_bench.drive import Drive, Lookahead
from headway_bench.errors import NotReadyError
from headway_bench.http_client import Client
from headway_bench.material import Files, Material, arrivals_of, learn, workload_of
from headway_bench.record import INTERRUPTED, Record
from headway_bench.sender import History, Sender
from headway_bench.spread import fixed
from headway_bench.summary import Summary, summarize
from headway_bench.workload import Stream, random_stream

PROGRESS_SECONDS = 5.0
READY_POLL_SECONDS = 0.5
PREPARED_FOR_UNKNOWN = 1000
_COLLECT_AFTER = 100_000
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: at a rate in 1/s, with so many users, or (neither) as the trace has it."""

    number: int
    request_rate: float | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class PointResult:
    """What became of it. `records` hold the warm-up too."""

    point: Point
    summary: Summary
    records: tuple[Record, ...]
    num_prepared: int


@dataclass(frozen=True, slots=True)
class SessionResult:
    """All points that were begun; the last one is partial when `was_interrupted`."""

    material: Material
    points: tuple[PointResult, ...]
    was_interrupted: bool


def points_of(config: BenchConfig) -> tuple[Point, ...]:
    """The runs that the flags ask for."""
    if config.load.request_rates:
        return tuple(Point(i, rate, None) for i, rate in enumerate(config.load.request_rates))
    if config.load.concurrencies:
        return tuple(Point(i, None, users) for i, users in enumerate(config.load.concurrencies))
    return (Point(0, None, None),)


async def run_session(config: BenchConfig, files: Files) -> SessionResult | None:
    """Every point; None when it was interrupted before the first one began."""
    client = Client(config.server.address, config.server.headers)
    interrupted = asyncio.Event()
    _raise_file_limit()
    results: list[PointResult] = []
    try:
        with _on_interrupt(interrupted):
            material = await _unless(interrupted, _learn_when_ready(client, config, files))
            if material is None:
                return None
            for point in points_of(config):
                if point.number:
                    await _wait(interrupted, config.load.pause_seconds)
                if interrupted.is_set():
                    break
                results.append(await _run_point(client, config, material, point, interrupted))
    finally:
        client.close()
    return SessionResult(material, tuple(results), interrupted.is_set())


async def _learn_when_ready(client: Client, config: BenchConfig, files: Files) -> Material:
    """As `learn`, asking again while the server is not there or still starting; says once that it waits."""
    waits_seconds = config.server.ready_timeout_seconds
    began, has_told = time.monotonic(), False
    while True:
        try:
            return await learn(client, config, files)
        except NotReadyError as error:
            left = began + waits_seconds - time.monotonic()
            if left <= 0:
                waited = f" (waited {waits_seconds:g} s, --ready-timeout-seconds)" if has_told else ""
                raise NotReadyError(f"{error}{waited}") from error
            if not has_told:
                print(
                    f"headway bench: waiting up to {waits_seconds:g} s: {error}", file=sys.stderr, flush=True
                )
                has_told = True
            await asyncio.sleep(min(READY_POLL_SECONDS, left))


async def _run_point(
    client: Client, config: BenchConfig, material: Material, point: Point, interrupted: asyncio.Event
) -> PointResult:
    sender = Sender(client, material.first.target)
    lookahead = Lookahead(
        workload_of(config, material, point.number),
        lambda turn: sender.target.body(turn, History(sender.target.endpoint)),
    )
    expected = _expected_conversations(config, material, point)
    num_prepared = await _unless(interrupted, lookahead.prepare(expected)) or 0
    recount = _recounting(material.files)
    drive = Drive(
        sender,
        lookahead,
        config.load.extent,
        keep_texts=recount is not None or config.prompts.turns != fixed(1),
        recount=recount,
    )
    opened_before, cpu_before, began = client.num_opened, time.process_time(), time.perf_counter()
    async with _progress(drive, config, point):
        with _quiet_collector():
            if point.concurrency is not None:
                load = drive.closed_loop(point.concurrency, config.load.ramp_seconds)
            else:
                load = drive.open_loop(arrivals_of(config, material.files, point.request_rate, point.number))
            await _unless(interrupted, load)
    cpu_seconds, wall_seconds = time.process_time() - cpu_before, time.perf_counter() - began
    drive.finish_counts()
    summary = summarize(
        drive.records,
        config.report.objectives,
        config.report.confidence,
        random_stream(config.seed, point.number, Stream.BOOTSTRAP),
        cpu_seconds,
        wall_seconds,
        client.num_opened - opened_before,
    )
    return PointResult(point, summary, tuple(drive.records), num_prepared)


def _expected_conversations(config: BenchConfig, material: Material, point: Point) -> int:
    extent, expected = config.load.extent, math.inf
    if extent.num_requests is not None:
        expected = extent.num_requests + extent.warmup_requests
    if point.request_rate is not None and extent.duration_seconds is not None:
        seconds = extent.duration_seconds + extent.warmup_seconds
        expected = min(expected, point.request_rate * seconds * 1.2 + extent.warmup_requests)
    if point.concurrency is None and point.request_rate is None and material.files.requests:
        expected = min(expected, len(material.files.requests))
    return PREPARED_FOR_UNKNOWN if math.isinf(expected) else math.ceil(expected)


def _recounting(files: Files) -> Callable[[Answer, Record], None] | None:
    """With a tokenizer, events whose number of tokens the server did not tell are counted by their texts."""
    tokenizer = files.tokenizer
    if tokenizer is None:
        return None

    def recount(answer: Answer, record: Record) -> None:
        if record.count_source == "events" and record.completion_tokens != answer.num_counted:
            assert answer.texts is not None, "texts are kept where they are counted"
            for i, text in enumerate(answer.texts):
                record.token_counts[i] = max(1, tokenizer.count(text))
            record.count_source = "tokenizer"

    return recount


async def _unless(interrupted: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The work's result; None when the interrupt came first, once the work has been cancelled and ended."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _wait(interrupted: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await interrupted.wait()


@contextlib.contextmanager
def _on_interrupt(interrupted: asyncio.Event) -> Iterator[None]:
    """The first signal ends the load and lets what was measured be told; the second ends the process."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep the garbage collector from walking over thousands of prepared prompts while answers are timed."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def _progress(drive: Drive, config: BenchConfig, point: Point) -> AsyncIterator[None]:
    """A line on standard error every few seconds, unless told to be quiet."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            sent, pending = len(drive.records), drive.num_in_flight
            failed = sum(record.failure not in ("", INTERRUPTED) for record in drive.records)
            print(
                f"{describe_point(point)}: {time.perf_counter() - drive.started_at:.0f} s, {sent} sent, "
                f"{sent - pending} ended, {failed} failed, {pending} under way",
                file=sys.stderr,
                flush=True,
            )

    if config.report.quiet:
        yield
        return
    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()


def describe_point(point: Point) -> str:
    """What a point was asked for, in a few words."""
    if point.request_rate is not None:
        return f"{point.request_rate:g} requests/s"
    return "trace" if point.concurrency is None else f"{point.concurrency} users"


def _raise_file_limit() -> None:
    """An open loop against a slow server holds thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
