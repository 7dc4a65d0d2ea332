"""How far a decode step is from the products that it cannot do without, in one process and without a server.

    python -m benchmarks.cpu.decode_step [--batch 1 16] [--context 160] [--rounds 30]

Steps of the engine's runner, the same kernel by kernel (`--enforce-eager`), bare products of the very same
layers, and products of their shapes by oneDNN on prepacked weights take turns, on the model of
`benchmarks.cpu.run`, with the environment that the server gives its engine process. What a step takes beyond
its products is attention, norms, gates, sampling and Python.
"""

import argparse
import os
import statistics
import sys
import time
from array import array
from collections.abc import Sequence

from benchmarks.cpu.environments import be_as_the_engine, cache_folder
from benchmarks.cpu.model_folder import make_model_folder

WARM_UP_STEPS = 5
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
KV_CACHE_BYTES = 2 << 30


def run(batches: list[int], context: int, rounds: int) -> None:
    import torch

    from headway_runtime.batch import Batch, Chunk
    from headway_runtime.config import EngineConfig, Envelope, Limits
    from headway_runtime.layers.linear import AnyLinear, PackedLinear
    from headway_runtime.models.decoder import Decoder
    from headway_runtime.request import SamplingParams
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
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            envelope=Envelope(limits, MAX_MODEL_LEN),
            limits=Limits(limits, MAX_MODEL_LEN),
            max_waiting=1,
            num_threads=len(os.sched_getaffinity(0)),
        )
    )
    linears = runner._model.linears

    prepacked = [
        PackedLinear(torch.randn(layer.num_outputs, layer.num_inputs).bfloat16(), None) for layer in linears
    ]

    def products(layers: Sequence[AnyLinear], rows: int) -> float:
        inputs = {layer.num_inputs: torch.randn(rows, layer.num_inputs).bfloat16() for layer in layers}
        started_at = time.perf_counter()
        with torch.inference_mode():
            for layer in layers:
                layer(inputs[layer.num_inputs])
        return time.perf_counter() - started_at

    model = runner._model
    assert isinstance(model, Decoder)
    taped = model._taped

    def step(batch: Batch, *, is_taped: bool) -> float:
        model._taped = taped if is_taped else None
        started_at = time.perf_counter()
        runner.execute(batch)
        return time.perf_counter() - started_at

    sampling = SamplingParams(temperature=0.0)
    num_blocks = context // BLOCK_SIZE + 2
    print("medians and least, ms")
    print("batch | step | kernel by kernel | its products | oneDNN's | each over step")
    for size in batches:
        tables = [array("q", range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)) for row in range(size)]
        tokens = list(range(3, context + 4))
        batch = Batch(
            tuple(Chunk(str(row), tokens, context, 1, tables[row], 1, True, sampling) for row in range(size)),
            size,
            size,
        )
        for count in (WARM_UP_STEPS, rounds):
            times = [
                (
                    step(batch, is_taped=True),
                    step(batch, is_taped=False),
                    products(linears, size),
                    products(prepacked, size),
                )
                for _ in range(count)
            ]
        columns = [[one[index] * 1e3 for one in times] for index in range(4)]
        medians = [statistics.median(column) for column in columns]
        figures = (
            f"{median:.1f}, {min(column):.1f}" for median, column in zip(medians, columns, strict=True)
        )
        ratios = (f"{median / medians[0]:.2f}" for median in medians[1:])
        print(" | ".join((str(size), *figures, *ratios)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=160, help="tokens before the new one")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    be_as_the_engine("benchmarks.cpu.decode_step")
    run(arguments.batch, arguments.context, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
