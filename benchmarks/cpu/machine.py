"""What the machine gives at this moment: run as a process of its own, prints one JSON object.

    python -m benchmarks.cpu.machine MODEL_FOLDER

read_gigabytes_per_second: summing 200 MB of float32. products_tokens_per_second: all linear layers of the
model for one token, back to back, through oneDNN's prepacked weights and nothing else; what a decode step of
one sequence cannot exceed by any means that reads bfloat16 weights.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.cpu.model_folder import linear_shapes

NUM_BYTES = 200_000_000
PACKED_FOR_ROWS = 16
SUM_TIMES = 9
PRODUCT_TIMES = 15


def measure(config: dict[str, Any]) -> dict[str, float]:
    with torch.inference_mode():
        return {
            "read_gigabytes_per_second": NUM_BYTES / _read_seconds() / 1e9,
            "products_tokens_per_second": 1 / _product_seconds(config),
        }


def _median_seconds(function: Callable[[], object], times: int) -> float:
    function()
    seconds: list[float] = []
    for _ in range(times):
        started_at = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)


def _read_seconds() -> float:
    tensor = torch.ones(NUM_BYTES // 4, dtype=torch.float32)
    return _median_seconds(tensor.sum, SUM_TIMES)


def _product_seconds(config: dict[str, Any]) -> float:
    shapes = linear_shapes(config)
    merged = [
        [shapes[f"self_attn.{name}_proj"] for name in "qkv"],
        [shapes["self_attn.o_proj"]],
        [shapes["mlp.gate_proj"], shapes["mlp.up_proj"]],
        [shapes["mlp.down_proj"]],
    ]
    per_layer = [(sum(rows for rows, _ in group), group[0][1]) for group in merged]
    layers = per_layer * config["num_hidden_layers"]
    layers.append((config["vocab_size"], config["hidden_size"]))
    weights = [_packed(*shape) for shape in layers]
    inputs = {columns: torch.randn(1, columns, dtype=torch.bfloat16) for _, columns in layers}
    apply = torch.ops.mkldnn._linear_pointwise.default

    def all_products() -> None:
        for (_, columns), weight in zip(layers, weights, strict=True):
            apply(inputs[columns], weight, None, "none", [], "")

    return _median_seconds(all_products, PRODUCT_TIMES)


def _packed(rows: int, columns: int) -> torch.Tensor:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, 0.02)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


if __name__ == "__main__":
    print(json.dumps(measure(json.loads((Path(sys.argv[1]) / "config.json").read_bytes()))))
