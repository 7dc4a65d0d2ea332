"""The controller on a real cluster, beside a fixed number of replicas and beside the formula of an HPA.

    python -m e2e.cluster run -- python -m benchmarks.live.run [--trace FILE] [--rounds 2] [--output PAGE]

The same ten minutes of a trace, replayed faster against real pods with the bundled model: once under Headway,
once with as many replicas all the time as Headway had on average, once under a loop that writes `/scale` from
the requests that wait; then again, as often as there are rounds. What one replica can do is measured first,
and the trace made as dense as a share of what all of them can.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.live import page
from benchmarks.live.excerpt import Shape, excerpt, write
from benchmarks.live.outcome import Outcome, outcome_of
from benchmarks.live.policies import (
    FIXED,
    HEADWAY,
    WAITING,
    Setting,
    WaitingScaler,
    manifest,
    rounded_mean,
    scaling,
)
from benchmarks.live.watch import Moment, watching
from e2e.installation import has_cluster, installed_chart, the_cluster
from e2e.kubernetes import Kubernetes, eventually
from e2e.observed_service import NAME, NAMESPACE, RUNTIME_PODS, condition, runtime_pods, status

from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.names import KIND

CALIBRATION_SECONDS = 15.0
CALIBRATION_USERS_PER_PLACE = 2
READY_SECONDS = 180.0
GONE_SECONDS = 120.0
METRICS_PORT = 8000
PAGE_SECONDS = 2.0
NO_PAGE = (aiohttp.ClientError, TimeoutError, AssertionError, subprocess.TimeoutExpired)
WAITING_METRICS = ("headway_requests_waiting", "headway_gateway_waiting")
GATEWAY_PODS = RUNTIME_PODS.replace("component=runtime", "component=gateway")


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. seconds: until the last answer. changes: lines of what was decided, with its second."""

    policy: str
    round: int
    replicas_at_first: int
    outcome: Outcome
    seconds: float
    pod_seconds: float
    mean_replicas: float
    most_replicas: int
    reversals: int
    changes: list[str]


class Bench:
    """The cluster, the trace, and what there is to do with both."""

    def __init__(self, kubernetes: Kubernetes, api: KubernetesApi, setting: Setting, folder: Path) -> None:
        self._kubernetes, self._api, self._setting, self._folder = kubernetes, api, setting, folder

    async def capacity(self, trace_file: Path) -> float:
        """Requests a second of one replica that is never without work, with these lengths."""
        async with AsyncExitStack() as stack:
            url = await self._serve(stack, FIXED, 1)
            users = CALIBRATION_USERS_PER_PLACE * self._setting.max_num_seqs
            flags = [f"--concurrency={users}", f"--duration-seconds={CALIBRATION_SECONDS:g}"]
            point = await self._load(url, trace_file, *flags)
            return float(point["summary"]["completed_per_second"])

    async def replay(self, policy: str, number: int, replicas: int, trace_file: Path, seconds: float) -> Run:
        """One run. replicas: that a fixed number, or the formula, begins with."""
        async with AsyncExitStack() as stack:
            url = await self._serve(stack, policy, replicas)
            watch = await stack.enter_async_context(watching(self._api))
            if policy == WAITING:
                limit = aiohttp.ClientTimeout(total=PAGE_SECONDS)
                session = await stack.enter_async_context(aiohttp.ClientSession(timeout=limit))
                scaler = WaitingScaler(self._setting.waiting, self._setting.most_replicas)
                read, speed = self._reader(session), self._setting.speed
                await stack.enter_async_context(scaling(scaler, speed, read, self._write_scale))
            begun_at = asyncio.get_running_loop().time()
            point = await self._load(url, trace_file)
            took = asyncio.get_running_loop().time() - begun_at
        found = outcome_of(point, self._setting.ttft, self._setting.tpot)
        # All pay for the same time, that of the trace, however far behind they are at its end.
        pod_seconds = watch.pod_seconds(0.0, seconds)
        changes = [_told(one) for one in watch.changes()]
        most = max(one.pods for one in watch.moments)
        mean = pod_seconds / seconds
        reversals = watch.reversals()
        return Run(policy, number, replicas, found, took, pod_seconds, mean, most, reversals, changes)

    async def _serve(self, stack: AsyncExitStack, policy: str, replicas: int) -> str:
        """Until the stack is unwound; its URL."""
        on_this_machine = self._kubernetes.has_pod_network
        wanted = manifest(policy, self._setting, replicas, on_this_machine=on_this_machine)
        await asyncio.to_thread(self._kubernetes.apply, wanted)
        stack.push_async_callback(self._remove)
        count = 1 if policy == HEADWAY else replicas
        await eventually("the service is ready", READY_SECONDS, lambda: self._is_ready(count))
        return stack.enter_context(self._kubernetes.service_url(NAME, NAMESPACE))

    def _is_ready(self, count: int) -> bool:
        is_so = condition(self._kubernetes, "Ready").startswith("True")
        return is_so and status(self._kubernetes).get("readyReplicas") == count

    async def _remove(self) -> None:
        await self._api.delete(KIND, NAMESPACE, NAME)
        await eventually("its pods are gone", GONE_SECONDS, lambda: not runtime_pods(self._kubernetes))

    async def _load(self, url: str, trace_file: Path, *flags: str) -> dict[str, Any]:
        """One point of `headway bench`, a process of its own."""
        output = self._folder / "bench.json"
        slo = ["--slo", f"ttft:{self._setting.ttft}", f"tpot:{self._setting.tpot}"]
        command = [
            *(sys.executable, "-m", "headway", "bench", f"--base-url={url}", f"--model={NAME}"),
            *("--endpoint=completions", f"--trace={trace_file}", "--ignore-eos", "--quiet"),
            *("--warmup-requests=4", f"--json={output}", "--save-requests", *slo, *flags),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if (returncode := await process.wait()) != 0:
            raise SystemExit(f"headway bench ended with {returncode}; its message stands above")
        (point,) = json.loads(output.read_text(encoding="utf-8"))["points"]
        return dict(point)

    def _reader(self, session: aiohttp.ClientSession) -> Callable[[], Any]:
        """Reads the pages of all pods, and how many replicas the service asks for."""

        async def page_of(pod: dict[str, Any]) -> str:
            name, address = pod["metadata"]["name"], pod["status"]["podIP"]
            if not self._kubernetes.has_pod_network:
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:{METRICS_PORT}/proxy/metrics"
                return await asyncio.to_thread(self._kubernetes.raw, path)
            async with session.get(f"http://{address}:{METRICS_PORT}/metrics") as response:
                return await response.text()

        async def read() -> tuple[int, int]:
            waiting = 0.0
            for labels in (RUNTIME_PODS, GATEWAY_PODS):
                for pod in await self._api.list("Pod", NAMESPACE, labels):
                    # One that starts or ends has none: the formula goes without, as Prometheus would.
                    if pod["status"].get("podIP"):
                        with contextlib.suppress(*NO_PAGE):
                            waiting += waiting_on(await page_of(pod))
            service = await self._api.get(KIND, NAMESPACE, NAME) or {}
            return round(waiting), int(service["spec"]["replicas"])

        return read

    async def _write_scale(self, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        await self._api.patch(KIND, NAMESPACE, NAME, body, subresource="scale")


def _told(moment: Moment) -> str:
    limits = f"{moment.max_num_seqs} sequences, {moment.max_num_batched_tokens} tokens"
    asked = f"{moment.at_seconds:5.0f} s: {moment.wanted} wanted, {moment.ready} ready, {limits}"
    return f"{asked}; {moment.cause} {moment.message}".rstrip("; ")


def waiting_on(metrics: str) -> float:
    """Requests that wait, by one page of metrics."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.partition("{")[0].partition(" ")[0] in WAITING_METRICS
    )


async def measure(
    options: argparse.Namespace, folder: Path, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All runs, and what must be known to read them. save: gets what there is after each run."""
    setting, shape = setting_of(options), shape_of(options)
    kubernetes = the_cluster()
    trace, trace_file = excerpt(shape), folder / "trace.jsonl"
    write(trace, trace_file)
    interval = max(1.0, round(options.interval_seconds / setting.speed, 2))
    results: dict[str, Any] = {
        "trace": trace.name if shape.trace is None else shape.trace.name,
        "shape": {**asdict(shape), "trace": None if shape.trace is None else shape.trace.name},
        "setting": asdict(setting),
        "load": options.load,
        "interval_seconds": interval,
        "runs": [],
    }
    with installed_chart(kubernetes, f"intervalSeconds={interval:g}"):
        async with await KubernetesApi.connect(context=kubernetes.context or None) as api:
            bench = Bench(kubernetes, api, setting, folder)
            capacity = options.capacity or await bench.capacity(trace_file)
            rate = options.load * setting.most_replicas * capacity
            _say(f"one replica: {capacity:.1f} requests/s; the excerpt gets {rate:.1f} on average")
            results |= {"capacity": capacity, "requests_per_second": rate}
            trace = excerpt(shape, rate / trace.requests_per_second)
            write(trace, trace_file)
            fixed = options.fixed
            for policy, number in turns(options.rounds):
                replicas = fixed if policy == FIXED else 1
                run = await bench.replay(policy, number, replicas, trace_file, trace.duration_seconds)
                results["runs"].append(asdict(run))
                save(results)
                _say(page.line_of(run))
                if policy == HEADWAY and not fixed:
                    fixed = rounded_mean(run.mean_replicas, 1.0, setting.most_replicas)
    return results


def turns(rounds: int) -> list[tuple[str, int]]:
    """Who when: Headway first, as its mean is the fixed number, and then each round begins with another."""
    order = (HEADWAY, FIXED, WAITING)
    return [
        (order[(place + number - 1) % len(order)], number)
        for number in range(1, rounds + 1)
        for place in range(len(order))
    ]


def setting_of(options: argparse.Namespace) -> Setting:
    return Setting(
        options.replicas,
        options.cpu,
        options.memory,
        options.ttft,
        options.tpot,
        options.percentile,
        options.waiting,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len,
        options.speed,
    )


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(
        options.trace,
        options.trace_start_seconds,
        options.trace_seconds,
        options.speed,
        options.length_scale,
        options.max_model_len // 3,
        options.seed,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="Compare autoscalers on a real cluster.", allow_abbrev=False)
    add = found.add_argument
    add("--trace", type=Path, help="Azure CSV or Mooncake JSON lines (default: a wave of our own making)")
    add("--trace-start-seconds", type=float, default=0.0)
    add("--trace-seconds", type=float, default=600.0, help="length of the excerpt, in time of the trace")
    add("--speed", type=float, default=4.0, help="4 replays in a quarter of the time")
    add("--length-scale", type=float, default=0.2, help="of prompts and answers")
    add("--load", type=float, default=0.45, help="mean rate over what all replicas can do")
    add("--capacity", type=float, help="requests a second of one replica (default: measured)")
    add("--rounds", type=int, default=2)
    add("--replicas", type=int, default=4, help="the most that there may be")
    add("--fixed", type=int, default=0, help="replicas of the fixed one (default: Headway's mean, rounded)")
    add("--cpu", default="300m", help="of a replica")
    add("--memory", default="2Gi")
    add("--ttft", type=int, default=500, help="target in milliseconds")
    add("--tpot", type=int, default=60, help="target in milliseconds")
    add("--percentile", type=int, choices=(50, 90, 95, 99), default=95)
    add("--waiting", type=float, default=1.0, help="waiting requests for each replica, of the HPA's formula")
    add("--max-num-seqs", type=int, default=8)
    add("--max-num-batched-tokens", type=int, default=512)
    add("--max-model-len", type=int, default=1536)
    add("--interval-seconds", type=float, default=5.0, help="between decisions, in time of the trace")
    add("--seed", type=int, default=1)
    add("--json", type=Path)
    add("--output", type=Path, help="write the page here as well")
    return found


def main(argv: list[str]) -> int:
    """Measure, print and write."""
    options = parser().parse_args(argv)
    if not has_cluster():
        raise SystemExit(
            "run it as `python -m e2e.cluster run -- python -m benchmarks.live.run` (make bench-live)"
        )
    load_before = os.getloadavg()[0]

    def save(results: dict[str, Any]) -> None:
        results["conditions"] = page.conditions(load_before)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if options.output is not None:
            options.output.write_text(page.render(results), encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        results = asyncio.run(measure(options, Path(name), save))
    print(page.render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
