"""What two ranks on one machine cost and bring: steps of one rank with one and all threads, and of two ranks.

    python -m benchmarks.cpu.tensor_parallel [--batch 1 4 16] [--context 160] [--rounds 30] [--ranks 2]

On the model of `benchmarks.cpu.run`. The engines are there together and take turns, so that all meet the same
machine; read bandwidth is printed beside them. Each rank has its part of the processors. Beside the time of a
step stands the processor time of all threads of all ranks, which other work on the machine changes less: what
ranks add to it is what the cut costs.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import make_model_folder

if TYPE_CHECKING:
    from headway_runtime.batch import Batch
    from headway_runtime.config import EngineConfig

WARM_UP_STEPS = 3
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
KV_CACHE_BYTES = 256 << 20
PROMPT_TOKENS = 256


def engine_config(num_threads: int, num_ranks: int, most: int) -> "EngineConfig":
    from headway_runtime.config import EngineConfig, Envelope, Limits, ParallelConfig

    folder = cache_folder() / "model"
    make_model_folder(folder, is_quick=False)
    return EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        load_format="auto",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        envelope=Envelope(most, MAX_MODEL_LEN),
        limits=Limits(most, MAX_MODEL_LEN),
        max_waiting=1,
        num_threads=num_threads,
        parallel=ParallelConfig(size=num_ranks),
    )


def make_batch(size: int, start: int, count: int) -> "Batch":
    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.request import SamplingParams

    sampling = SamplingParams(temperature=0.0)
    blocks = (start + count) // BLOCK_SIZE + 2
    tables = [array("q", range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(size)]
    tokens = [3 + number % 1000 for number in range(start + count)]
    generated = 1 if count == 1 else 0
    chunks = tuple(
        Chunk(str(row), tokens, start, count, tables[row], generated, True, sampling) for row in range(size)
    )
    return Batch(chunks, size if count == 1 else 0, size * count)


def read_bandwidth() -> float:
    """GB/s, of one pass over 200 MB by all threads."""
    import torch

    numbers = torch.ones(50_000_000)
    seconds = []
    for _ in range(5):
        began_at = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - began_at)
    return numbers.nbytes / min(seconds) / 1e9


def processor_seconds(pids: list[int]) -> float:
    """That the threads of these processes have computed so far, all together."""
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has ended
                nanoseconds += int((task / "schedstat").read_bytes().split()[0])
    return nanoseconds / 1e9


def run(batches: list[int], context: int, rounds: int, ranks: int) -> None:
    import torch

    from headway_runtime.runner import Runner

    processors = len(os.sched_getaffinity(0))
    most = max(*batches, 2)
    each = max(1, processors // ranks)
    kinds = {"1 rank, 1 thread": (1, 1), f"1 rank, {processors} threads": (processors, 1)}
    kinds[f"{ranks} ranks, {each} thread each"] = (each, ranks)
    runners: dict[str, tuple[int, Runner]] = {}
    for name, (threads, size) in kinds.items():
        runners[name] = (threads, Runner(engine_config(threads, size, most)))
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]

    def step(name: str, batch: "Batch") -> tuple[float, float]:
        """Milliseconds that it took, and those of processor time."""
        threads, runner = runners[name]
        torch.set_num_threads(threads)
        before, began_at = processor_seconds(pids), time.perf_counter()
        runner.execute(batch)
        ended_at = time.perf_counter()
        return (ended_at - began_at) * 1e3, (processor_seconds(pids) - before) * 1e3

    torch.set_num_threads(processors)
    print(f"{processors} processors, read bandwidth {read_bandwidth():.1f} GB/s")
    print("ms: median (least), median of processor time")
    print("work | " + " | ".join(kinds) + " | exchanges | KiB | ms in them")
    work = {f"decode of {size}": make_batch(size, context, 1) for size in batches}
    work[f"prompt of {PROMPT_TOKENS}"] = make_batch(1, 0, PROMPT_TOKENS)
    for title, batch in work.items():
        for _ in range(WARM_UP_STEPS):
            for name in kinds:
                step(name, batch)
        traffic = runners[list(kinds)[-1]][1].traffic
        before = traffic.snapshot()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name in kinds:
                times[name].append(step(name, batch))
        figures = []
        for found in times.values():
            wall, busy = ([one[index] for one in found] for index in range(2))
            figures.append(f"{statistics.median(wall):.1f} ({min(wall):.1f}), {statistics.median(busy):.1f}")
        figures.append(f"{(traffic.num_exchanges - before.num_exchanges) / rounds:g}")
        figures.append(f"{(traffic.num_bytes - before.num_bytes) / rounds / 1024:.0f}")
        figures.append(f"{(traffic.seconds - before.seconds) / rounds * 1e3:.1f}")
        print(" | ".join((title, *figures)), flush=True)
    for _, runner in runners.values():
        runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=160, help="tokens before the new one")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, len(os.sched_getaffinity(0)))
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when libraries load, so it has to be there from the start.
        command = [sys.executable, "-m", "benchmarks.cpu.tensor_parallel", *sys.argv[1:]]
        os.execve(sys.executable, command, wanted)
    run(arguments.batch, arguments.context, arguments.rounds, arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
