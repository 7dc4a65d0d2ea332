"""What somebody who decodes waits for while a long prompt is computed, with chunks by tokens and by cost.

    python -m benchmarks.cpu.long_prompts [--rounds 4] [--threads N] [--quick] [--output FILE]

One engine of the benchmark's model in this process, no server. One sequence decodes; then a prompt of 3,900
tokens comes, in steps of 256 tokens. Steps are timed until it has its first token: with
`--prefill-doubling-context 0`, where each step has as many of its tokens, and with the estimate by the
model's shape, where a step has the fewer the more they attend to. Both in turn, a new engine each.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.cpu.conditions import conditions
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import make_model_folder

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.doubling_context import estimated_doubling_context
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.model_config import read_model_config
from headway_runtime.request import Request, SamplingParams

PROMPT_TOKENS, STEP_TOKENS, MAX_MODEL_LEN = 3900, 256, 4096
# Of a prompt's steps: those at its beginning and at its end that are compared; not the first and last one.
COMPARED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one engine. steps: seconds of each step in which the long prompt was computed."""

    steps: tuple[float, ...]

    @property
    def beginning(self) -> float:
        return statistics.median(self.steps[1 : 1 + COMPARED_STEPS])

    @property
    def end(self) -> float:
        return statistics.median(self.steps[-1 - COMPARED_STEPS : -1])


def measure(folder: Path, doubling_context: int, num_threads: int, seed: int) -> Measured:
    """A new engine, from its start to the long prompt's first token."""
    limits = (2, STEP_TOKENS)
    core = EngineCore(
        EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="bfloat16",
            load_format="auto",
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            kv_cache_memory_bytes=None,
            envelope=Envelope(*limits),
            limits=Limits(*limits),
            max_waiting=4,
            num_threads=num_threads,
            prefill_doubling_context=doubling_context,
        ),
        EngineMetrics(),
    )
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 32000, (PROMPT_TOKENS,), generator=generator).tolist()

    def add(name: str, tokens: Sequence[int], max_tokens: int) -> None:
        now = time.monotonic()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        core.add_request(Request(name, tuple(tokens), sampling, now), now)

    add("decodes", prompt[:8], 1000)
    for _ in range(8):
        core.step(time.monotonic())
    add("long", prompt, 2)
    steps: list[float] = []
    is_answered = False
    while not is_answered:
        began = time.monotonic()
        outputs = core.step(began).outputs
        steps.append(time.monotonic() - began)
        assert any(one.request_id == "decodes" for one in outputs), "who decodes missed a step"
        is_answered = any(one.request_id == "long" for one in outputs)
    core.close()
    return Measured(tuple(steps))


def text(measured: dict[int, list[Measured]], num_threads: int, command: str) -> str:
    """The page."""
    told, num_engines = conditions(), len(next(iter(measured.values())))
    machine = f"{told['processor']}, {num_threads} of {told['cpus']} CPUs"
    load = f"load average {told['load_average']:.0f} at the end"
    what = (
        f"One sequence decodes while a prompt of {PROMPT_TOKENS:,} tokens is computed in steps of "
        f"{STEP_TOKENS}: the benchmark's Llama of 349 million parameters in bfloat16, in process. Medians of "
        f"{num_engines} engines each, in turn."
    )
    columns = [
        *("doubling context", "steps", "at its beginning, ms", "at its end, ms"),
        *("end / beginning", "longest, ms", "whole prompt, s"),
    ]
    lines = [
        "# Steps while a long prompt is computed",
        "",
        f"Written by `{command}`.",
        f"Commit {told['commit']}, {told['date']}, {machine}, {load}.",
        "",
        what,
        "",
        f"| {' | '.join(columns)} |",
        f"| {' | '.join('---:' for _ in columns)} |",
    ]
    for doubling_context, runs in measured.items():
        cells = (
            f"{doubling_context:,}" if doubling_context else "0 (all tokens count the same)",
            f"{statistics.median(len(one.steps) for one in runs):.0f}",
            f"{1000 * statistics.median(one.beginning for one in runs):.0f}",
            f"{1000 * statistics.median(one.end for one in runs):.0f}",
            f"{statistics.median(one.end / one.beginning for one in runs):.2f}",
            f"{1000 * statistics.median(max(one.steps) for one in runs):.0f}",
            f"{statistics.median(sum(one.steps) for one in runs):.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="steps while a long prompt is computed")
    parser.add_argument("--rounds", type=int, default=4, help="engines of each kind (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of an engine (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a model of two layers, to see that it works")
    parser.add_argument("--output", type=Path, help="where to write the page; printed in any case")
    arguments = parser.parse_args()
    folder = cache_folder() / ("model-quick" if arguments.quick else "model")
    make_model_folder(folder, is_quick=arguments.quick)
    kinds = (0, estimated_doubling_context(read_model_config(folder)))
    measured: dict[int, list[Measured]] = {kind: [] for kind in kinds}
    for turn in range(arguments.rounds):
        for kind in kinds if turn % 2 == 0 else kinds[::-1]:
            measured[kind].append(measure(folder, kind, arguments.threads, turn))
            print(f"{turn + 1}: doubling context {kind}: {sum(measured[kind][-1].steps):.1f} s", flush=True)
    command = " ".join(["python -m benchmarks.cpu.long_prompts", *sys.argv[1:]])
    page = text(measured, arguments.threads, command)
    print(page)
    if arguments.output is not None:
        arguments.output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
