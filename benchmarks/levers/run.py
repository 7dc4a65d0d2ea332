"""What each lever brings, one added to the last, on one workload: questions about documents.

    python -m benchmarks.levers.run [--part ladder ...] [--quick] [--json FILE] [--page docs/levers.md]

Most prompts begin, or could begin, with the same long document; each row of the table pulls one lever more
and starts a server of its own. Users are a closed loop: each asks again when answered. A row is measured at
the target number of users, then at more or fewer until the SLO is missed or met, which gives the users that
it can carry; so many are too many when two of three runs miss. Then three levers are taken further than they
pay: chunk sizes, speculation by users, the type of the KV by recall.

On a CPU the model is the bundled one made heavy (`benchmarks.cpu.speculation`), whose answers can be
judged. On a GPU give `--model` and `--draft`; with random weights the share of right answers means nothing.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.conditions import processor_name
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.speculation import DRAFT, NUM_GUESSES, make_heavy
from benchmarks.kv_recall import recall
from benchmarks.levers.page import render_page
from benchmarks.levers.points import Point, commit, measure, serving
from benchmarks.levers.rows import CPU, GPU, Row, Sizes, rows

from headway_bench.tokenizer import LocalTokenizer
from headway_runtime.config import KVCacheDtype

TERMINATED_STATUS = 143
PARTS = ("ladder", "chunks", "speculation", "recall")
# Of two rows side by side: a run differs from the next by a fifth on a shared machine.
NUM_ROUNDS = 3
# Users are too many when so many runs, of at most so many, miss the SLO: one miss is noise.
MISSES_THAT_COUNT, MOST_RUNS = 2, 3
RECALL_CONTEXTS = (1000, 2000, 3500)
RECALL_DTYPES: tuple[KVCacheDtype, ...] = ("bfloat16", "int8", "fp8")


class Study:
    """One whole run: its servers, its numbers."""

    def __init__(self, sizes: Sizes, model: str, device: str, *, is_quick: bool, log_file: Path) -> None:
        self._sizes = sizes
        self._model = model
        self._device = device
        self._is_quick = is_quick
        self._log_file = log_file
        self._count_tokens: Callable[[str], int] = LocalTokenizer(Path(model)).count
        self._num_runs = 0
        self.points: list[Point] = []

    def ladder(self, all_rows: list[Row]) -> list[dict[str, Any]]:
        """Each row at the target and around it, with the users that it can carry within the SLO."""
        found = []
        for row in all_rows:
            first = len(self.points)
            with serving(row, self._sizes, self._model, self._device, self._log_file) as url:
                within = self._climb(url, row)
            points = [point.to_json() for point in self.points[first:]]
            fields = {"name": row.name, "flags": dict(row.flags), "users_within_slo": within}
            found.append({**fields, "points": points})
        return found

    def _climb(self, url: str, row: Row) -> int:
        """The target's number of users, then others until the most that are within the SLO are known."""
        users, target = self._sizes.users, self._sizes.target_users
        holds_target = self._holds(url, row, target)
        if self._is_quick:
            return target if holds_target else 0
        if holds_target:
            for number in (number for number in users if number > target):
                if not self._holds(url, row, number):
                    return max(one for one in users if one < number)
            return users[-1]
        # What one user cannot have, more cannot: that spares what lies between.
        if not self._holds(url, row, users[0]):
            return 0
        for number in reversed([number for number in users if users[0] < number < target]):
            if self._holds(url, row, number):
                return number
        return users[0]

    def _holds(self, url: str, row: Row, users: int) -> bool:
        """Whether so many users are within the SLO: in the first run, or in the next two."""
        num_missed = 0
        for num_before in range(1 if self._is_quick else MOST_RUNS):
            if not self._measure(url, row, users).is_within(self._sizes):
                num_missed += 1
            elif num_before == 0:
                return True
            if num_missed == MISSES_THAT_COUNT:
                return False
        return num_missed < (1 if self._is_quick else MISSES_THAT_COUNT)

    def chunks(self, row: Row) -> list[dict[str, Any]]:
        """A row with other sizes of a step, at the target."""
        found = []
        for size in self._sizes.chunk_sizes[:: 4 if self._is_quick else 1]:
            other = row.then(f"{size} tokens a step", max_num_batched_tokens=str(size))
            with serving(other, self._sizes, self._model, self._device, self._log_file) as url:
                point = self._measure(url, other, self._sizes.target_users)
            found.append({"tokens": size, **point.to_json()})
        return found

    def compare(self, plain: Row, guessing: Row) -> list[dict[str, Any]]:
        """Two rows side by side, by the number of users; who comes first takes turns."""
        found = []
        with (
            serving(plain, self._sizes, self._model, self._device, self._log_file) as one,
            serving(guessing, self._sizes, self._model, self._device, self._log_file) as other,
        ):
            most = 2 * self._sizes.target_users
            # Powers of two.
            wanted = [number for number in self._sizes.users if number <= most and not number & (number - 1)]
            for users in wanted[:: 4 if self._is_quick else 1]:
                sides = {"without": (one, plain), "with": (other, guessing)}
                rounds = []
                for _ in range(1 if self._is_quick else NUM_ROUNDS):
                    rounds.append(
                        {name: self._measure(*side, users).to_json() for name, side in sides.items()}
                    )
                    sides = dict(reversed(sides.items()))
                found.append({"users": users, "rounds": rounds})
        return found

    def _measure(self, url: str, row: Row, users: int) -> Point:
        self._num_runs += 1
        point = measure(url, row, users, self._num_runs, self._sizes, self._count_tokens)
        self.points.append(point)
        itl = "-" if point.itl is None else f"{point.itl.p99:.0f}"
        print(
            f"{row.name}, {users} users: P95 TTFT {point.ttft.p95:.0f} ms, P99 ITL {itl} ms, "
            f"{point.output_tokens_per_second:.0f} tokens/s, right {point.right_share:.0%}",
            file=sys.stderr,
            flush=True,
        )
        return point


def run(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """The parts that are asked for, each put into `found` with its conditions as soon as it is there."""
    sizes = GPU if arguments.device == "cuda" else CPU
    model, draft = arguments.model, arguments.draft
    if model is None:
        folder = cache_folder() / "model-heavy"
        make_heavy(folder)
        model, draft = str(folder), DRAFT
    speculative = {"model": draft, "num_speculative_tokens": NUM_GUESSES} if draft else {"method": "ngram"}
    all_rows = rows(sizes, json.dumps({"num_speculative_tokens": NUM_GUESSES, **speculative}))
    quantized, kv, speculation = all_rows[-4], all_rows[-2], all_rows[-1]
    for part in arguments.part:
        began_at, load_before = time.monotonic(), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="headway-levers-") as folder_name:
            log_file = Path(folder_name) / "log"
            study = Study(sizes, model, arguments.device, is_quick=arguments.quick, log_file=log_file)
            part_rows: list[dict[str, Any]] = []
            if part == "ladder":
                part_rows = study.ladder(all_rows)
            elif part == "chunks":
                part_rows = study.chunks(quantized)
            elif part == "speculation":
                part_rows = study.compare(kv, speculation)
            elif arguments.model is None:
                part_rows = recall("recall", RECALL_DTYPES, RECALL_CONTEXTS, 10 if arguments.quick else 40)
        conditions = {
            "commit": commit(),
            "processor": processor_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "device": arguments.device,
            "model": "headway-tiny made heavy" if arguments.model is None else arguments.model,
            "load_average_before": load_before,
            "seconds": time.monotonic() - began_at,
        }
        found[part] = {"conditions": conditions, "rows": part_rows}
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a folder; default: the bundled model made heavy")
    parser.add_argument("--draft", help="of the same vocabulary; default with --model: prompt lookup")
    parser.add_argument("--quick", action="store_true", help="few points: shows that everything works")
    parser.add_argument(
        "--part", nargs="*", choices=PARTS, default=list(PARTS), help="others stay as the JSON file has them"
    )
    parser.add_argument("--json", type=Path, help="what was found, part by part")
    parser.add_argument("--page", type=Path, help="replace the results in this page, and the plot beside it")
    options = parser.parse_args()
    # So that whoever ends this ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_STATUS))
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    run(options, found)
    render_page(found, GPU if options.device == "cuda" else CPU, options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
