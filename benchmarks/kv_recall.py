"""What the type of the KV cache does to answers: the bundled model looks things up in long documents.

    python -m benchmarks.kv_recall [--count 100] [--context 250 1000 2000 3500] [--dtype bfloat16 fp8 int8]

Printed are, by type: how many answers are right, and how many are token by token those of the first type.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bundled_model.corpus import RECALL_KINDS, is_right, sample_tasks
from headway_runtime import Engine, SamplingParams
from headway_runtime.config import KVCacheDtype

SEED = 7
MAX_TOKENS = 40


def recall(
    kind: str, dtypes: Sequence[KVCacheDtype], contexts: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """One row per context: of each type the share that is right, and that answers as the first type does."""
    engines = {
        name: Engine("bundled://headway-tiny", kv_cache_dtype=name, kv_cache_memory_bytes="128Mi")
        for name in dtypes
    }
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        tasks = sample_tasks(kind, SEED, count, context)
        chats = [task.prompt_messages for task in tasks]
        row: dict[str, Any] = {"task": kind, "context": context, "count": count}
        first: list[str] = []
        for name, engine in engines.items():
            answers = [output.text for output in engine.chat(chats, params, use_tqdm=False)]
            first = first or answers
            num_right = sum(is_right(task, text) for task, text in zip(tasks, answers, strict=True))
            num_same = sum(one == other for one, other in zip(answers, first, strict=True))
            row[name] = {"right": num_right / count, "same": num_same / count}
        rows.append(row)
    for engine in engines.values():
        engine.close()
    return rows


def run(kinds: list[str], dtypes: list[KVCacheDtype], contexts: list[int], count: int) -> None:
    print("task | tokens of the document | " + " | ".join(f"{name}: right, same answers" for name in dtypes))
    for kind in kinds:
        for row in recall(kind, dtypes, contexts, count):
            cells = [f"{row[name]['right']:.1%}, {row[name]['same']:.1%}" for name in dtypes]
            print(" | ".join((kind, str(row["context"]), *cells)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="tasks per line")
    parser.add_argument("--context", type=int, nargs="+", default=[250, 1000, 2000, 3500])
    parser.add_argument("--task", nargs="+", choices=RECALL_KINDS, default=list(RECALL_KINDS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "fp8", "int8"])
    arguments = parser.parse_args()
    run(arguments.task, arguments.dtype, arguments.context, arguments.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
