"""The page's predictions of what an H200 takes, written before anything is run.

    PYTHONPATH=runtime python -m benchmarks.gpu.predict [--page docs/gpu.md]

How they are made stands in predicted_launches.py; this owns the tables. Imports no torch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import costs
from benchmarks.gpu.costs import ModelShape, Weights, model_shape
from benchmarks.gpu.marked_page import Marks, number, table
from benchmarks.gpu.predicted_launches import (
    H200,
    decode_attention,
    decode_microseconds,
    layer_launches,
    prompt_microseconds,
)
from benchmarks.gpu.predicted_rows import predicted_goals, timed_kernels
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B

MARKS = Marks("<!-- predictions: written by benchmarks/gpu/predict.py -->", "<!-- end of predictions -->")


def page_section() -> str:
    """Markdown: launches of a layer, steps, prompts and goals."""
    llama, qwen, mixture = (model_shape(one) for one in (LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B))
    parts = [
        "### Goals\n",
        table(
            ("goal, on an H200", "wanted", "predicted, not measured"),
            [
                (one.name, f"{'at least' if one.is_least else 'at most'} {one.wanted:g}", number(one.found))
                for one in predicted_goals()
            ],
        ),
        "### Kernels\n",
        "Alone, as `kernels` times them, by the names of its rows. Predicted, not measured.\n",
        _kernels_table(),
        "### A layer of a decode step, launch by launch\n",
        "Microseconds, predicted, not measured; Llama-3.1-8B, contexts of 512 tokens.\n",
        _layer_table(
            llama, ((1, "none"), (32, "none"), (256, "none"), (1, "int4"), (1, "fp8"), (128, "fp8"))
        ),
        "Qwen3-30B-A3B, bfloat16.\n",
        _layer_table(mixture, ((1, "none"), (32, "none"), (256, "none"))),
        "### Decode steps\n",
        "Milliseconds and output tokens/s, predicted, not measured; contexts of 512 tokens.\n",
        _steps_table(llama, qwen, mixture),
        "### Prompts\n",
        "Milliseconds of compute, predicted, not measured.\n",
        _prompts_table(llama, mixture),
    ]
    return "\n".join(parts)


def _kernels_table() -> str:
    rows = []
    for one in timed_kernels():
        floor = one.cost.floor_seconds(H200) * 1e6
        found = one.microseconds
        megabytes, operations = one.cost.num_bytes / 1e6, one.cost.operations / 1e9
        waits = "bytes" if one.cost.byte_seconds(H200) * 1e6 >= floor else "operations"
        rows.append(
            (
                one.name,
                f"{megabytes:,.1f}",
                f"{operations:,.1f}",
                f"{floor:,.1f}, {waits}",
                f"{found:,.1f}",
                f"{floor / found:.0%}",
            )
        )
    head = ("kernel", "MB", "billion operations", "floor, us", "predicted, us", "share of the floor")
    return table(head, rows)


def _layer_table(model: ModelShape, columns: Sequence[tuple[int, Weights]]) -> str:
    found = [
        layer_launches(model, batch, decode_attention(model, batch, 512), weights)
        for batch, weights in columns
    ]
    names = list(dict.fromkeys(one.name for launches in found for one in launches))
    rows = []
    for name in names:
        cells = []
        for launches in found:
            own = [one.microseconds() for one in launches if one.name == name]
            cells.append(" + ".join(f"{one:.1f}" for one in own) or "-")
        rows.append((name, *cells))
    totals = [sum(one.microseconds() for one in launches) for launches in found]
    rows.append(("**launches**", *(str(len(launches)) for launches in found)))
    rows.append(("**together**", *(f"{total:.0f}" for total in totals)))
    heads = [f"{'bf16' if weights == 'none' else weights}, batch {batch}" for batch, weights in columns]
    return table(("launch", *heads), rows)


def _steps_table(llama: ModelShape, qwen: ModelShape, mixture: ModelShape) -> str:
    rows: list[tuple[str, ...]] = []
    choices: list[tuple[str, ModelShape, Weights]] = [
        ("Llama-3.1-8B bf16", llama, "none"),
        ("Llama-3.1-8B fp8", llama, "fp8"),
        ("Llama-3.1-8B int4", llama, "int4"),
        ("Qwen3-8B bf16", qwen, "none"),
        ("Qwen3-30B-A3B bf16", mixture, "none"),
    ]
    batches = (1, 8, 32, 128, 256)
    for name, model, weights in choices:
        cells = []
        for batch in batches:
            step = decode_microseconds(model, batch, 512, weights)
            floor = costs.decode_step(model, batch, 512, weights).floor_seconds(H200) * 1e6
            cells.append(
                f"{step / 1e3:.2f} ms, {batch / step * 1e6:,.0f}/s ({floor / step:.0%} of the floor)"
            )
        rows.append((name, *cells))
    return table(("", *(f"batch {batch}" for batch in batches)), rows)


def _prompts_table(llama: ModelShape, mixture: ModelShape) -> str:
    rows: list[tuple[str, ...]] = []
    choices: list[tuple[str, ModelShape, Weights]] = [
        ("Llama-3.1-8B bf16", llama, "none"),
        ("Llama-3.1-8B fp8", llama, "fp8"),
        ("Llama-3.1-8B int4", llama, "int4"),
        ("Qwen3-30B-A3B bf16", mixture, "none"),
    ]
    lengths = (2048, 8192, 32768)
    for name, model, weights in choices:
        cells = []
        for length in lengths:
            found = prompt_microseconds(model, length, weights)
            floor = costs.prompt(model, length, weights).floor_seconds(H200) * 1e6
            cells.append(f"{found / 1e3:.0f} ms ({floor / found:.0%} of the floor)")
        rows.append((name, *cells))
    return table(("", *(f"{length:,} tokens" for length in lengths)), rows)


def main() -> None:
    """Print the section, or write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--page", type=Path, help="replace the predictions in this page")
    MARKS.write(page_section(), parser.parse_args().page)


if __name__ == "__main__":
    main()
