"""The page's tables of what was measured on a GPU, from the committed results.

    PYTHONPATH=runtime python -m benchmarks.gpu.measured [--results FILE] [--page docs/gpu.md]

Imports no torch.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import judged
from benchmarks.gpu.marked_page import Marks, number, table
from benchmarks.gpu.predicted_rows import predicted_goals

MARKS = Marks("<!-- measured: written by benchmarks/gpu/measured.py -->", "<!-- end of what was measured -->")
RESULTS = Path(__file__).with_name("results.json")
# Endings of fields that tell how long a peer took.
PEER = "_over_ours"

Row = Mapping[str, Any]


def page_section(results: Mapping[str, Any]) -> str:
    """Markdown: conditions, goals, checks, steps, prompts, kernels."""
    rows: list[Row] = results["rows"]
    parts = [
        "### Conditions\n",
        _conditions(results["runs"]),
        "### Goals\n",
        _goals(rows),
        "### Checks\n",
        _checks(rows),
        "### The engine\n",
        *_engine(rows),
        "### Kernels\n",
        _kernels(rows),
    ]
    return "\n".join(parts)


def _conditions(runs: Sequence[Row]) -> str:
    cells = []
    for run in runs:
        own, ceilings = run["conditions"], run.get("ceilings") or {}
        versions = f"torch {own['torch']}, Triton {own['triton']}, CUDA {own['cuda']}"
        code = (own.get("commit") or "")[:8]
        told = ", ".join(filter(None, (code, own.get("tree", ""))))
        rates = ", ".join(
            f"{ceilings[name]:,.0f} {unit}"
            for name, unit in (
                ("copy_gigabytes_per_second", "GB/s"),
                ("bfloat16_teraflops", "bf16 TFLOP/s"),
                ("float8_teraflops", "fp8 TFLOP/s"),
                ("int8_teraops", "int8 TOP/s"),
            )
            if name in ceilings
        )
        cells.append((str(run["number"]), own["device"], run["date"][:10], told, versions, rates))
    return table(("run", "GPU", "date", "code", "with", "copies, products"), cells)


def _goals(rows: Sequence[Row]) -> str:
    predicted = {one.name: one.found for one in predicted_goals()}
    cells = []
    for one in judged(rows):
        wanted = f"{'at least' if one.is_least else 'at most'} {one.wanted:g}"
        before = number(predicted[one.name]) if one.name in predicted else "-"
        cells.append((one.name, wanted, before, number(one.found), "yes" if one.is_reached else "no"))
    return table(("goal, on an H200", "wanted", "predicted", "measured", "reached"), cells)


def _checks(rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["stage"] == "checks" and "is_right" in row]
    kernels = [row for row in own if "num_checks" in row]
    num_done = sum(row["num_checks"] for row in kernels)
    num_left = sum(row.get("num_left", 0) for row in kernels)
    cells = [
        (
            "kernels",
            f"{num_done} checks of {len(kernels)} kernels, {num_left} of theirs not done",
            f"{sum(not row['is_right'] for row in kernels)} kernels wrong",
        )
    ]
    cells += [
        (
            row["name"],
            f"{row['num_tokens']} tokens",
            f"at most {row['largest_gap']:.3g} below the best logit, allowed {row['tolerance']:.3g}",
        )
        for row in own
        if "num_tokens" in row
    ]
    return table(("what", "checked", "found"), cells)


def _engine(rows: Sequence[Row]) -> Iterator[str]:
    own = [row for row in rows if row["stage"] == "engine" and "error" not in row]
    steps = [
        (
            row["name"],
            f"{row['step_milliseconds']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['share_of_floor']:.0%}",
        )
        for row in own
        if "tokens_per_second" in row and "step_milliseconds" in row
    ]
    yield table(("decode steps", "ms", "output tokens/s", "share of the floor"), steps)
    uses = [
        (
            row["name"],
            f"{row['gpu_idle_share']:.1%}",
            f"{row['host_milliseconds']:.2f}",
            f"{row['launches_per_step']:.0f}",
        )
        for row in own
        if "gpu_idle_share" in row
    ]
    yield table(("steps, traced", "GPU idle", "host, ms", "launches"), uses)
    prompts = [
        (
            row["name"],
            f"{row['ttft_milliseconds']:.1f}",
            f"{row['compute_milliseconds']:.1f}" if "compute_milliseconds" in row else "-",
            f"{row['share_of_floor']:.0%}",
        )
        for row in own
        if "ttft_milliseconds" in row
    ]
    yield table(
        ("one prompt alone", "to its first token, ms", "of that computed, ms", "share of the floor"), prompts
    )
    others = [
        (
            row["name"],
            ", ".join(f"{name.replace('_', ' ')} {number(row[name])}" for name in row if _tells(name)),
        )
        for row in own
        if any(_tells(name) for name in row)
    ]
    yield table(("beside that", ""), others)


def _tells(name: str) -> bool:
    """Of rows that are neither steps nor prompts."""
    return name in (
        "load_seconds",
        "output_tokens_per_second",
        "miss_milliseconds",
        "hit_milliseconds",
        "without_tokens_per_second",
        "ngram_tokens_per_second",
    )


def _kernels(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        if row["stage"] != "kernels" or "microseconds" not in row:
            continue
        peers = [f"{name.removesuffix(PEER)} {row[name]:.2f}" for name in row if name.endswith(PEER)]
        cells.append(
            (
                row["name"],
                f"{row['microseconds']:,.1f}",
                f"{row['floor_microseconds']:,.1f}",
                f"{row['share_of_floor']:.0%}",
                ", ".join(peers) or "-",
                str(row["run"]),
            )
        )
    return table(("kernel", "us", "floor, us", "share of the floor", "others' time over ours", "run"), cells)


def main() -> None:
    """Print the section, or write it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON of benchmarks/gpu/run.py")
    parser.add_argument("--page", type=Path, help="replace what was measured in this page")
    arguments = parser.parse_args()
    section = page_section(json.loads(arguments.results.read_text(encoding="utf-8")))
    MARKS.write(section, arguments.page)


if __name__ == "__main__":
    main()
