"""Headway beside vLLM CPU, llama.cpp and transformers: the same model and work, in turn, in one run.

    python -m benchmarks.cpu.run [--only headway vllm] [--quick] [--output results.json] [--markdown FILE]

Makes a random Llama of 349M parameters, installs each peer in an environment of its own under the user's
cache folder (the first run downloads gigabytes and builds llama.cpp), and gives each 128 tokens in, 64 out,
at 1, 4, 16 and 64 requests at once. vLLM and Headway are asked over HTTP; llama.cpp and transformers are
called in their own processes, without the cost of a server. Those two that serve are visited in turns,
twice each, and between their turns Headway with each of its levers; the kinds of weights are visited once
more. Before and after each visit the machine itself is measured: it is not equally fast all the time. A peer
that fails is a row that says so. Only ratios within one run mean anything.
"""

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.cpu.conditions import conditions
from benchmarks.cpu.environments import HERE, InstallError, cache_folder, peer_python
from benchmarks.cpu.lever_folders import make_for_levers
from benchmarks.cpu.load import LoadError
from benchmarks.cpu.model_folder import WEIGHTS_FILE, make_model_folder
from benchmarks.cpu.peers import IN_PROCESS, SERVED, PeerError, ServedPeer, measure_in_process
from benchmarks.cpu.report import page, table
from benchmarks.cpu.servers import LEVERS, ServerError
from benchmarks.cpu.workload import FULL, OUTPUT_TOKENS, PROMPT_TOKENS, QUICK, Plan

# Slow ones answer a batch of 64 as well, but once is enough.
ONE_ROUND = ("transformers generate", "transformers continuous")
TERMINATED_STATUS = 143
MACHINE_TIMEOUT_SECONDS = 120.0
NAMES = (*SERVED, *IN_PROCESS)
# Those with goals of their own; a machine that is slow for a minute must not decide.
TWICE = tuple(name for name in LEVERS if name.endswith("weights"))
VISITS = ("headway", "vllm", *LEVERS, "headway", "vllm", *TWICE, *IN_PROCESS)


def measure_machine(folder: Path) -> dict[str, float]:
    """In a process of its own, so that no setting of a peer's or ours touches it."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu.machine", str(folder)],
        check=True,
        capture_output=True,
        timeout=MACHINE_TIMEOUT_SECONDS,
        cwd=HERE.parent.parent,
    ).stdout
    report: dict[str, float] = json.loads(output)
    return report


@dataclass
class Visits:
    """What all visits need, and what those to servers have found so far."""

    folder: Path
    config: dict[str, Any]
    plan: Plan
    logs: Path
    served: dict[str, ServedPeer] = field(default_factory=dict)
    machine: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def visit(self, name: str) -> dict[str, Any]:
        """One peer between two looks at the machine. What went wrong in any visit is its result."""
        looks = self.machine.setdefault(name, [])
        looks.append(measure_machine(self.folder))
        began = time.perf_counter()
        result = self.results.setdefault(name, {})
        try:
            result |= self._measure(name)
        except (ServerError, PeerError, LoadError, InstallError, aiohttp.ClientError, TimeoutError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        print(f"    {time.perf_counter() - began:.0f} s", flush=True)
        looks.append(measure_machine(self.folder))
        # As JSON has it, whether it comes from a file or from here.
        loaded: dict[str, Any] = json.loads(json.dumps(result | {"machine": looks}))
        return loaded

    def _measure(self, name: str) -> dict[str, Any]:
        log = self.logs / f"{name.replace(' ', '-')}.log"
        if name in SERVED:
            peer = self.served.setdefault(name, ServedPeer(name))
            return peer.visit(self.folder, self.config, self.plan, log)
        rounds = {size: 1 if name in ONE_ROUND else count for size, count in self.plan.rounds.items()}
        plan = replace(self.plan, rounds=rounds)
        return measure_in_process(name, self.folder, self.config, plan, log)


def environment() -> dict[str, Any]:
    return {
        **conditions(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "command": " ".join(["python -m benchmarks.cpu.run", *sys.argv[1:]]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="PEER")
    parser.add_argument("--quick", action="store_true", help="two layers, few rounds: does the script work?")
    parser.add_argument("--install", action="store_true", help="install the peers and stop")
    parser.add_argument("--output", type=Path, help="write all numbers there as JSON")
    parser.add_argument("--markdown", type=Path, help="write the table there, as a page")
    arguments = parser.parse_args()
    # So that whoever ends this ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_STATUS))
    for name in arguments.only:
        if not name.startswith("headway"):
            try:
                peer_python(name.partition(" ")[0])
            except InstallError as error:
                print(f"{name} cannot be installed: {error}", file=sys.stderr)
    if arguments.install:
        return 0
    started_at = time.perf_counter()
    where = environment()
    folder = cache_folder() / ("model-quick" if arguments.quick else "model")
    config = make_model_folder(folder, is_quick=arguments.quick)
    plan = QUICK if arguments.quick else FULL
    logs = cache_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": where,
        "model": config | {"parameters": (folder / WEIGHTS_FILE).stat().st_size / 2},
        "workload": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        "peers": {},
    }
    for old in logs.glob("*.log"):
        old.unlink()
    make_for_levers(arguments.only, folder)
    visits = Visits(folder, config, plan, logs)
    for name in (name for name in VISITS if name in arguments.only):
        print(f"{name} ...", flush=True)
        results["peers"][name] = visits.visit(name)
        results["seconds"] = time.perf_counter() - started_at
        if arguments.output:  # each time, so that a stopped run leaves what it has
            arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    if arguments.markdown:
        arguments.markdown.write_text(page(results))
    return 0 if "error" not in results["peers"].get("headway", {}) else 1


if __name__ == "__main__":
    sys.exit(main())
