"""Draws a report: for one point what happened over time, for a sweep its curves; decides no number."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_bench.errors import OptionsError
from headway_bench.percentiles import Distribution
from headway_bench.record import Record
from headway_bench.session import PointResult
from headway_bench.summary import PERCENTS

FORMATS = (".png", ".svg", ".pdf")
_NUM_BINS = 60


def check_plot_path(path: Path) -> None:
    """Raise OptionsError for a name whose format is not drawn."""
    if path.suffix.lower() not in FORMATS:
        raise OptionsError(f"--plot={str(path)!r} must end in one of {', '.join(FORMATS)}")


def draw(path: Path, results: Sequence[PointResult], title: str) -> None:
    """Write the picture; nothing is drawn of points in which no request completed."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    axes: Sequence[Axes] = list(figure.subplots(2, 2).flat)
    if len(results) == 1:
        _draw_point(axes, results[0])
    else:
        _draw_sweep(axes, results)
    figure.savefig(path)


def _draw_point(axes: Sequence[Axes], result: PointResult) -> None:
    records = [r for r in result.records if r.is_complete]
    start = min((r.sent_at for r in result.records), default=0.0)
    measured = [r for r in records if not r.is_warmup]
    ttft = [1000 * t for r in measured if (t := r.ttft_seconds) is not None]
    _cumulative(axes[0], ttft, "TTFT, ms")
    _cumulative(axes[1], [1000 * t for r in measured if (t := r.tpot_seconds) is not None], "TPOT, ms")
    for is_warmup, label in ((False, "measured"), (True, "warm-up")):
        group = [r for r in records if r.is_warmup is is_warmup and r.ttft_seconds is not None]
        if group:
            axes[2].plot(
                [r.sent_at - start for r in group],
                [1000 * (r.ttft_seconds or 0.0) for r in group],
                ".",
                label=label,
            )
    axes[2].set(title="TTFT over time", xlabel="sent after, s", ylabel="ms")
    if axes[2].has_data():
        axes[2].legend()
    _throughput(axes[3], records, start)


def _cumulative(axis: Axes, values: Sequence[float], label: str) -> None:
    if values:
        axis.ecdf(values)
    axis.set(title=f"{label.partition(',')[0]}: share of requests within", xlabel=label, ylabel="share")
    axis.grid(alpha=0.3)


def _throughput(axis: Axes, records: Sequence[Record], start: float) -> None:
    times = [t - start for r in records for t in r.token_times]
    weights = [n for r in records for n in r.token_counts]
    if times:
        width = max(max(times) / _NUM_BINS, 1e-6)
        axis.hist(
            times,
            bins=[i * width for i in range(_NUM_BINS + 1)],
            weights=[n / width for n in weights],
            histtype="step",
        )
    axis.set(title="Output tokens/s over time", xlabel="s", ylabel="tokens/s")
    axis.grid(alpha=0.3)


def _draw_sweep(axes: Sequence[Axes], results: Sequence[PointResult]) -> None:
    is_closed = results[0].point.concurrency is not None
    label = "users" if is_closed else "requests/s offered"
    offered = [float(r.point.concurrency or r.point.request_rate or 0.0) for r in results]
    for axis, name, title in ((axes[0], "ttft", "TTFT"), (axes[1], "tpot", "TPOT")):
        for percent in PERCENTS:
            found = [_value(r.summary.latency_milliseconds[name], percent) for r in results]
            axis.plot(offered, found, "o-", label=f"P{percent}")
        axis.set(title=title, xlabel=label, ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    axes[2].plot(offered, [r.summary.completed_per_second for r in results], "o-", label="completed")
    if any(r.summary.goodput for r in results):
        good = [r.summary.goodput.requests_per_second if r.summary.goodput else 0.0 for r in results]
        axes[2].plot(offered, good, "o-", label="within every objective")
    axes[2].set(title="Requests/s", xlabel=label)
    axes[2].legend()
    axes[3].plot(offered, [r.summary.output_tokens_per_second for r in results], "o-")
    axes[3].set(title="Output tokens/s", xlabel=label)
    for axis in axes:
        axis.grid(alpha=0.3)


def _value(distribution: Distribution | None, percent: int) -> float:
    return float("nan") if distribution is None else distribution.percentiles[percent].value
