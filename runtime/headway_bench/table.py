"""The report on a terminal: plain lines, milliseconds and seconds; prints nothing itself."""

from collections.abc import Sequence

from headway_bench.percentiles import Distribution, Estimate
from headway_bench.session import PointResult, describe_point
from headway_bench.summary import LATENCIES, PERCENTS, Summary
from headway_bench.warnings_of import warnings_of

_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "ttft_from_due": "TTFT from due",
    "e2e_from_due": "E2E from due",
}


def render_point(result: PointResult, confidence: float) -> str:
    """Everything about one point."""
    summary = result.summary
    lines = [f"== {describe_point(result.point)}", *_counts(summary), "", *_latencies(summary, confidence)]
    if summary.goodput is not None:
        limits = ", ".join(
            f"{_NAMES[n]} <= {v:g} ms" for n, v in summary.goodput.objectives_milliseconds.items()
        )
        share = _share(summary.goodput.share)
        lines += [
            "",
            f"goodput    {summary.goodput.requests_per_second:.2f} requests/s met {limits}: {share}",
        ]
    lines += _client(summary)
    lines += [f"failed     {f.count} x {kind}: {f.example}" for kind, f in summary.failures.items()]
    lines += [f"warning    {warning}" for warning in warnings_of(summary)]
    return "\n".join(lines)


def render_sweep(results: Sequence[PointResult]) -> str:
    """One line for each point."""
    head = [
        "point",
        "sent/s",
        "done/s",
        "out tok/s",
        "TTFT P50",
        "P95",
        "P99",
        "TPOT P50",
        "P95",
        "P99",
        "failed",
    ]
    has_goodput = any(result.summary.goodput for result in results)
    rows = [head + ["good"] * has_goodput]
    for result in results:
        summary = result.summary
        sending = summary.sending_per_second
        row = [
            describe_point(result.point),
            "-" if sending is None else _number(sending),
            _number(summary.completed_per_second),
            _number(summary.output_tokens_per_second),
            *(_percentile(summary.latency_milliseconds["ttft"], p) for p in PERCENTS),
            *(_percentile(summary.latency_milliseconds["tpot"], p) for p in PERCENTS),
            str(summary.num_failed),
        ]
        if has_goodput:
            row.append("-" if summary.goodput is None else f"{100 * summary.goodput.share.value:.1f}%")
        rows.append(row)
    return "\n".join(_aligned(rows))


def _counts(summary: Summary) -> list[str]:
    ended = f"{summary.num_completed} completed, {summary.num_failed} failed"
    if summary.num_interrupted:
        ended += f", {summary.num_interrupted} interrupted"
    lines = [
        f"requests   {summary.num_measured} in {summary.duration_seconds:.2f} s: {ended}"
        + (f" ({summary.num_warmup} of warm-up left out)" if summary.num_warmup else ""),
        f"rate       {summary.completed_per_second:.2f} requests/s completed"
        + ("" if summary.sending_per_second is None else f", {summary.sending_per_second:.2f} sent"),
        f"tokens/s   {summary.output_tokens_per_second:.1f} out, {summary.input_tokens_per_second:.1f} in",
    ]
    tokens = summary.tokens
    if tokens is not None:
        cached = "" if tokens.cached_tokens is None else f", {tokens.cached_tokens} of the input cached"
        by = ", ".join(f"{name} ({count})" for name, count in tokens.counted_by.items())
        lines.append(
            f"tokens     {tokens.mean_input:.1f} in, {tokens.mean_output:.1f} out on average{cached}; "
            f"{tokens.tokens_per_event:.2f} an event, counted by {by}"
        )
    return lines


def _latencies(summary: Summary, confidence: float) -> list[str]:
    rows = [["ms", *(f"P{p} [{100 * confidence:g}% interval]" for p in PERCENTS), "mean", "max"]]
    for name in LATENCIES:
        found = summary.latency_milliseconds[name]
        if found is not None:
            cells = [_with_interval(found.percentiles[p]) for p in PERCENTS]
            rows.append([_NAMES[name], *cells, _number(found.mean), _number(found.maximum)])
    if len(rows) == 1:
        return ["no request completed: there are no latencies"]
    itl = summary.latency_milliseconds["itl"]
    method = "intervals: order statistics" + ("" if itl is None else f"; of ITL: {itl.method}")
    return [*_aligned(rows), method]


def _client(summary: Summary) -> list[str]:
    client = summary.client
    line = (
        f"client     {100 * client.cpu_share_of_one_core:.0f}% of a core, "
        f"{client.connections_opened} connections opened"
    )
    lag = client.lag_milliseconds
    if lag is not None:
        late = f"{_percentile(lag, 50)} ms (P50), {_percentile(lag, 99)} (P99), {_number(lag.maximum)} (max)"
        line += f"; sent late by {late}"
    return ["", line]


def _with_interval(estimate: Estimate) -> str:
    low = "?" if estimate.low is None else _number(estimate.low)
    high = "?" if estimate.high is None else _number(estimate.high)
    return f"{_number(estimate.value)} [{low}, {high}]"


def _percentile(distribution: Distribution | None, percent: int) -> str:
    return "-" if distribution is None else _number(distribution.percentiles[percent].value)


def _share(estimate: Estimate) -> str:
    assert estimate.low is not None, "a share's interval has both ends"
    assert estimate.high is not None, "a share's interval has both ends"
    return f"{100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _number(value: float) -> str:
    """Three or four digits that matter."""
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
