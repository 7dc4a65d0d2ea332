"""Bare products of a decode or prefill step by format of the weights, in one process and without a server.

    python -m benchmarks.cpu.products [--rows 1 4 16 64 256] [--formats bf16 int8] [--rounds 15] [--threads 2]

All linear layers of the model of `benchmarks.cpu.run`, one after the other, so that weights come from memory
as they do in a step. In each round every format takes its turn; the ratio to bfloat16 is the median of the
rounds' ratios, and GB/s count the packed weights' bytes, scales included. The environment is what the server
gives its engine process. Also says how long packing took.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from benchmarks.cpu.model_folder import CONFIG, linear_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from headway_runtime.kernels.cpu.lossless_codes import LosslessStrips

WARM_UP_ROUNDS = 2
MERGED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
# One layer's: [outputs, inputs] of the parts of each product.
Parts = list[tuple[int, int]]


class Layer(Protocol):
    num_inputs: int
    weight: "Tensor | LosslessStrips"

    def __call__(self, x: "Tensor") -> "Tensor": ...


def bfloat16_layer(parts: Parts) -> Layer:
    import torch

    from headway_runtime.layers import cpu_kernels

    return _there(cpu_kernels.pairs_linear([torch.randn(shape).bfloat16() for shape in parts], None))


def lossless_layer(parts: Parts) -> Layer:
    import torch

    from headway_runtime.layers import cpu_kernels

    # As models are initialised: their magnitudes decide what has to be patched.
    weights = [torch.randn(shape).mul_(0.02).bfloat16() for shape in parts]
    return _there(_timed(cpu_kernels.lossless_linear, weights))


def int8_layer(parts: Parts, *, has_integer_inputs: bool = False) -> Layer:
    import torch

    from headway_runtime.layers import cpu_kernels
    from headway_runtime.layers.quantized_weights import Int8Input, Int8Weight

    inputs = Int8Input() if has_integer_inputs else None
    weights = [
        Int8Weight(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) * 0.01, inputs)
        for shape in parts
    ]
    return _there(_timed(cpu_kernels.int8_linear, weights))


def fp8_layer(parts: Parts) -> Layer:
    import torch

    from headway_runtime.layers import cpu_kernels
    from headway_runtime.layers.quantized_weights import Fp8Weight

    weights = [
        Fp8Weight(torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(shape[0]) * 0.01) for shape in parts
    ]
    return _there(_timed(cpu_kernels.fp8_linear, weights))


def int4_layer(parts: Parts, group_size: int, *, has_zeros: bool = False) -> Layer:
    import torch

    from headway_runtime.layers import cpu_kernels
    from headway_runtime.layers.quantized_weights import Int4Weight

    weights = []
    for outputs, inputs in parts:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = (torch.rand(outputs, inputs // group_size) * 0.01).half().float()
        zeros = torch.randint(0, 16, scales.shape).float() if has_zeros else None
        weights.append(Int4Weight(codes, scales, zeros, group_size))
    return _there(_timed(cpu_kernels.int4_linear, weights))


FORMATS: dict[str, Callable[[Parts], Layer]] = {
    "bf16": bfloat16_layer,
    "bf16-12-bits": lossless_layer,
    "int8": int8_layer,
    "int8-w8a8": partial(int8_layer, has_integer_inputs=True),
    "fp8": fp8_layer,
    "int4-128": partial(int4_layer, group_size=128),
    "int4-128-zeros": partial(int4_layer, group_size=128, has_zeros=True),
    "int4-64": partial(int4_layer, group_size=64),
    "int4-32": partial(int4_layer, group_size=32),
}
_packing_seconds = 0.0


def _timed(make: Callable[..., object], weights: object) -> object:
    global _packing_seconds
    started_at = time.perf_counter()
    layer = make(weights, None)
    _packing_seconds += time.perf_counter() - started_at
    return layer


def _there(layer: object) -> Layer:
    if layer is None:
        raise SystemExit("this processor has no kernel for that format")
    return layer  # type: ignore[return-value]


def products(num_layers: int) -> list[Parts]:
    shapes = linear_shapes(CONFIG)
    one = [[shapes[name] for name in names] for names in MERGED]
    return [*(one * num_layers), [(CONFIG["vocab_size"], CONFIG["hidden_size"])]]


def seconds(layers: list[Layer], num_rows: int) -> float:
    import torch

    inputs = {
        size: torch.randn(num_rows, size).bfloat16() for size in sorted({one.num_inputs for one in layers})
    }
    with torch.inference_mode():
        started_at = time.perf_counter()
        for layer in layers:
            layer(inputs[layer.num_inputs])
        return time.perf_counter() - started_at


def run(formats: list[str], rows: list[int], num_layers: int, rounds: int) -> None:
    global _packing_seconds
    made = {}
    for name in formats:
        _packing_seconds = 0.0
        made[name] = [FORMATS[name](parts) for parts in products(num_layers)]
        size = sum(layer.weight.nbytes for layer in made[name])
        print(f"{name}: {size / 1e6:.0f} MB, packed in {_packing_seconds:.2f} s", flush=True)
    print(f"\nmedians of {rounds} rounds; ratio: bf16's time over the format's")
    print("rows | format | ms | least ms | GB/s | ratio | least and most ratio")
    for num_rows in rows:
        times: dict[str, list[float]] = {name: [] for name in formats}
        for index in range(WARM_UP_ROUNDS + rounds):
            for name, layers in made.items():
                taken = seconds(layers, num_rows)
                if index >= WARM_UP_ROUNDS:
                    times[name].append(taken)
        for name, taken_by in times.items():
            size = sum(layer.weight.nbytes for layer in made[name])
            median = statistics.median(taken_by)
            ratios = [base / own for base, own in zip(times[formats[0]], taken_by, strict=True)]
            columns = (
                f"{num_rows:4d}",
                f"{name:14s}",
                f"{median * 1e3:7.2f}",
                f"{min(taken_by) * 1e3:7.2f}",
                f"{size / median / 1e9:5.1f}",
                f"{statistics.median(ratios):5.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
            print(" | ".join(columns), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="ratios: to the first"
    )
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=15)
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=num_cores)
    arguments = parser.parse_args()
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, num_cores)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when libraries load, so it has to be there from the start.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cpu.products", *sys.argv[1:]], wanted)
    import torch

    torch.set_num_threads(arguments.threads)
    run(arguments.formats, arguments.rows, arguments.layers, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
