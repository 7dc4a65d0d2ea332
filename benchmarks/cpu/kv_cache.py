"""What a decode step takes by the type of the KV cache, in one process and without a server.

    python -m benchmarks.cpu.kv_cache [--batch 1 16] [--context 160 4000] [--rounds 10] [--threads 2]

    python -m benchmarks.cpu.kv_cache [--batch 1 16] [--context 160 4000] [--rounds 10]
turns. Printed are medians and least times of whole steps, and the medians' ratio to bfloat16.
"""

import argparse
import os
import statistics
import sys
import time
from array import array
from typing import Any

from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import make_model_folder

WARM_UP_STEPS = 2
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
DTYPES = ("bfloat16", "fp8", "int8")


def run(batches: list[int], contexts: list[int], rounds: int, num_threads: int) -> None:
    from headway_runtime.config import EngineConfig, Envelope, Limits
    from headway_runtime.runner import Runner

    folder = cache_folder() / "model"
    make_model_folder(folder, is_quick=False)
    limits = max(*batches, 2)
    runner = Runner(
        EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="bfloat16",
            load_format="auto",
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 29,
            envelope=Envelope(limits, MAX_MODEL_LEN),
            limits=Limits(limits, MAX_MODEL_LEN),
            max_waiting=1,
            num_threads=num_threads,
        )
    )
    print("sequences | context | " + " | ".join(f"{name}: median, least ms, of bfloat16" for name in DTYPES))
    for size in batches:
        for context in contexts:
            times = measured(runner, size, context, rounds)
            base = statistics.median(times["bfloat16"])
            cells = (
                f"{statistics.median(own):.1f}, {min(own):.1f}, {statistics.median(own) / base:.2f}"
                for own in times.values()
            )
            print(" | ".join((str(size), str(context), *cells)), flush=True)


def measured(runner: Any, size: int, context: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, by type."""
    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.request import SamplingParams

    num_blocks = context // BLOCK_SIZE + 2
    caches = {name: filled_cache(runner, name, size * num_blocks + 1) for name in DTYPES}
    tables = [array("q", range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)) for row in range(size)]
    tokens, sampling = list(range(3, context + 4)), SamplingParams(temperature=0.0)
    batch = Batch(
        tuple(Chunk(str(row), tokens, context, 1, tables[row], 1, True, sampling) for row in range(size)),
        size,
        size,
    )
    times: dict[str, list[float]] = {name: [] for name in DTYPES}
    for _ in range(WARM_UP_STEPS + rounds):
        for name, cache in caches.items():
            runner._cache = cache
            started_at = time.perf_counter()
            runner.execute(batch)
            times[name].append((time.perf_counter() - started_at) * 1e3)
    return {name: own[WARM_UP_STEPS:] for name, own in times.items()}


def filled_cache(runner: Any, name: str, num_blocks: int) -> Any:
    """A cache of random numbers: what was never written would not be read from memory."""
    import torch

    from headway_runtime.layers.attention import KVCache, KVShape
    from headway_runtime.layers.kv_numbers import kept_dtype

    config, dtype = runner._model_config, torch.bfloat16
    shape = KVShape(config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    num_groups = config.num_attention_heads // config.num_kv_heads
    layers = runner._model.attention_layers
    cache = KVCache(shape, num_groups, dtype, torch.device("cpu"), layers, kept_dtype(name, dtype))
    for kv in cache.layers:
        if kv.scales is None:
            kv.numbers.normal_()
        else:
            # Of either type, codes of this range are numbers.
            kv.numbers.view(torch.uint8).random_(0, 0x70)
            kv.scales.fill_(0.01)
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument(
        "--context", type=int, nargs="+", default=[160, 4000], help="tokens before the new one"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, arguments.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when libraries load, so it has to be there from the start.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cpu.kv_cache", *sys.argv[1:]], wanted)
    run(arguments.batch, arguments.context, arguments.rounds, arguments.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
