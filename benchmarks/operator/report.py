"""The page of results. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

# The processor time says little where samples are missing.
GOALS = {
    "reaction_p99_seconds": 1.0,
    "memory_mebibytes": 300.0,
    "cores": 1.0,
    "samples_missing_percent": 1.0,
}
COLUMNS = (
    *("services", "pods", "resync", "cores", "memory", "calls an hour", "samples a second"),
    *("pass", "queue P99", "reaction P50", "P99"),
)
LEGEND = """\
*Resync*: from the start of a fresh operator process until it has passed over every service. *Cores*: the
operator's processor seconds per second while nothing changes and every pod is sampled every 5 s. *Memory*:
its largest resident size since its start. *Calls*: to the API server in the same time, watches and renewals
of the Lease included. *Samples*: answers by pods, beside how many the interval asks for. *Pass*: mean
duration. *Queue*: upper edge of the bucket in which the 99th percentile of the wait for a turn lies.
*Reaction*: from the API server's answer to an edit until the status tells of its
generation; it is polled every 20 ms.
"""


def page(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> str:
    """Markdown: how it was measured, the curve, whether the goals hold for the last row."""
    last = rows[-1]
    lines = [
        "# What looking after many services costs",
        "",
        "Written by `make bench-operator`. A service has a gateway and two replicas; all objects are on a",
        "real API server without nodes, the pods' samples come from one process.",
        "",
        *(f"- {name.capitalize()}: {value}." for name, value in about.items()),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' ---: |' * len(COLUMNS)}",
        *(_row(row) for row in rows),
        "",
        f"Goals, at {last['services']:,} services:",
        "",
        *(_goal(name, {**last, **_derived(last)}[name], most) for name, most in GOALS.items()),
        "",
        f"Calls an hour by method, at {last['services']:,} services: {_methods(last)}.",
        "",
        LEGEND,
    ]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    return (
        f"| {row['services']:,} | {row['pods']:,} | {row['resync_seconds']:.1f} s | {row['cores']:.2f} "
        f"| {row['memory_mebibytes']:.0f} MiB | {row['api_calls_per_hour']:,} "
        f"| {row['samples_per_second']:.0f} of {row['samples_wanted_per_second']:.0f} "
        f"| {row['pass_milliseconds']:.1f} ms | {row['queue_p99_seconds'] * 1000:.0f} ms "
        f"| {row['reaction_p50_seconds'] * 1000:.0f} ms | {row['reaction_p99_seconds'] * 1000:.0f} ms |"
    )


def _derived(row: Mapping[str, Any]) -> dict[str, float]:
    share = row["samples_per_second"] / row["samples_wanted_per_second"]
    return {"samples_missing_percent": round(max(0.0, 1.0 - share) * 100, 1)}


def _goal(name: str, value: float, most: float) -> str:
    verdict = "kept" if value <= most else "**missed**"
    return f"- {name.replace('_', ' ')}: {value:g}, at most {most:g}: {verdict}."


def _methods(row: Mapping[str, Any]) -> str:
    counts = row["api_calls_per_hour_by_method"]
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
