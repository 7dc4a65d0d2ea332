"""What the type of the KV cache does to answers: the bundled model looks things up in long documents.

    python -m benchmarks.kv_recall [--count 100] [--context 250 1000 2000 3500] [--dtype bfloat16 fp8 int8]

    python -m benchmarks.kv_recall [--count 100] [--context 250 1000 2000 3500] [--dtype bfloat16 fp8]
Printed are, by type: how many answers are right, and how many are token by token those of the first type.
"""

import argparse
import sys

from bundled_model.corpus import RECALL_KINDS, is_right, sample_tasks
from headway_runtime import Engine, SamplingParams
from headway_runtime.config import KVCacheDtype

SEED = 7
MAX_TOKENS = 40


def run(kinds: list[str], dtypes: list[KVCacheDtype], contexts: list[int], count: int) -> None:
    print("task | tokens of the document | " + " | ".join(f"{name}: right, same answers" for name in dtypes))
    engines = {
        name: Engine("bundled://headway-tiny", kv_cache_dtype=name, kv_cache_memory_bytes="128Mi")
        for name in dtypes
    }
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    for kind in kinds:
        for context in contexts:
            tasks = sample_tasks(kind, SEED, count, context)
            chats = [task.prompt_messages for task in tasks]
            first: list[str] = []
            cells = []
            for engine in engines.values():
                answers = [output.text for output in engine.chat(chats, params, use_tqdm=False)]
                first = first or answers
                num_right = sum(is_right(task, text) for task, text in zip(tasks, answers, strict=True))
                num_same = sum(one == other for one, other in zip(answers, first, strict=True))
                cells.append(f"{num_right / count:.1%}, {num_same / count:.1%}")
            print(" | ".join((kind, str(context), *cells)), flush=True)
    for engine in engines.values():
        engine.close()


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
