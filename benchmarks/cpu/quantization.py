"""What quantized weights change: the same steps of the engine's runner with each, in turns, in one process.

    python -m benchmarks.cpu.quantization [--batch 1 4 16] [--context 160] [--prompt 512] [--rounds 30]

On the random model of `benchmarks.cpu.run`, quantized at load, with the environment that the server gives its
engine process. A step of decoding sequences, then one of a prompt; no server. Rounds visit every quantization
one after the other, so that all see the machine alike; a ratio is the median of the rounds' own. Prints a
Markdown table, the machine's read bandwidth, and whether the goals are met.
"""

import argparse
import os
import statistics
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import make_model_folder
from benchmarks.cpu.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    from headway_runtime.batch import Batch
    from headway_runtime.config import WeightCompression
    from headway_runtime.runner import Runner

# What is compared, with --quantization and --weight-compression. Ratios are to the first.
FORMS: dict[str, tuple[str, "WeightCompression"]] = {
    "bfloat16": ("none", "none"),
    "12 bits": ("none", "auto"),
    "fp8": ("fp8", "none"),
    "int8": ("int8", "none"),
    "int4": ("int4", "none"),
}
# Speed over plain bfloat16, by quantization and batch size.
GOALS = {
    ("12 bits", 1): 1.1,
    ("12 bits", 16): 1.0,
    ("int4", 1): 2.0,
    ("int8", 1): 1.2,
    ("int4", 16): 1.0,
    ("int8", 16): 1.0,
}
WARM_UP_ROUNDS = 3
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Lever:
    """One engine's runner. load_seconds: what making it took; weight_bytes: what its tensors take."""

    name: str
    runner: "Runner"
    load_seconds: float
    weight_bytes: int


def load(name: str, folder: Path, max_num_seqs: int) -> Lever:
    from headway_runtime.config import EngineConfig, Envelope, Limits
    from headway_runtime.runner import Runner

    quantization, compression = FORMS[name]
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        load_format="auto",
        quantization=quantization,
        weight_compression=compression,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        envelope=Envelope(max_num_seqs, MAX_MODEL_LEN),
        limits=Limits(max_num_seqs, MAX_MODEL_LEN),
        max_waiting=1,
        num_threads=len(os.sched_getaffinity(0)),
    )
    started_at = time.perf_counter()
    runner = Runner(config)
    return Lever(name, runner, time.perf_counter() - started_at, tensor_bytes(runner._model))


def decoding(size: int, context: int) -> "Batch":
    """Sequences of `context` tokens that each get their next one."""
    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.request import SamplingParams

    num_blocks = context // BLOCK_SIZE + 2
    tokens = list(range(3, context + 4))
    tables = [array("q", range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)) for row in range(size)]
    sampling = SamplingParams(temperature=0.0)
    chunks = (Chunk(str(row), tokens, context, 1, tables[row], 1, True, sampling) for row in range(size))
    return Batch(tuple(chunks), size, size)


def prompt(length: int) -> "Batch":
    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.request import SamplingParams

    table = array("q", range(1, 2 + length // BLOCK_SIZE))
    chunk = Chunk("a", list(range(3, length + 3)), 0, length, table, 0, True, SamplingParams(temperature=0.0))
    return Batch((chunk,), length, 1)


def milliseconds(levers: list[Lever], batch: "Batch", rounds: int) -> list[list[float]]:
    """Of each lever, one number per round."""
    times: list[list[float]] = [[] for _ in levers]
    for index in range(-WARM_UP_ROUNDS, rounds):
        for lever, own in zip(levers, times, strict=True):
            started_at = time.perf_counter()
            lever.runner.execute(batch)
            if index >= 0:
                own.append((time.perf_counter() - started_at) * 1e3)
    return times


def speedups(baseline: list[float], own: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(baseline, own, strict=True))


def read_gigabytes_per_second() -> float:
    import torch
    from benchmarks.cpu.machine import NUM_BYTES, SUM_TIMES

    tensor = torch.ones(NUM_BYTES // 4)
    times = []
    for _ in range(SUM_TIMES):
        started_at = time.perf_counter()
        tensor.sum()
        times.append(time.perf_counter() - started_at)
    return NUM_BYTES / statistics.median(times) / 1e9


def run(arguments: argparse.Namespace) -> int:
    folder = cache_folder() / ("model-quick" if arguments.quick else "model")
    make_model_folder(folder, is_quick=arguments.quick)
    limit = max(*arguments.batch, 2)
    levers = [load(name, folder, limit) for name in arguments.forms]
    print(f"read bandwidth {read_gigabytes_per_second():.1f} GB/s, {len(os.sched_getaffinity(0))} CPUs\n")
    steps: dict[Any, list[list[float]]] = {
        size: milliseconds(levers, decoding(size, arguments.context), arguments.rounds)
        for size in arguments.batch
    }
    for length in arguments.prompt:
        rounds = max(3, arguments.rounds * 64 // max(length, 128))
        steps[f"prompt of {length}"] = milliseconds(levers, prompt(length), rounds)
    names = [f"batch {size}" for size in arguments.batch] + [f"prompt of {size}" for size in arguments.prompt]
    print(" | ".join(["| weights", "GB", "loaded in s", *(f"{name}, ms (speed)" for name in names)]) + " |")
    print("| --- " * (3 + len(names)) + "|")
    for index, lever in enumerate(levers):
        cells = [f"| {lever.name}", f"{lever.weight_bytes / 1e9:.2f}", f"{lever.load_seconds:.1f}"]
        cells += [
            f"{statistics.median(times[index]):.1f} ({speedups(times[0], times[index]):.2f}x)"
            for times in steps.values()
        ]
        print(" | ".join(cells) + " |")
    print()
    is_met = True
    for (name, size), goal in GOALS.items():
        if size in steps and name in arguments.forms:
            got = speedups(steps[size][0], steps[size][arguments.forms.index(name)])
            is_met = is_met and got >= goal
            verdict = "met" if got >= goal else "missed"
            print(f"- {name} over bfloat16, batch {size}: {got:.2f} (goal {goal:g}: {verdict})")
    return 0 if is_met else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=160, help="tokens before the new one")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], help="tokens of prompts")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="ratios: to the first")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="two layers: does the script work?")
    arguments = parser.parse_args()
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, len(os.sched_getaffinity(0)))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when libraries load, so it has to be there from the start.
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.cpu.quantization", *sys.argv[1:]], wanted
        )
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
