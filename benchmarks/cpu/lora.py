"""What LoRA adapters cost on a CPU, by how many different ones a batch has.

    python -m benchmarks.cpu.lora [--rounds 30] [--rank 16] [--batch 16] [--threads 2] [--output FILE]

The model is that of `benchmarks.cpu.run`, of 349 million parameters; adapters are random, of all seven kinds
of layers. A runner that has never heard of adapters and one that can have them take turns, step by step, on
the same batches, the second with no adapter in them, then with 1, 4 and 16 different ones; a ratio is over
the step of the first one in the same round. Beside the time on the clock stands that of the processor, which
others on the machine change less.
"""

import argparse
import json
import os
import statistics
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cpu.conditions import conditions
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import make_model_folder

if TYPE_CHECKING:
    from headway_runtime.batch import Batch, Chunk

CONTEXT = 160
NUM_PROMPT_TOKENS = 512
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
KV_CACHE_BYTES = 1 << 30
COUNTS = (0, 1, 4, 16)


def make_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """An adapter of all layers as PEFT saves it, with random weights."""
    import torch
    from benchmarks.cpu.model_folder import linear_shapes
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in linear_shapes(config).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weights[f"{prefix}.lora_{which}.weight"] = torch.empty(shape, dtype=torch.bfloat16).normal_(
                    0.0, 0.02, generator=generator
                )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}), encoding="utf-8"
    )
    return folder


def run(batch: int, rank: int, rounds: int, threads: int) -> dict[str, object]:
    """Medians by how many adapters a batch has; "never" is the engine that can have none."""
    import torch

    from headway_runtime.config import EngineConfig, Envelope, Limits, LoraConfig
    from headway_runtime.runner import Runner

    folder = cache_folder() / "model"
    make_model_folder(folder, is_quick=False)
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        load_format="auto",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        envelope=Envelope(batch, MAX_MODEL_LEN),
        limits=Limits(batch, MAX_MODEL_LEN),
        max_waiting=1,
        num_threads=threads,
    )
    most = max(COUNTS)
    plain = Runner(config)
    adapted = Runner(replace(config, lora=LoraConfig(most, most, rank)))
    loading = []
    for slot in range(1, most + 1):
        source = make_adapter(cache_folder() / "adapters" / str(slot), folder, rank, slot)
        started_at = time.perf_counter()
        adapted.begin_adapter(slot, str(source))
        adapted.finish_adapter(slot)
        loading.append(time.perf_counter() - started_at)
    cases = {"never": (plain, 0), **{str(count): (adapted, count) for count in COUNTS}}
    for runner in (plain, adapted):
        runner._governor = None  # it would change the number of threads in between
    torch.set_num_threads(threads)
    found: dict[str, object] = {
        "batch": batch,
        "context": CONTEXT,
        "prompt": NUM_PROMPT_TOKENS,
        "rank": rank,
        "rounds": rounds,
        "threads": threads,
        "load_milliseconds": statistics.median(loading) * 1000,
        "megabytes_each": adapted._bank.num_bytes(rank) / 1e6 if adapted._bank is not None else 0,
        "load_average": os.getloadavg(),
    }
    for kind, count in (("decode", rounds), ("prefill", max(2, rounds // 5))):
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for number in range(count + 1):
            for name, (runner, num_adapters) in cases.items():
                work = decodes(batch, num_adapters) if kind == "decode" else prompts(num_adapters)
                started_at, cpu_at = time.perf_counter(), time.process_time()
                runner.execute(work)
                if number:  # the first one warms up
                    taken[name].append((time.perf_counter() - started_at, time.process_time() - cpu_at))
        found[kind] = {
            name: {
                "milliseconds": statistics.median(wall for wall, _ in own) * 1000,
                "least_milliseconds": min(wall for wall, _ in own) * 1000,
                "cpu_milliseconds": statistics.median(cpu for _, cpu in own) * 1000,
                "ratio": statistics.median(a[0] / b[0] for a, b in zip(own, taken["never"], strict=True)),
                "least_ratio": min(wall for wall, _ in own) / min(wall for wall, _ in taken["never"]),
                "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(own, taken["never"], strict=True)),
            }
            for name, own in taken.items()
        }
    return found


def decodes(batch: int, num_adapters: int) -> "Batch":
    """A token of each sequence, with the adapters in turn."""
    from headway_runtime.batch import Batch

    chunks = tuple(
        _chunk(index, CONTEXT, 1, 1 + index % num_adapters if num_adapters else 0) for index in range(batch)
    )
    return Batch(chunks, batch, batch)


def prompts(num_adapters: int) -> "Batch":
    """A step's tokens of new prompts, at most 16 of them, with the adapters in turn."""
    from headway_runtime.batch import Batch

    chunks = tuple(
        _chunk(index, 0, NUM_PROMPT_TOKENS // 16, 1 + index % num_adapters if num_adapters else 0)
        for index in range(16)
    )
    return Batch(chunks, 0, NUM_PROMPT_TOKENS)


def _chunk(index: int, start: int, num_tokens: int, adapter: int) -> "Chunk":
    from headway_runtime.batch import Chunk
    from headway_runtime.request import SamplingParams

    num_blocks = MAX_MODEL_LEN // 2 // BLOCK_SIZE
    return Chunk(
        str(index),
        [100 + (index * 37 + position * 11) % 8000 for position in range(start + num_tokens)],
        start,
        num_tokens,
        array("q", range(1 + index * num_blocks, 1 + (index + 1) * num_blocks)),
        1 if start else 0,
        samples=True,
        sampling=SamplingParams(temperature=0.0),
        adapter=adapter,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    where = conditions()
    found = run(arguments.batch, arguments.rank, arguments.rounds, arguments.threads)
    text = json.dumps({"environment": where, **found}, indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
