"""Draws a run over time: load, replicas, limits, latencies against their targets; decides no number."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_operator.slo import Target
from headway_simulator.oracle import INTERVAL_SECONDS
from headway_simulator.timeline import Minute


def draw(
    path: Path, minutes: Sequence[Minute], oracle: Sequence[int] | None, target: Target, title: str
) -> None:
    """Write the picture. oracle: its replicas per interval, None where it was not sought."""
    figure = Figure(figsize=(10, 11), layout="constrained")
    figure.suptitle(title)
    load, replicas, limits, ttft, tpot = figure.subplots(5, 1, sharex=True)
    at = [one.at_seconds / 60 for one in minutes]
    load.plot(at, [one.requests_per_second for one in minutes], drawstyle="steps-post")
    load.set(ylabel="requests/s")
    for name in ("wanted", "ready"):
        replicas.plot(at, _values(minutes, name), drawstyle="steps-post", label=name)
    if oracle is not None:
        starts = [index * INTERVAL_SECONDS / 60 for index in range(len(oracle))]
        replicas.plot(starts, oracle, drawstyle="steps-post", linestyle=":", label="oracle")
    replicas.set(ylabel="replicas")
    limits.plot(at, _values(minutes, "max_num_seqs"), drawstyle="steps-post", label="max_num_seqs")
    limits.plot(
        at, _values(minutes, "max_num_batched_tokens"), drawstyle="steps-post", label="max_num_batched_tokens"
    )
    limits.set(ylabel="limits", yscale="log")
    _latency(ttft, at, minutes, "ttft", target.targets.ttft_milliseconds, target.percentile)
    _latency(tpot, at, minutes, "tpot", target.targets.tpot_milliseconds, target.percentile)
    tpot.set(xlabel="minutes")
    for axis in (replicas, limits, ttft, tpot):
        axis.legend(loc="upper right")
    for axis in (load, replicas, limits, ttft, tpot):
        axis.grid(alpha=0.3)
    figure.savefig(path)


def _latency(
    axis: Axes, at: Sequence[float], minutes: Sequence[Minute], name: str, target: float | None, percent: int
) -> None:
    axis.plot(at, _values(minutes, f"{name}_milliseconds"), ".-", label=f"P{percent} {name.upper()}")
    if target is not None:
        axis.axhline(target, color="black", linestyle="--", label="target")
    axis.set(ylabel="ms", yscale="log")


def _values(minutes: Sequence[Minute], name: str) -> list[float]:
    values = (getattr(one, name) for one in minutes)
    return [float("nan") if value is None else float(value) for value in values]
