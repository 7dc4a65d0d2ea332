"""The page of results: every run in a line, medians by policy, and what was decided when."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.live.policies import FIXED, HPA_DOWN_SECONDS, stabilization_seconds

from headway_simulator.baselines.horizontal import SYNC_SECONDS

if TYPE_CHECKING:
    from benchmarks.live.run import Run

_COLUMNS = (
    *("who decides", "round", "requests", "failed", "both kept", "TTFT kept", "TPOT kept", "worst 15 s"),
    *("P95 TTFT ms", "P95 TPOT ms", "seconds", "pod-seconds", "mean pods", "most", "reversals"),
)
_LEGEND = """\
*both kept*: the share of all requests that were due which got their first token within the target and the
others within theirs on average; one that failed has missed. TTFT counts from when a request was due. *worst
15 s*: the same share of the requests that were due in the worst 15 seconds of the replay. *seconds*: until
the last answer. *pod-seconds*: of all replicas, starting and ending ones too, in the time of the trace.
*reversals*: how often the number asked for turned.
"""


def line_of(run: "Run") -> str:
    """For who watches."""
    one = run.outcome
    return (
        f"{run.policy}, round {run.round}: {one.joint:.1%} of {one.num_requests} kept both, {one.num_failed} "
        f"failed, P95 TTFT {one.p95_ttft:.0f} ms, {run.mean_replicas:.2f} pods on average"
    )


def conditions(load_before: float) -> list[str]:
    """The machine, the commit and how busy it was."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if "model name" in line
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    machine = f"{os.cpu_count()} CPUs ({names[0] if names else platform.processor()})"
    return [
        f"Machine: {machine}, shared by the cluster, its replicas and the load.",
        f"Load average: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"Commit {commit or 'unknown'}; Python {platform.python_version()}.",
    ]


def render(results: Mapping[str, Any]) -> str:
    """results: as run.py collects them."""
    runs = results["runs"]
    lines = [
        "# The controller on a real cluster",
        "",
        "Written by `make bench-live`: one excerpt against real pods of the bundled model under Headway,",
        "with the fixed number of replicas that comes nearest in cost, and under the formula of an HPA on",
        "requests that wait.",
        "",
        *(f"- {line}" for line in (*results["conditions"], *_settings(results))),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "| --- |" + " ---: |" * (len(_COLUMNS) - 1),
        *(_row(one) for one in runs),
        *("", "Medians over rounds:", ""),
        *("| who decides | both kept | worst 15 s | pod-seconds |", "| --- | ---: | ---: | ---: |"),
    ]
    for policy in dict.fromkeys(one["policy"] for one in runs):
        own = [one for one in runs if one["policy"] == policy]
        joint, worst = (statistics.median(one["outcome"][key] for one in own) for key in ("joint", "worst"))
        cost = statistics.median(one["pod_seconds"] for one in own)
        lines.append(f"| {policy} | {joint:.1%} | {worst:.1%} | {cost:.0f} |")
    lines += ["", _LEGEND, "## What was decided", ""]
    for one in runs:
        lines += [f"{one['policy']}, round {one['round']}:", ""]
        lines += [*(f"    {line}" for line in one["changes"]), ""]
    return "\n".join(lines)


def _settings(results: Mapping[str, Any]) -> list[str]:
    shape, setting = results["shape"], results["setting"]
    begin = f"{shape['seconds']:g} s from {shape['start_seconds']:g} s on, {shape['speed']:g} times as fast"
    rate = f"{results['requests_per_second']:.1f} requests/s on average"
    able = f"{setting['most_replicas']} replicas can do ({results['capacity']:.1f} each, measured)"
    targets = f"TTFT {setting['ttft']:g} ms and TPOT {setting['tpot']:g} ms at P{setting['percentile']}"
    limits = f"{setting['max_num_seqs']} sequences and {setting['max_num_batched_tokens']} tokens a step"
    sync, down = (seconds / setting["speed"] for seconds in (SYNC_SECONDS, HPA_DOWN_SECONDS))
    own = stabilization_seconds(setting["speed"])
    promise = "each replica counts against the TTFT target and puts back what comes too late anyway"
    periods = f"Headway decides every {results['interval_seconds']:g} s, the HPA every {sync:g} s"
    return [
        f"Load: {results['trace']}, {begin}, lengths times {shape['length_scale']:g}; {rate}.",
        f"That is {results['load']:.0%} of what {able}.",
        f"Targets: {targets}.",
        f"Replicas: 1 to {setting['most_replicas']}, {setting['cpu']} of a core each.",
        f"At most {limits}, which only Headway moves.",
        f"All have the same `slo`: {promise}.",
        "All but Headway have `replicas` and no range of limits, so that the operator leaves both alone.",
        f"Periods are compressed as time is: {periods}; down after {own:g} and {down:g} s.",
        "Starts of pods are not compressed.",
    ]


def _row(run: Mapping[str, Any]) -> str:
    one = run["outcome"]
    name = f"{FIXED}, {run['replicas_at_first']}" if run["policy"] == FIXED else run["policy"]
    cells = [
        *(name, str(run["round"]), f"{one['num_requests']:,}", str(one["num_failed"])),
        *(f"{one[key]:.1%}" for key in ("joint", "ttft", "tpot", "worst")),
        *(f"{one['p95_ttft']:.0f}", f"{one['p95_tpot']:.1f}", f"{run['seconds']:.0f}"),
        f"{run['pod_seconds']:.0f}",
        *(f"{run['mean_replicas']:.2f}", str(run["most_replicas"]), str(run["reversals"])),
    ]
    return "| " + " | ".join(cells) + " |"
