"""What an option of the engine does to answers: the bundled model's held-out tasks with each, greedily.

    python -m benchmarks.quality [--quantization none fp8 int8 int4] [--kv-cache-dtype auto] [--count 100]
        [--only recall]

Prints a Markdown table: the share of right answers per task, and of answers that differ from the first
column's. The engine runs in this process, with defaults for all else; tasks are the same everywhere.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bundled_model.corpus import Task, is_right, sample_tasks
from bundled_model.evaluate import SUITES, Suite
from headway_runtime.inprocess import Engine
from headway_runtime.sampling_params import SamplingParams

MODEL = "bundled://headway-tiny"
# Stories are the longest answers.
MAX_TOKENS = 220


def answers(engine: Engine, tasks: Sequence[Task]) -> list[str]:
    """The engine's greedy answer to each."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    texts: dict[int, str] = {}
    chats = {index: task.prompt_messages for index, task in enumerate(tasks) if task.prompt_text is None}
    plain = {index: task.prompt_text for index, task in enumerate(tasks) if task.prompt_text is not None}
    if chats:
        found: Any = engine.chat([list(one) for one in chats.values()], greedy)
        texts |= {index: one.text for index, one in zip(chats, found, strict=True)}
    if plain:
        found = engine.generate(list(plain.values()), greedy)
        texts |= {index: one.text for index, one in zip(plain, found, strict=True)}
    return [texts[index] for index in range(len(tasks))]


def judge(suites: Sequence[Suite], options: dict[str, Any], seed: int, count: int) -> list[list[str]]:
    """All answers, by suite."""
    with Engine(MODEL, **options) as engine:
        return [answers(engine, sample_tasks(one.kind, seed, count, one.context_tokens)) for one in suites]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", nargs="+", default=["none", "fp8", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=100, help="held-out tasks per line")
    parser.add_argument("--only", default="", help="only the lines whose name contains this")
    arguments = parser.parse_args()
    suites = [suite for suite in SUITES if arguments.only in suite.name]
    found = {
        name: judge(
            suites,
            {"quantization": name, "kv_cache_dtype": arguments.kv_cache_dtype},
            arguments.seed,
            arguments.count,
        )
        for name in arguments.quantization
    }
    first = found[arguments.quantization[0]]
    print(" | ".join(["| task", *found]) + " |")
    print("| --- " * (1 + len(found)) + "|")
    totals = dict.fromkeys(found, 0.0)
    for index, suite in enumerate(suites):
        tasks = sample_tasks(suite.kind, arguments.seed, arguments.count, suite.context_tokens)
        cells = [f"| {suite.name}"]
        for name, by_suite in found.items():
            right = sum(is_right(task, text) for task, text in zip(tasks, by_suite[index], strict=True))
            differ = sum(a != b for a, b in zip(first[index], by_suite[index], strict=True))
            totals[name] += right / len(tasks)
            cells.append(f"{right / len(tasks):.0%} ({differ / len(tasks):.0%} differ)")
        print(" | ".join(cells) + " |")
    print(" | ".join(["| mean", *(f"{total / len(suites):.1%}" for total in totals.values())]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
