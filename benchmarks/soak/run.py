"""Minutes of random traffic against one real server; then the books must balance.

    python -m benchmarks.soak.run --seconds 600 --seed 1 [--users 24] [--out results.json]

Starts `headway serve` with a KV cache so small that sequences are preempted, keeps users at it (see
`traffic.py`) while an operator changes the limits all the time, then lets everything end and checks:

- no fault was seen by any user, and every accepted request ended exactly once;
- no block is in use, nothing runs, nothing waits, and the counters add up;
- the memory of both processes is flat once they are warm (judged in runs of five minutes and more);
- the server drains and exits 0, and its log shows no traceback.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import psutil
from benchmarks.soak.traffic import Seen, User
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

# Of a group of exceptions, too.
TRACEBACK = re.compile(r"^[ +|]*(Exception Group )?Traceback \(most recent", re.MULTILINE)
AUDIENCE = "soak/soak"
START_TIMEOUT_SECONDS = 120.0
END_TIMEOUT_SECONDS = 90.0
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 512
MAX_MODEL_LEN = 512
# 560 tokens: one long sequence fits, sixteen of any length do not.
KV_CACHE_BYTES = 560 * 4 * 2 * 2 * 64 * 2
SERVER_ARGUMENTS = (
    "--port=0",
    "--device=cpu",
    "--num-threads=1",
    f"--max-model-len={MAX_MODEL_LEN}",
    f"--max-num-seqs={MAX_NUM_SEQS}",
    f"--max-num-batched-tokens={MAX_NUM_BATCHED_TOKENS}",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-waiting=32",
    f"--admin-audience={AUDIENCE}",
)
# Growth of a process' resident memory between the second and the last fifth of the run, once it is warm:
# oneDNN keeps up to 1,024 kernels, which random traffic takes minutes to make.
WARM_AFTER_SECONDS = 300.0
MAX_GROWTH_BYTES = 24 * 2**20
MAX_GROWTH_SHARE = 0.04
GAUGES_AT_THE_END = ("kv_blocks_used", "running", "waiting")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of one process: medians of the second and of the last fifth of the run."""

    early: int
    late: int

    @property
    def is_flat(self) -> bool:
        return self.late - self.early <= max(MAX_GROWTH_BYTES, MAX_GROWTH_SHARE * self.early)


@dataclass(frozen=True, slots=True)
class Books:
    """What the engine says once everybody has gone.

    left: what still runs, waits or is in use. ended: requests, in whatever way.
    """

    counters: dict[str, int]
    left: dict[str, int]
    ended: int

    def told(self) -> str:
        if not self.left:
            return "at the end: not known"
        blocks, running, waiting = (self.left[name] for name in GAUGES_AT_THE_END)
        received = self.counters["received"]
        sign = "=" if received == self.ended else "but"
        return (
            f"at the end: {blocks} blocks in use, {running} running, {waiting} waiting; "
            f"received {received} {sign} ended {self.ended}"
        )


NO_BOOKS = Books({}, {}, 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one soak came to. It is good if `problems` is empty."""

    seconds: float
    seed: int
    users: int
    requests: dict[str, int]
    refused_for_load: int
    limit_changes: int
    books: Books
    memory: dict[str, Memory]
    problems: list[str]


class Server:
    """A `headway serve` process and the operator's key to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, key: Ed25519PrivateKey, log: Path
    ) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._key = key
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def headers(self) -> dict[str, str]:
        now = int(time.time())
        claims = {"iss": "headway-operator", "aud": AUDIENCE, "iat": now, "exp": now + 60}
        return {"Authorization": f"Bearer {jwt.encode(claims, self._key, algorithm='EdDSA')}"}

    def resident_bytes(self) -> dict[str, int]:
        server = psutil.Process(self.process.pid)
        children = server.children(recursive=True)
        engine = {"engine": children[0].memory_info().rss} if children else {}
        return {"http": server.memory_info().rss, **engine}


@contextlib.contextmanager
def running_server(arguments: Sequence[str] = ()) -> Iterator[Server]:
    """The bundled model behind a real server, ready; it is gone afterwards whatever happens."""
    key = Ed25519PrivateKey.generate()
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
        folder = Path(name)
        (folder / "key.pem").write_bytes(
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
        own = [f"--admin-public-key-file={folder / 'key.pem'}", f"--port-file={folder / 'port'}"]
        command = [sys.executable, "-m", "headway", "serve", "bundled://headway-tiny"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *SERVER_ARGUMENTS, *own, *arguments], stdout=log, stderr=log
            )
        try:
            port = _wait_for_port(process, folder)
            server = Server(process, port, key, folder / "log")
            yield server
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], folder: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not (folder / "port").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {(folder / 'log').read_text(encoding='utf-8')}")
        time.sleep(0.05)
    return int((folder / "port").read_text())


async def soak(server: Server, seconds: float, seed: int, num_users: int, num_requests: int = 0) -> Outcome:
    """Traffic for `seconds` and until `num_requests` are done, an orderly end, and what was found."""
    seen = Seen()
    problems: list[str] = []
    stop = asyncio.Event()
    samples: list[dict[str, int]] = []
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=30)) as session:
        await asyncio.to_thread(wait_until_ready, server)
        started = time.monotonic()
        users = [
            asyncio.ensure_future(User(server.url, {}, f"{seed}/{index}", seen, MAX_MODEL_LEN).run(stop))
            for index in range(num_users)
        ]
        limits = asyncio.ensure_future(_change_limits(session, server, seed, stop, problems))
        while server.process.poll() is None and (
            time.monotonic() - started < seconds or seen.done.total() < num_requests
        ):
            samples.append(server.resident_bytes())
            await asyncio.sleep(min(1.0, seconds / 20))
        took = time.monotonic() - started
        stop.set()
        await asyncio.gather(*users)
        limit_changes, books = 0, NO_BOOKS
        try:
            limit_changes = await limits
            books = await _check_books(session, server, problems)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problems.append(f"the admin API does not answer: {type(error).__name__}: {error}")
    if server.process.poll() is not None:
        problems.insert(0, f"the server ended under load; the end of its log:\n{server.log[-4000:]}")
    server.process.terminate()
    try:
        status: int | str = await asyncio.to_thread(server.process.wait, END_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        status = "no exit"
    if status != 0:
        problems.append(f"after SIGTERM the server ended with {status}, not 0")
    if shown := tracebacks(server.log):
        problems.append("the log shows a traceback:\n" + shown[:2000])
    memory = _memory(samples)
    if took >= WARM_AFTER_SECONDS:
        problems += [
            f"memory of the {name} process grew: {one}" for name, one in memory.items() if not one.is_flat
        ]
    return Outcome(
        round(took, 1),
        seed,
        num_users,
        dict(seen.done),
        seen.num_refused_for_load,
        limit_changes,
        books,
        memory,
        [*problems, *seen.faults],
    )


def wait_until_ready(server: Server) -> None:
    """Returns once the model is loaded. RuntimeError, with the log, if it never is."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        with contextlib.suppress(urllib.error.HTTPError):
            with urllib.request.urlopen(f"{server.url}/ready", timeout=10):
                return
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not get ready: {server.log}")
        time.sleep(0.05)


async def _change_limits(
    session: aiohttp.ClientSession, server: Server, seed: int, stop: asyncio.Event, problems: list[str]
) -> int:
    rng = random.Random(f"limits/{seed}")
    num_changes = 0
    while not stop.is_set():
        seqs = rng.choice((1, 2, 4, 8, MAX_NUM_SEQS, MAX_NUM_SEQS + 1))
        tokens = rng.choice((16, 64, 256, MAX_NUM_BATCHED_TOKENS))
        body = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        want = 422 if seqs > MAX_NUM_SEQS or tokens < seqs else 200
        async with session.patch("/admin/limits", json=body, headers=server.headers()) as response:
            if response.status != want:
                problems.append(f"PATCH {body} answers {response.status}, not {want}")
        num_changes += 1
        await asyncio.sleep(rng.uniform(0.1, 1.0))
    top = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    async with session.patch("/admin/limits", json=top, headers=server.headers()) as response:
        if response.status != 200:
            problems.append(f"PATCH {top} answers {response.status} at the end")
    return num_changes


async def _check_books(session: aiohttp.ClientSession, server: Server, problems: list[str]) -> Books:
    """Wait for what clients left behind to be gone, then compare what came with what ended."""
    deadline = time.monotonic() + 30
    while True:
        async with session.get("/admin/sample", headers=server.headers()) as response:
            sample = await response.json()
        gauges: dict[str, Any] = sample["gauges"]
        left = {name: gauges[name] for name in GAUGES_AT_THE_END}
        if not any(left.values()) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    if any(left.values()):
        problems.append(f"left behind after everybody had gone: {left}")
    counters: dict[str, int] = sample["counters"]
    async with session.get("/metrics") as response:
        page = await response.text()
    refused = sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in page.splitlines()
        if line.startswith("headway_requests_rejected_total{")
    )
    ended = counters["finished"] + counters["aborted"] + counters["errors"] + refused
    if ended != counters["received"]:
        problems.append(f"{counters['received']} requests were received, but {ended} ended: {counters}")
    if counters["errors"]:
        problems.append(f"{counters['errors']} requests ended with an error of the engine")
    if not counters["preemptions"]:
        problems.append("nothing was preempted: the soak is too light to show anything")
    return Books(counters, left, ended)


def _memory(samples: list[dict[str, int]]) -> dict[str, Memory]:
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    names = set.intersection(*(set(sample) for sample in samples))
    return {
        name: Memory(
            int(statistics.median(sample[name] for sample in early)),
            int(statistics.median(sample[name] for sample in late)),
        )
        for name in sorted(names)
    }


def tracebacks(log: str) -> str:
    """The log from the first traceback on; "" without one. The word may be in what a client has asked for."""
    found = TRACEBACK.search(log)
    return log[found.start() :] if found else ""


def report(outcome: Outcome) -> str:
    total = sum(outcome.requests.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.requests.items()))
    memory = "; ".join(
        f"{name} {one.early / 2**20:.0f} -> {one.late / 2**20:.0f} MiB"
        for name, one in outcome.memory.items()
    )
    return "\n".join(
        [
            f"{outcome.seconds:g} s, seed {outcome.seed}, {outcome.users} users: {total} requests ({kinds})",
            f"refused for load: {outcome.refused_for_load}; changes of limits: {outcome.limit_changes}",
            f"counters: {outcome.books.counters}",
            outcome.books.told(),
            f"resident memory: {memory}",
            *(f"PROBLEM {problem}" for problem in outcome.problems[:40]),
            f"problems: {len(outcome.problems)}",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.run", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--out", type=Path, help="write the outcome there as JSON")
    options = parser.parse_args(arguments)
    with running_server() as server:
        outcome = asyncio.run(soak(server, options.seconds, options.seed, options.users))
    print(report(outcome))
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
