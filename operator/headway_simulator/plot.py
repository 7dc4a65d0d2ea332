"""Draws a run over time: load, replicas, limits, attainment, latencies against targets; decides no number."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from headway_operator.slo import Target
from headway_simulator.oracle import INTERVAL_SECONDS
from headway_simulator.timeline import Level, Minute

# Above this ratio of a scale's ends, ticks at 1, 2 and 5 times powers of ten are enough.
FEW_TICKS = 3
# So that the highest step is not the frame.
ROOM = 1.1


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is drawn. levels: of replicas and limits. duration_seconds: of the load, where the last minute
    ends.

    oracle: its replicas per interval, None where there is none to show. jump_at_seconds: of the load, if
    known.
    """

    title: str
    minutes: Sequence[Minute]
    levels: Sequence[Level]
    duration_seconds: float
    oracle: Sequence[int] | None = None
    jump_at_seconds: float | None = None


def draw(path: Path, shown: Timeline, target: Target) -> None:
    """Write the picture; the ending of `path` says in which format. Raises OSError."""
    figure = figure_of(shown, target)
    figure.savefig(path)


def figure_of(shown: Timeline, target: Target) -> Figure:
    """Six panels above each other over the same minutes."""
    figure = Figure(figsize=(11, 12), layout="constrained")
    # A file's name may have what would be read as mathematics.
    figure.suptitle(shown.title, parse_math=False)
    panels: list[Axes] = list(figure.subplots(6, 1, sharex=True))
    load, replicas, limits, attained, ttft, tpot = panels
    _steps(load, shown, "requests_per_second", "requests/s")
    load.set(ylabel="requests/s")
    load.set_ylim(bottom=0, top=ROOM * max(load.get_ylim()[1], 0.1))
    # Broad below and narrow above, so that both are seen where they are the same.
    _levels(replicas, shown, "wanted", linewidth=5, alpha=0.35)
    _levels(replicas, shown, "ready")
    if shown.oracle is not None:
        edges = _edges([i * INTERVAL_SECONDS for i in range(len(shown.oracle))], shown.duration_seconds)
        replicas.stairs(
            shown.oracle, edges, baseline=None, linestyle=":", linewidth=2, color="black", label="oracle"
        )
    replicas.set(ylabel="replicas")
    replicas.set_ylim(bottom=0, top=ROOM * max(replicas.get_ylim()[1], 1))
    replicas.yaxis.set_major_locator(MaxNLocator(integer=True))
    _levels(limits, shown, "max_num_seqs")
    _levels(limits, shown, "max_num_batched_tokens")
    limits.set(ylabel="limits")
    _logarithmic(limits)
    _attainment(attained, shown, target.percentile)
    _latency(ttft, shown, "ttft", target.targets.ttft_milliseconds, target.percentile)
    _latency(tpot, shown, "tpot", target.targets.tpot_milliseconds, target.percentile)
    tpot.set(xlabel="minutes", xlim=(0, shown.duration_seconds / 60))
    for panel in panels:
        if shown.jump_at_seconds is not None:
            panel.axvline(shown.jump_at_seconds / 60, color="tab:red", linestyle="-.", label="jump")
        panel.grid(alpha=0.3)
        # Beside the panel, where it covers nothing.
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.align_ylabels()
    return figure


def _attainment(axis: Axes, shown: Timeline, percentile: int) -> None:
    shares = [100 * one for one in _values(shown.minutes, "joint_attainment")]
    axis.stairs(shares, _minute_edges(shown), baseline=None, linewidth=1.5, label="in each minute")
    axis.axhline(percentile, color="black", linestyle="--", label="objective")
    axis.set(ylabel="attained, %", ylim=(-4, 104))


def _latency(axis: Axes, shown: Timeline, name: str, target: float | None, percentile: int) -> None:
    _steps(axis, shown, f"{name}_milliseconds", f"P{percentile}")
    if target is not None:
        axis.axhline(target, color="black", linestyle="--", label="target")
    axis.set(ylabel=f"{name.upper()}, ms")
    _logarithmic(axis)


def _logarithmic(axis: Axes) -> None:
    """With plain numbers, not powers of ten."""
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:,g}")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(plain)
    least, most = axis.get_ylim()
    if most > FEW_TICKS * least:
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))


def _steps(axis: Axes, shown: Timeline, name: str, label: str) -> None:
    """A height for each minute, to the end of the last; gaps where nothing is known."""
    values = _values(shown.minutes, name)
    axis.stairs(values, _minute_edges(shown), baseline=None, linewidth=1.5, label=label)


def _levels(axis: Axes, shown: Timeline, name: str, *, linewidth: float = 1.5, alpha: float = 1.0) -> None:
    """What was decided, from when on it was."""
    if not shown.levels:
        return
    heights = [getattr(one, name) for one in shown.levels]
    edges = _edges([one.at_seconds for one in shown.levels], shown.duration_seconds)
    axis.stairs(heights, edges, baseline=None, linewidth=linewidth, alpha=alpha, label=name)


def _minute_edges(shown: Timeline) -> list[float]:
    return _edges([one.at_seconds for one in shown.minutes], shown.duration_seconds)


def _edges(starts: Sequence[float], end: float) -> list[float]:
    """In minutes."""
    return [one / 60 for one in (*starts, end)]


def _values(minutes: Sequence[Minute], name: str) -> list[float]:
    values = (getattr(one, name) for one in minutes)
    return [float("nan") if value is None else float(value) for value in values]
