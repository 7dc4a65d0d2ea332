"""Makes the results' part of the page and its plot from what was found; measures nothing."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.levers.rows import Sizes

SIDES = ("without", "with")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def render_page(found: dict[str, Any], sizes: Sizes, page: Path | None) -> None:
    """Print the tables; with a page, put them between its two marks and draw the plot beside it."""
    makers = {"ladder": _ladder, "chunks": _chunks, "speculation": _speculation, "recall": _recall}
    parts = [
        f"{make(found[name]['rows'], sizes)}\n\n{_conditions(found[name]['conditions'], name)}"
        for name, make in makers.items()
        if name in found and found[name]["rows"]
    ]
    text = "\n\n".join([_workload(sizes), *parts])
    print(text)
    if page is None:
        return
    plot = page.with_suffix(".svg")
    old = page.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"--page {str(page)!r}: the marks {BEGIN} and {END} are not there")
    if "ladder" in found:
        _draw(found["ladder"]["rows"], sizes, plot)
        text += f"\n\n![Latency and users by row]({plot.name})"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _table(header: list[str], lines: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, aligned, *lines))


def _workload(sizes: Sizes) -> str:
    return (
        f"Documents of {sizes.prefix_tokens:,} tokens, answers of {sizes.answer_tokens} (uncapped "
        f"{sizes.uncapped_tokens[0]} to {sizes.uncapped_tokens[1]}), {sizes.kv_cache_memory} of KV cache; "
        f"latencies at {sizes.target_users} users. Within the SLO: P95 of TTFT at most "
        f"{sizes.ttft_milliseconds:,.0f} ms, P99 of ITL {sizes.itl_milliseconds:,.0f} ms."
    )


def _conditions(where: dict[str, Any], part: str) -> str:
    return (
        f"*`benchmarks.levers.run --part {part}` at commit {where['commit']}: {where['model']}, "
        f"{where['processor']}, {where['cpus']} CPUs, load average {where['load_average_before']:.1f} "
        f"before, {where['seconds'] / 60:.0f} minutes.*"
    )


def _at_target(row: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Of several runs, the one whose P95 of TTFT is the middle one; the lower one of two."""
    points = [one for one in row["points"] if one["users"] == sizes.target_users]
    points.sort(key=lambda one: one["ttft"]["p95"])
    point: dict[str, Any] = points[(len(points) - 1) // 2]
    return point


def _pair(latency: dict[str, float] | None) -> str:
    return "-" if latency is None else f"{latency['p50']:,.0f} / {latency['p95']:,.0f}"


def _triple(latency: dict[str, float] | None) -> str:
    return "-" if latency is None else f"{_pair(latency)} / {latency['p99']:,.0f}"


def _ladder(rows: list[dict[str, Any]], sizes: Sizes) -> str:
    header = ["each row adds", "TTFT P50 / P95, ms", "ITL P50 / P95 / P99, ms", "end to end P50 / P95, ms"]
    header += ["output tokens/s", "prompt from cache", "right", "users within the SLO"]
    lines = []
    for row in rows:
        point = _at_target(row, sizes)
        cells = [row["name"], _pair(point["ttft"]), _triple(point["itl"]), _pair(point["e2e"])]
        cells += [f"{point['output_tokens_per_second']:.0f}", f"{point['cached_share']:.0%}"]
        most, within = sizes.users[-1], row["users_within_slo"]
        users = f"{most} or more" if within == most else str(within)
        lines.append([*cells, f"{point['right_share']:.0%}", users])
    return _table(header, lines)


def _chunks(rows: list[dict[str, Any]], sizes: Sizes) -> str:
    header = ["tokens a step", "TTFT P50 / P95, ms", "ITL P50 / P95 / P99, ms", "output tokens/s"]
    lines = [
        [
            str(one["tokens"]),
            _pair(one["ttft"]),
            _triple(one["itl"]),
            f"{one['output_tokens_per_second']:.0f}",
        ]
        for one in rows
    ]
    return (
        f"Chunk sizes at {sizes.target_users} users, with all levers up to quantized weights:\n\n"
        + _table(header, lines)
    )


def _speculation(rows: list[dict[str, Any]], _: Sizes) -> str:
    header = [
        "users",
        "output tokens/s without",
        "with",
        "ratio, of each round",
        "ITL P50 without, ms",
        "with",
    ]
    lines = []
    for one in rows:
        rounds = one["rounds"]
        pairs = [tuple(side[name]["output_tokens_per_second"] for name in SIDES) for side in rounds]
        ratios = [guessing / without for without, guessing in pairs]
        lines.append(
            [
                str(one["users"]),
                *(f"{statistics.median(rates):.0f}" for rates in zip(*pairs, strict=True)),
                f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})",
                *(f"{statistics.median(side[name]['itl']['p50'] for side in rounds):.0f}" for name in SIDES),
            ]
        )
    return "Speculation by users, the last two rows side by side, medians of rounds:\n\n" + _table(
        header, lines
    )


def _recall(rows: list[dict[str, Any]], _: Sizes) -> str:
    types = [name for name in rows[0] if name not in ("task", "context", "count")]
    header = ["tokens of the document", *(f"{name}: right, as {types[0]}" for name in types)]
    lines = [
        [f"{row['context']:,}", *(f"{row[name]['right']:.0%}, {row[name]['same']:.0%}" for name in types)]
        for row in rows
    ]
    count = rows[0]["count"]
    return f"The type of the KV by recall, {count} questions each:\n\n" + _table(header, lines)


def _draw(rows: list[dict[str, Any]], sizes: Sizes, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same numbers make the same file.
    mpl.rcParams["svg.hashsalt"] = "headway"
    names = [row["name"] for row in rows]
    points = [_at_target(row, sizes) for row in rows]
    places = range(len(names))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = list(figure.subplots(1, 3, sharey=True))
    for axis, name, slo in (
        (axes[0], "ttft", sizes.ttft_milliseconds),
        (axes[1], "itl", sizes.itl_milliseconds),
    ):
        high = "p95" if name == "ttft" else "p99"
        for percent, height in ((high, 0.8), ("p50", 0.4)):
            values = [0.0 if one[name] is None else one[name][percent] for one in points]
            axis.barh(places, values, height=height, label=percent.upper())
        axis.axvline(slo, color="black", linestyle=":", label="SLO")
        axis.set(title=f"{name.upper()} at {sizes.target_users} users, ms")
        axis.legend()
    axes[2].barh(places, [row["users_within_slo"] for row in rows], height=0.8, color="tab:green")
    axes[2].set(title="Users within the SLO")
    axes[0].set_yticks(
        list(places), [name if not number else f"+ {name}" for number, name in enumerate(names)]
    )
    axes[0].invert_yaxis()
    for axis in axes:
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
