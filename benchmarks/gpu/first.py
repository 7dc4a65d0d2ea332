"""The first minutes on a GPU: of all stages what is worth most, in this order, in one call.

Right first: the kernels of a decode step, and the tokens of small models. Then the same kernels against
their floors, whole decode steps at batch 1 and 32, and in what is left the tuning of those kernels that are
furthest from their floors. Each part has a share of the time, and what one leaves is the next one's.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.costs import Ceilings
from benchmarks.gpu.report import Report, Row

from headway_runtime.config import Device

# All that a decode step of Llama or Qwen3 launches, and its products by cuBLAS.
DECODE_KERNELS = (
    "paged_decode",
    "gated_product",
    "cublas",
    "coded_product_int4",
    "coded_product_fp8",
    "norm",
    "rotate_and_store",
    "vocabulary_blocks",
    "draw",
    "place_step",
)
# Of the time that there is when they begin; of the kernels' the share that they compile ahead in.
CHECKS_SHARE, KERNELS_SHARE, ENGINE_SHARE = 0.35, 0.35, 0.75
COMPILING_SHARE = 0.4
# Kernels that are tuned, and what their trial wants at least.
MOST_TUNED = 3
TUNING_SECONDS = 30.0
SMOKE_KERNELS = ("norm", "place_step")


def run_first(report: Report, device: Device, ceilings: Ceilings, out: Path, *, is_smoke: bool) -> None:
    """out: the JSON; the table of what is tuned, and all that was measured for it, lie beside it."""
    from benchmarks.gpu.checks import ALL_SECONDS, run_checks
    from benchmarks.gpu.engine_stage import run_first_decodes
    from benchmarks.gpu.kernels_stage import run_kernel_checks, run_kernels

    kernels = SMOKE_KERNELS if is_smoke else DECODE_KERNELS
    for stage in ("checks", "kernels", "engine"):
        report.cut_short(stage)
    with report.within(CHECKS_SHARE * report.seconds_left):
        with report.within(report.seconds_left - min(ALL_SECONDS, report.seconds_left / 2)):
            run_kernel_checks(report, device, is_smoke=is_smoke, kernels=kernels)
        run_checks(report, device, is_smoke=is_smoke)
    with report.within(KERNELS_SHARE * report.seconds_left):
        run_kernels(
            report,
            device,
            ceilings,
            is_smoke=is_smoke,
            kernels=kernels,
            has_peers=False,
            compiling_share=COMPILING_SHARE,
        )
    with report.within(ENGINE_SHARE * report.seconds_left):
        run_first_decodes(report, device, ceilings, is_smoke=is_smoke)
    names = furthest_from_floor(report.own_rows)
    if names:
        report.row(
            "tuning",
            " ".join(names),
            lambda: _tune(report, names, out, is_smoke=is_smoke),
            needs_seconds=TUNING_SECONDS,
        )


def furthest_from_floor(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Kernels with entries in the tables, that whose worst row lies furthest above its floor first."""
    worst: dict[str, float] = {}
    for row in rows:
        if row["stage"] == "kernels" and row.get("shape_class") is not None and "share_of_floor" in row:
            worst[row["kernel"]] = min(row["share_of_floor"], worst.get(row["kernel"], 1.0))
    return sorted(worst, key=lambda kernel: worst[kernel])[:MOST_TUNED]


def _tune(report: Report, kernels: Sequence[str], out: Path, *, is_smoke: bool) -> Row:
    from benchmarks.gpu.tune import tune_kernels

    table, state = out.with_name("tuned-table.json"), out.with_name("gpu-tuning.json")
    until = time.monotonic() + report.seconds_left
    return {"is_whole": tune_kernels(kernels, table, state, until, is_smoke=is_smoke), "table": table.name}
