"""What looking after many services costs: one operator, a real API server, no kubelet.

    python -m benchmarks.operator.run [--services 100 300 1000] [--seconds 60] [--edits 300] [--output FILE]

For each number of services: the services and three pods each (a gateway and two replicas) are written to the
API server; the pods' samples come from one process that stands for all of them. Then a fresh `headway
operator` process is started and measured:

- full resync: from its start until it has passed over every service;
- for some time with nothing to do: processor time, calls to the API server, samples taken;
- its largest resident size from its start to its end (`VmHWM`, Linux);
- one edit after the other: from the API server's answer until the status tells of that generation.

The machine carries the API server, etcd and the pods' process as well; the processor time is the operator's
own.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import psutil
import yaml
from benchmarks.operator import objects
from benchmarks.operator.report import page
from e2e.api_server import running_api_server
from e2e.operator_process import OperatorProcess, running_operator

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.names import HTTP_PORT, KIND
from headway_operator.state import ServiceKey

ROOT = Path(__file__).resolve().parents[2]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OWN_NAMESPACE = "bench-system"
INTERVAL_SECONDS = 5.0
# Twice the time between two checkpoints: until then passes still write what a fresh operator writes once.
SETTLE_SECONDS = 120.0
FACT_SECONDS = 900.0
EDIT_SECONDS = 30.0
PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """One row. cores: processor seconds per second. Latencies in seconds, memory in MiB."""

    services: int
    pods: int
    resync_seconds: float
    cores: float
    memory_mebibytes: float
    api_calls_per_hour: float
    api_calls_per_hour_by_method: dict[str, float]
    samples_per_second: float
    samples_wanted_per_second: float
    pass_milliseconds: float
    queue_p99_seconds: float
    reaction_p50_seconds: float
    reaction_p99_seconds: float


async def measure(
    api: KubernetesApi, kubeconfig: Path, options: argparse.Namespace, write: Callable[[list[Measured]], None]
) -> list[Measured]:
    """One row for each number of services, on the same API server; `write` gets those that there are."""
    for path in CRDS:
        await api._call("POST", CRD_PATH, body=yaml.safe_load(path.read_text()))
    await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": OWN_NAMESPACE}})
    await _until(lambda: _is_served(api))
    rows: list[Measured] = []
    made = 0
    for count in options.services:
        keys = objects.keys(count)
        await objects.make_services(api, keys[made:])
        async with _operator(kubeconfig) as operator:
            await _until(functools.partial(_has_passed, operator, count))
            revisions = await _revisions(api, keys)
            numbered = [(n, key, revisions[key]) for n, key in enumerate(keys)][made:]
            await objects.make_pods(api, numbered)
            await _until(functools.partial(_all_ready, api, count))
        made = count
        rows.append(await _measure(api, kubeconfig, keys, options))
        print(json.dumps(asdict(rows[-1])), flush=True)
        write(rows)
    return rows


async def _measure(
    api: KubernetesApi, kubeconfig: Path, keys: list[ServiceKey], options: argparse.Namespace
) -> Measured:
    began = time.monotonic()
    async with _operator(kubeconfig) as operator:
        await _until(lambda: _has_passed(operator, len(keys)))
        resync = time.monotonic() - began
        await asyncio.sleep(SETTLE_SECONDS)
        process = psutil.Process(operator.process.pid)
        before, cpu, samples, at = await _numbers(operator), _cpu(process), await _samples(), time.monotonic()
        await asyncio.sleep(options.seconds)
        elapsed = time.monotonic() - at
        after, cpu = await _numbers(operator), _cpu(process) - cpu
        samples = await _samples() - samples
        reactions = await _reactions(api, keys, options.edits)
        memory = _peak_bytes(operator.process.pid)
    calls = {
        method: (after.calls.get(method, 0.0) - before.calls.get(method, 0.0)) * 3600 / elapsed
        for method in after.calls
    }
    passes = after.passes - before.passes
    return Measured(
        services=len(keys),
        pods=len(keys) * (objects.REPLICAS + 1),
        resync_seconds=round(resync, 1),
        cores=round(cpu / elapsed, 3),
        memory_mebibytes=round(memory / 2**20, 1),
        api_calls_per_hour=round(sum(calls.values())),
        api_calls_per_hour_by_method={method: round(one) for method, one in sorted(calls.items())},
        samples_per_second=round(samples / elapsed, 1),
        samples_wanted_per_second=round(len(keys) * (objects.REPLICAS + 1) / INTERVAL_SECONDS, 1),
        pass_milliseconds=round((after.pass_seconds - before.pass_seconds) / max(1.0, passes) * 1000, 1),
        queue_p99_seconds=_quantile(before.queue, after.queue, 0.99),
        reaction_p50_seconds=round(statistics.median(reactions), 3),
        reaction_p99_seconds=round(sorted(reactions)[int(0.99 * (len(reactions) - 1))], 3),
    )


async def _reactions(api: KubernetesApi, keys: list[ServiceKey], edits: int) -> list[float]:
    """Seconds from an edit until the status tells of it, for so many services one after the other."""
    chooser, result = random.Random(1), []
    for number in range(edits):
        key = chooser.choice(keys)
        body = {"spec": {"scaling": {"stabilizationSeconds": 60 + number}}}
        changed = await api.patch(KIND, key.namespace, key.name, body)
        assert changed is not None, "the benchmark's services stay"
        edited_at, want = time.monotonic(), changed["metadata"]["generation"]
        while True:
            found = await api.get(KIND, key.namespace, key.name) or {}
            seconds = time.monotonic() - edited_at
            if (found.get("status") or {}).get("observedGeneration") == want:
                break
            if seconds > EDIT_SECONDS:
                raise RuntimeError(f"{key}: generation {want} was not seen within {EDIT_SECONDS:g} s")
            await asyncio.sleep(0.02)
        result.append(seconds)
        await asyncio.sleep(PAUSE_SECONDS)
    return result


@dataclass(frozen=True, slots=True)
class _Numbers:
    """From the operator's page of metrics."""

    passes: float
    pass_seconds: float
    calls: dict[str, float]
    queue: dict[float, float]


async def _numbers(operator: OperatorProcess) -> _Numbers:
    passes = pass_seconds = 0.0
    calls: dict[str, float] = {}
    queue: dict[float, float] = {}
    for line in (await operator.metrics()).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("headway_operator_reconcile_seconds_count"):
            passes += float(value)
        elif name.startswith("headway_operator_reconcile_seconds_sum"):
            pass_seconds += float(value)
        elif name.startswith("headway_operator_api_seconds_count"):
            method = name.split('method="')[1].split('"')[0]
            calls[method] = calls.get(method, 0.0) + float(value)
        elif name.startswith("headway_operator_queue_seconds_bucket"):
            queue[float(name.split('le="')[1].split('"')[0])] = float(value)
    return _Numbers(passes, pass_seconds, calls, queue)


def _quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper edge of the bucket in which the quantile lies."""
    counts = {edge: after[edge] - before.get(edge, 0.0) for edge in sorted(after)}
    total = max(counts.values(), default=0.0)
    return next((edge for edge, count in counts.items() if count >= share * total), 0.0)


@contextlib.asynccontextmanager
async def _operator(kubeconfig: Path) -> AsyncIterator[OperatorProcess]:
    options = [f"--interval-seconds={INTERVAL_SECONDS}", "--log-level=warning"]
    async with running_operator(kubeconfig, OWN_NAMESPACE, *options, watches_all=True) as operator:
        yield operator
    if operator.process.returncode != 0:
        raise RuntimeError(
            f"the operator ended with {operator.process.returncode}: {operator.output[-2000:]}"
        )


async def _has_passed(operator: OperatorProcess, services: int) -> bool:
    if operator.process.returncode is not None:
        raise RuntimeError("the operator has ended")
    with contextlib.suppress(aiohttp.ClientError):
        status, health = await operator.health()
        wanted = (await operator.metrics()).count(
            "\nheadway_operator_replicas_wanted{"
        )  # one by one, as passed
        return status == 200 and health["services"] == services == wanted
    return False


async def _revisions(api: KubernetesApi, keys: list[ServiceKey]) -> dict[ServiceKey, str]:
    found: dict[ServiceKey, str] = {}
    for item in await api.list(KIND, ""):
        key = ServiceKey(item["metadata"]["namespace"], item["metadata"]["name"])
        found[key] = item["status"]["revision"]["hash"]
    return {key: found[key] for key in keys}


async def _all_ready(api: KubernetesApi, services: int) -> bool:
    ready = [
        one
        for one in await api.list(KIND, "")
        if (one.get("status") or {}).get("readyReplicas") == objects.REPLICAS
    ]
    return len(ready) == services


async def _is_served(api: KubernetesApi) -> bool:
    with contextlib.suppress(ClusterError):
        await api.list(KIND, "")
        return True
    return False


async def _until(fact: Callable[[], Awaitable[bool]]) -> None:
    """Poll a fact."""
    deadline = time.monotonic() + FACT_SECONDS
    while not await fact():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not so within {FACT_SECONDS:g} s")
        await asyncio.sleep(0.25)


def _peak_bytes(process_id: int) -> int:
    """The largest resident size that a process has had since its start."""
    status = Path(f"/proc/{process_id}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _samples() -> int:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{HTTP_PORT}/count") as response:
            return int(await response.text())


async def _run(options: argparse.Namespace, write: Callable[[list[Measured]], None]) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder, running_api_server(Path(folder)) as kubeconfig:
        stub = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.operator.stub", str(HTTP_PORT)),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert stub.stdout is not None, "it was asked for"
            if not await stub.stdout.readline():
                raise RuntimeError(f"the pods' process did not start: is port {HTTP_PORT} free?")
            async with await KubernetesApi.connect(kubeconfig) as api:
                return await measure(api, kubeconfig, options, write)
        finally:
            if stub.returncode is None:
                stub.terminate()
            await stub.wait()


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--services", type=int, nargs="+", default=[100, 300, 1000], help="rising numbers")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the time with nothing to do")
    parser.add_argument("--edits", type=int, default=300, help="edits whose reaction is timed")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "operator" / "results.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what was started
    asyncio.run(_run(options, lambda rows: _write(rows, options, load)))
    print(options.output.read_text())


def _write(rows: list[Measured], options: argparse.Namespace, load: float) -> None:
    """The page, of the rows that there are: a run that is ended early says what it did not reach."""
    about = {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after, the benchmark's own included",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip(),
        "command": f"python -m benchmarks.operator.run --services {' '.join(map(str, options.services))} "
        f"--seconds {options.seconds:g} --edits {options.edits}",
    }
    if missing := options.services[len(rows) :]:
        about["not reached"] = ", ".join(f"{count:,} services" for count in missing)
    options.output.write_text(page([asdict(row) for row in rows], about))


if __name__ == "__main__":
    main()
