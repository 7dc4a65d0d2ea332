"""How well a simulated replica is a real one: a step model of one real run, then other loads predicted.

    make bench-slo-validate, or python -m benchmarks.slo.validate [--quick] [--out FOLDER]

One real server, a random model of 349 million parameters on this machine's CPU. A few requests, alone and
together, say how fast the machine is, so that each load takes the same share of its time on any. Then one
load to fit on and three others are sent, in turns, three times each, since the speed of a machine drifts.
From what the server tells of its steps under the first the step model is fitted; the others are simulated
once. P50 and P95 of TTFT and TPOT must agree within 10%, or within twice the spread (largest less smallest,
over their mean) of the three real runs, where that is larger. Wants an idle machine: it refuses one whose
load is above MOST_LOAD of its cores. Writes validation.md and validation.json, and, where all predictions
hold, fitted.json: the step model that the proof's rows with our own step times read. A quick run writes
nothing into the folder that the page is kept in.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.load import REQUEST_TIMEOUT_SECONDS, complete
from benchmarks.cpu.model_folder import make_model_folder
from benchmarks.cpu.servers import MAX_MODEL_LEN, free_port, headway_command, running_command
from benchmarks.cpu.workload import Answer, percentile, prompts
from benchmarks.slo.fit import Fitted, fit
from benchmarks.slo.loads import FITTED_FILE, OWN_LENGTHS
from benchmarks.slo.page import commit_words, machine_words

from headway_operator.keys import AdminKeys
from headway_operator.sample_wire import parse_replica_sample
from headway_operator.samples import ReplicaSample
from headway_operator.spec import parse
from headway_operator.state import ServiceKey
from headway_runtime.config import Limits
from headway_runtime.doubling_context import estimated_doubling_context
from headway_runtime.model_config import read_model_config
from headway_simulator.cluster import Conditions, Setting, Simulation
from headway_simulator.engine import EngineSettings
from headway_simulator.rates import Lengths, RateWindow, arrivals_of
from headway_simulator.step_model import StepModel, idle_ttft_milliseconds
from headway_simulator.trace import Arrival, Trace
from headway_simulator.work import work_seconds

KEY = ServiceKey("default", "validate")
NUM_REPEATS = 3
MOST_DEVIATION = 0.10
# Of the load average of the last minute over the cores; with more, somebody else's work would be fitted.
MOST_LOAD = 0.25
FOLDER = Path(__file__).parent
IDLE_PROMPTS = (64, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Load:
    """shape: pairs of lengths, of prompt and answer, each as likely. use: the share of the machine's time
    that they take in steps of BATCH. variation: of the gaps."""

    name: str
    use: float
    variation: float
    shape: tuple[tuple[int, int], ...]


# The one that is fitted on comes first: it has long and short, alone and together. Of the others each has
# three sizes, so that the median lies within those of one size: between two, one request decides it. Bursts
# vary no more than what is fitted on: at a variation of 3 a machine that is 2% slower has, simulated, a P95
# TPOT of 162 ms for 125, as one prompt more comes between the tokens of one answer: no prediction could hold.
FITTED = Load("fitted", 0.6, 2.0, OWN_LENGTHS)
OTHERS = (
    Load("quiet", 0.3, 1.0, ((100, 64), (200, 64), (300, 64))),
    Load("long prompts", 0.4, 1.0, ((600, 32), (900, 32), (1200, 32))),
    Load("bursts", 0.4, 2.0, ((128, 48), (192, 48), (256, 48))),
)
BATCH = 4
# Between samples under the load that is fitted on: about as long as a prompt takes.
SAMPLE_SECONDS = 0.5
# A load lasts for at least so many requests: of fewer nobody can tell a P95.
LEAST_REQUESTS = 40


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One number of one load: real runs, and the prediction."""

    load: str
    name: str
    real: tuple[float, ...]
    predicted: float

    @property
    def deviation(self) -> float:
        mean = statistics.mean(self.real)
        return abs(self.predicted - mean) / mean

    @property
    def allowed(self) -> float:
        spread = (max(self.real) - min(self.real)) / statistics.mean(self.real)
        return max(MOST_DEVIATION, 2 * spread)


def main() -> int:
    """Measure, fit, predict, compare; 1 where a prediction is too far off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="two layers, 20 s a load: it works at all")
    parser.add_argument(
        "--out", type=Path, help=f"folder of what is written; default: {FOLDER.name}, or none"
    )
    options = parser.parse_args()
    folder: Path | None = options.out or (None if options.quick else FOLDER)
    if folder is not None and not folder.is_dir():
        print(f"--out={str(folder)!r} is no folder; make it first", file=sys.stderr)
        return 2
    cpus, load_before = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if not options.quick and load_before > MOST_LOAD * cpus:
        print(
            f"the load average is {load_before:.2f} on {cpus} cores, above {MOST_LOAD * cpus:.2f}; "
            "end what else runs, wait a minute and try again",
            file=sys.stderr,
        )
        return 2
    speed, fitted, compared = _measured(20.0 if options.quick else 60.0, is_quick=options.quick)
    print(_text(speed, fitted, compared))
    is_met = all(one.deviation <= one.allowed for one in compared)
    if folder is not None:
        write(folder, speed, fitted, compared, load_before)
        if is_met and not options.quick:
            model = json.dumps(asdict(fitted.model), indent=1)
            (folder / FITTED_FILE.name).write_text(model + "\n", encoding="utf-8")
    return 0 if is_met else 1


def write(
    folder: Path, speed: StepModel, fitted: Fitted, compared: Sequence[Compared], load_before: float
) -> None:
    """The page and its data."""
    conditions = {
        "machine": machine_words(),
        "commit": commit_words(),
        "load_average_before": load_before,
    }
    rows = [{**asdict(one), "deviation": one.deviation, "allowed": one.allowed} for one in compared]
    loads = {
        one.name: {**asdict(one), "requests_per_second": rate_of(one, speed)} for one in (FITTED, *OTHERS)
    }
    found = {"conditions": conditions, "loads": loads, "fitted": asdict(fitted), "rows": rows}
    (folder / "validation.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    num_met = sum(one.deviation <= one.allowed for one in compared)
    preface = (
        f"`make bench-slo-validate` on {machine_words()}, at commit {commit_words()}, load average "
        f"{load_before:.2f} before. The engine serves a random model of 349 million parameters on the CPU; a "
        f"step model is fitted to the runs of one load, and three others, sent in turns with it, are "
        f"predicted. A prediction is met within "
        f"{MOST_DEVIATION:.0%} of the mean of {NUM_REPEATS} real runs, or within twice their spread. "
        f"Met: {num_met} of {len(compared)}."
    )
    page = ("# How well a simulated replica is a real one", "", preface, "", _text(speed, fitted, compared))
    (folder / "validation.md").write_text("\n".join(page) + "\n", encoding="utf-8")


def _measured(seconds: float, *, is_quick: bool) -> tuple[StepModel, Fitted, list[Compared]]:
    folder = cache_folder() / ("model-quick" if is_quick else "model")
    vocabulary = make_model_folder(folder, is_quick=is_quick)["vocab_size"]
    doubling_context = estimated_doubling_context(read_model_config(folder))
    keys = AdminKeys.generate()
    with tempfile.TemporaryDirectory(prefix="headway-validate-") as name:
        key_file = Path(name) / "key.pem"
        key_file.write_text(keys.public_pem)
        port = free_port()
        command, environment = headway_command(folder, port)
        command += ["--admin-public-key-file", str(key_file), "--admin-audience", str(KEY)]
        with running_command(command, environment, port, Path(name) / "log") as server:
            real = _Real(server.url, keys, vocabulary)
            speed = _speed(real, doubling_context)
            real.run(trace_of(FITTED, speed, max(20.0, seconds / 4), 0))  # first steps are slower
            watched: list[list[ReplicaSample]] = []
            measured: list[list[Latencies]] = []
            for repeat in range(NUM_REPEATS):
                watched.append(real.watched(trace_of(FITTED, speed, seconds, 1 + repeat)))
                measured.append([_of_answers(real.run(trace_of(load, speed, seconds, 2))) for load in OTHERS])
            fitted = _with_delivery(real, fit("this machine", watched, 0.0, doubling_context))
            sample = real.sample()
    compared = [
        one
        for load, runs in zip(OTHERS, zip(*measured, strict=True), strict=True)
        for one in _compared(load, runs, simulated(trace_of(load, speed, seconds, 2), fitted.model, sample))
    ]
    return speed, fitted, compared


class _Real:
    """A server and its client. Prompts are never the same twice, so that nothing is found cached."""

    def __init__(self, url: str, keys: AdminKeys, vocabulary: int) -> None:
        self._url = url
        self._keys = keys
        self._vocabulary = vocabulary
        self._num_runs = 0

    def sample(self) -> ReplicaSample:
        token = self._keys.mint(KEY, time.time())
        request = urllib.request.Request(
            f"{self._url}/admin/sample", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return parse_replica_sample(response.read(), time.time())

    def run(self, trace: Trace) -> list[Answer]:
        """Send each request at its time; returns when all have ended."""
        return asyncio.run(self._send(trace, self._texts(trace)))

    def watched(self, trace: Trace) -> list[ReplicaSample]:
        """What the server told of itself meanwhile, before the first request and after the last one too."""
        return asyncio.run(self._watched(trace, self._texts(trace)))

    def _texts(self, trace: Trace) -> list[list[int]]:
        self._num_runs += 1
        return [
            prompts(1000 * self._num_runs + index, 1, one.prompt_tokens, self._vocabulary)[0]
            for index, one in enumerate(trace.arrivals)
        ]

    async def _watched(self, trace: Trace, texts: Sequence[list[int]]) -> list[ReplicaSample]:
        samples = [self.sample()]
        sending = asyncio.create_task(self._send(trace, texts))
        while not sending.done():
            await asyncio.wait((sending,), timeout=SAMPLE_SECONDS)
            samples.append(await asyncio.to_thread(self.sample))
        await sending
        return [*samples, self.sample()]

    async def _send(self, trace: Trace, texts: Sequence[list[int]]) -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
        ) as session:
            began = time.perf_counter()

            async def one(arrival: Arrival, text: list[int]) -> Answer:
                await asyncio.sleep(max(0.0, began + arrival.at_seconds - time.perf_counter()))
                return await complete(session, self._url, text, arrival.output_tokens)

            return await asyncio.gather(
                *(one(arrival, text) for arrival, text in zip(trace.arrivals, texts, strict=True))
            )


def _speed(real: _Real, doubling_context: int) -> StepModel:
    """About what this machine's steps take: of requests of all lengths, one after another and at once. Once
    before it counts, since first steps are slower."""
    arrivals = [Arrival(0.0, *lengths) for lengths in OWN_LENGTHS]
    for _ in range(2):
        samples = [real.sample()]
        for one in arrivals:
            real.run(Trace("alone", (one,), 1.0))
            samples.append(real.sample())
        real.run(Trace("at once", tuple(arrivals), 1.0))
        samples.append(real.sample())
    return fit("this machine, roughly", [samples], 0.0, doubling_context).model


def rate_of(load: Load, speed: StepModel) -> float:
    """Requests per second that take the load's share of a machine of such a speed."""
    shape = Trace("shape", tuple(Arrival(0.0, *pair) for pair in load.shape), 1.0)
    return load.use * len(load.shape) / work_seconds(speed, shape, BATCH)


def trace_of(load: Load, speed: StepModel, seconds: float, seed: int) -> Trace:
    """The requests of a load on a machine of such a speed; the same in each repeat and in the simulation."""
    shape = Trace("shape", tuple(Arrival(0.0, *pair) for pair in load.shape), 1.0)
    rate = rate_of(load, speed)
    window = RateWindow(0.0, max(seconds, LEAST_REQUESTS / rate), rate)
    return arrivals_of(load.name, (window,), Lengths(shape), seed, variation=load.variation)


def _with_delivery(real: _Real, fitted: Fitted) -> Fitted:
    """What a byte takes to be written is seen by requests that come alone."""
    beyond, budget = [], real.sample().limits.max_num_batched_tokens
    for count in IDLE_PROMPTS:
        [answer] = real.run(Trace("alone", (Arrival(0.0, count, 2),), 1.0))
        beyond.append(1000 * answer.ttft_seconds - idle_ttft_milliseconds(fitted.model, count, budget))
    delivery = max(0.0, statistics.median(beyond))
    return replace(fitted, model=replace(fitted.model, delivery_milliseconds=delivery))


def _compared(load: Load, runs: Sequence[Latencies], predicted: Latencies) -> list[Compared]:
    return [
        Compared(load.name, name, tuple(getattr(one, name) for one in runs), getattr(predicted, name))
        for name in Latencies.__dataclass_fields__
    ]


def simulated(trace: Trace, model: StepModel, sample: ReplicaSample) -> Latencies:
    """The same requests on one simulated replica with the real one's limits; a CPU's steps do not overlap."""
    service = parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "validate"},
            "spec": {"model": {"source": "/model"}, "replicas": 1},
        }
    )
    limits = Limits(sample.limits.max_num_seqs, sample.limits.max_num_batched_tokens)
    engine = EngineSettings(model, MAX_MODEL_LEN, limits, overlaps=False)
    run = Simulation(trace, Setting(service, engine, Conditions()), None).result()
    ttft = [1000 * one.ttft_seconds for one in run.flights if one.ttft_seconds is not None]
    tpot = [1000 * one.tpot_seconds for one in run.flights if one.tpot_seconds is not None]
    return _latencies(ttft, tpot)


def _of_answers(answers: Sequence[Answer]) -> Latencies:
    return _latencies(
        [1000 * one.ttft_seconds for one in answers],
        [1000 * (one.last_at - one.first_at) / (one.num_tokens - 1) for one in answers if one.num_tokens > 1],
    )


def _latencies(ttft: list[float], tpot: list[float]) -> Latencies:
    return Latencies(percentile(ttft, 50), percentile(ttft, 95), percentile(tpot, 50), percentile(tpot, 95))


def _text(speed: StepModel, fitted: Fitted, compared: Sequence[Compared]) -> str:
    model = fitted.model
    formula = (
        f"{model.base_milliseconds:.2f} ms + {model.prefill_token_milliseconds:.4f} a prompt token + "
        f"{model.prefill_context_milliseconds:.2e} a pair of a prompt token and one that it attends to + "
        f"{model.decode_milliseconds:.3f} a sequence + {model.decode_context_milliseconds:.2e} a token of "
        f"context; {model.delivery_milliseconds:.1f} ms to deliver"
    )
    rates = ", ".join(f"{one.name} {rate_of(one, speed):.2f}" for one in (FITTED, *OTHERS))
    lines = [
        f"requests per second: {rates}",
        "",
        f"fitted from {fitted.num_steps} steps, relative error {fitted.relative_error:.1%}: {formula}",
        "",
        "| load | | real, ms | predicted, ms | off by | allowed | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in compared:
        real = ", ".join(f"{value:.1f}" for value in one.real)
        verdict = "met" if one.deviation <= one.allowed else "missed"
        lines.append(
            f"| {one.load} | {one.name} | {real} | {one.predicted:.1f} | {one.deviation:.1%} "
            f"| {one.allowed:.1%} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
