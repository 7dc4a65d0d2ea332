"""What guessing tokens ahead brings on a CPU, by who guesses and by how many sequences decode at once.

    python -m benchmarks.cpu.speculation [--batch 1 4 16] [--rounds 4 4 9] [--output FILE]

Speculation needs a model that answers sensibly and a draft that is really cheaper. Both come from the
bundled pair: the model is `headway-tiny` made 60 times as heavy without changing a single logit. Its MLPs are
widened by random units whose outputs weigh nothing, and layers are added that add nothing; what is read and
multiplied in a step is that of a model of 0.3 billion parameters. The draft is `headway-tiny-draft` as it is.

Engines without guesses, with the draft and with prompt lookup are loaded side by side and answer the same
chats, one step of each after the other: what else the machine does meets all of them alike. A round's
speed-up is over the engine without guesses, by the time of each one's own steps, and an interval of their
median says how well it is known. Guessing is adaptive unless named.
The page ends with the goal: nowhere may guessing that adapts lose with many sequences at once.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu.conditions import processor_name
from benchmarks.cpu.environments import be_as_the_engine, cache_folder

from headway_bench.percentiles import Estimate, describe

if TYPE_CHECKING:
    from headway_runtime.engine import EngineCore
    from headway_runtime.request import Request

TARGET, DRAFT = "bundled://headway-tiny", "bundled://headway-tiny-draft"
WIDTH = 16_384
NUM_LAYERS = 24
MAX_MODEL_LEN = 512
NUM_GUESSES = 6
ANSWER_TOKENS = 160
METHODS: dict[str, dict[str, object] | None] = {
    "without": None,
    "draft model": {"model": DRAFT, "num_speculative_tokens": NUM_GUESSES},
    "draft model, always 6": {"model": DRAFT, "num_speculative_tokens": NUM_GUESSES, "adaptive": False},
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_GUESSES},
}
CONFIDENCE = 0.95
# Of the engine without guesses, with so many sequences at once or more, for whoever adapts.
GOAL_SPEEDUP, GOAL_BATCH = 0.97, 16
# New answers, and answers that repeat what the conversation has said before.
NEW, AGAIN = "stories", "stories told again"
# With the temperature of each.
WORKLOADS = ((NEW, 0.0), (AGAIN, 0.0), (NEW, 0.8), (NEW, 1.0))


def make_heavy(folder: Path) -> None:
    """Write the widened model unless it is there."""
    import torch
    from safetensors.torch import load_file, save_file

    from headway_runtime.sources import resolve

    done = folder / "complete"
    if done.is_file():
        return
    source = resolve(TARGET)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    hidden, narrow, num_own = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    weights = load_file(source / "model.safetensors")
    torch.manual_seed(0)
    for index in range(NUM_LAYERS):
        prefix = f"model.layers.{index}."
        if index >= num_own:
            for name in [name for name in weights if name.startswith("model.layers.0.")]:
                own = weights[name].clone()
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                weights[prefix + name.removeprefix("model.layers.0.")] = (
                    torch.zeros_like(own) if adds else own
                )
        for name in ("gate_proj", "up_proj"):
            more = (torch.randn(WIDTH - narrow, hidden) * 0.02).to(torch.bfloat16)
            key = f"{prefix}mlp.{name}.weight"
            weights[key] = torch.cat((weights[key][:narrow], more))
        key = f"{prefix}mlp.down_proj.weight"
        nothing = torch.zeros(hidden, WIDTH - narrow, dtype=torch.bfloat16)
        weights[key] = torch.cat((weights[key][:, :narrow], nothing), dim=1).contiguous()
    save_file(weights, folder / "model.safetensors")
    config |= {"intermediate_size": WIDTH, "num_hidden_layers": NUM_LAYERS}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    done.touch()


class Asker:
    """Makes requests of conversations, and texts of answers."""

    def __init__(self, folder: Path) -> None:
        from headway_runtime.model_config import read_model_config
        from headway_runtime.prompt_encoding import PromptEncoder

        self._vocab_size = read_model_config(folder).vocab_size
        self._encoder = PromptEncoder(folder, self._vocab_size)

    def ask(self, chats: list[list[dict[str, str]]], seed: int, temperature: float) -> "list[Request]":
        """With a seed, an answer is the same whoever guesses."""
        from headway_runtime.prompt_encoding import TemplateArguments
        from headway_runtime.request import Request
        from headway_runtime.sampling_params import SamplingParams

        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=ANSWER_TOKENS)
        tokenizer = self._encoder.tokenizer
        prompts = self._encoder.encode_chats(chats, TemplateArguments())
        return [
            Request(
                prompt.request_id,
                prompt.token_ids,
                replace(
                    params.for_engine(
                        vocab_size=self._vocab_size,
                        eos_token_ids=tokenizer.eos_token_ids,
                        room=MAX_MODEL_LEN - len(prompt.token_ids),
                        encode=partial(tokenizer.encode, add_special_tokens=False),
                        max_logprobs=0,
                    ),
                    seed=seed,
                ),
                time.monotonic(),
            )
            for prompt in prompts
        ]

    def text(self, token_ids: list[int]) -> str:
        return self._encoder.tokenizer.decode(token_ids)


@dataclass
class Lap:
    """What one engine did in a race. seconds: that its steps took."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of its own time, whatever the others took."""
        return sum(map(len, self.answers.values())) / self.seconds


def race(engines: "dict[str, EngineCore]", requests: "list[Request]", first: int) -> dict[str, Lap]:
    """Let every engine answer the same requests; their steps take turns, the `first` engine's first.

    What the machine does to one step it so does to the steps beside it.
    """
    laps = {name: Lap() for name in engines}
    for name, engine in engines.items():
        for request in requests:
            engine.add_request(request, time.monotonic())
            laps[name].answers[request.request_id] = []
    names = list(engines)
    names = [*names[first % len(names) :], *names[: first % len(names)]]
    while running := [name for name in names if engines[name].has_work]:
        for name in running:
            started_at = time.perf_counter()
            outputs = engines[name].step(time.monotonic()).outputs
            laps[name].seconds += time.perf_counter() - started_at
            for output in outputs:
                laps[name].answers[output.request_id].extend(output.token_ids)
    return laps


def run(rounds: dict[int, int]) -> list[dict[str, Any]]:
    """One row per workload, number at once and method. rounds: of each number at once."""
    from bundled_model.corpus import sample_tasks
    from headway_runtime.engine import EngineCore
    from headway_runtime.engine_config import resolve_engine_config
    from headway_runtime.engine_options import keyword_options
    from headway_runtime.metrics import EngineMetrics

    folder = cache_folder() / "model-heavy"
    make_heavy(folder)
    tasks = [one.prompt_messages for one in sample_tasks("story", 5, 64, None)]
    rows: list[dict[str, Any]] = []
    metrics: dict[str, EngineMetrics] = {}
    with ExitStack() as stack:
        engines: dict[str, EngineCore] = {}
        for name, config in METHODS.items():
            options = keyword_options(
                folder,
                {
                    "max_model_len": MAX_MODEL_LEN,
                    "max_num_seqs": max(rounds),
                    # What an engine finds of its own answers was not computed as a prompt's.
                    "enable_prefix_caching": False,
                    "speculative_config": config,
                },
            )
            metrics[name] = EngineMetrics(options.targets)
            engines[name] = EngineCore(resolve_engine_config(options), metrics[name])
            stack.callback(engines[name].close)
        asker = Asker(folder)
        for (workload, temperature), batch in itertools.product(WORKLOADS, rounds):
            num_other = 0
            rates: dict[str, list[float]] = {name: [] for name in engines}
            before = {name: metrics[name].drafts.snapshot() for name in engines}
            for number in range(rounds[batch] + 1):
                chats = [tasks[(number * batch + index) % len(tasks)] for index in range(batch)]
                if workload == AGAIN:
                    told = race({"told": engines["without"]}, asker.ask(chats, number, temperature), 0)
                    chats = [
                        [*chat, {"role": "assistant", "content": asker.text(answer)}, *chat]
                        for chat, answer in zip(chats, told["told"].answers.values(), strict=True)
                    ]
                laps = race(engines, asker.ask(chats, number, temperature), number)
                if number:  # the first one learns
                    for name, lap in laps.items():
                        rates[name].append(lap.tokens_per_second)
                num_other += sum(
                    lap.answers[asked] != plain
                    for lap in laps.values()
                    for asked, plain in laps["without"].answers.items()
                )
                if num_other and not temperature:
                    raise SystemExit("guesses have changed an answer")
            for name in engines:
                after, earlier = metrics[name].drafts.snapshot(), before[name]
                num_guessed = after.num_tokens - earlier.num_tokens
                num_true = after.num_accepted - earlier.num_accepted
                ratios = [own / plain for own, plain in zip(rates[name], rates["without"], strict=True)]
                rows.append(
                    {
                        "workload": workload,
                        "temperature": temperature,
                        "other answers": num_other,
                        "at once": batch,
                        "method": name,
                        "adapts": (METHODS[name] or {"adaptive": False}).get("adaptive", True),
                        "tokens_per_second": statistics.median(rates[name]),
                        "speedup": statistics.median(ratios),
                        "interval": ends(ratios),
                        "guessed": num_guessed,
                        "accepted": num_true / num_guessed if num_guessed else None,
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def ends(ratios: list[float]) -> tuple[float, float] | None:
    """Of the interval that holds the true median with CONFIDENCE; None of too few rounds to have one."""
    found = describe(ratios, (50,), CONFIDENCE)
    match found and found.percentiles[50]:
        case Estimate(low=float(low), high=float(high)):
            return low, high
    return None


def render(rows: list[dict[str, Any]], conditions: list[str]) -> str:
    """The results page."""
    by_case = {(row["workload"], row["temperature"], row["at once"]): row for row in rows}.values()
    lines = [
        "# Guessing tokens ahead on one CPU",
        "",
        *conditions,
        "",
        "The model is `headway-tiny` widened to 0.3 billion parameters without changing a logit;",
        f"chats in process, up to {NUM_GUESSES} guesses a step. Medians of rounds in which all engines",
        "answered the same chats with the same seeds, one step of each after the other, by the time of each",
        "one's own steps; all greedy answers were the same, token by token, and",
        f"{sum(one['other answers'] for one in by_case)} of the sampled ones were not.",
        "",
        "| answers | temperature | at once | who guesses | tokens/s | over without | guessed | came true |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        accepted = row["accepted"]
        lines.append(
            f"| {row['workload']} | {row['temperature']:g} | {row['at once']} | {row['method']} | "
            f"{row['tokens_per_second']:.0f} | "
            f"{row['speedup']:.2f} | {row['guessed']} | "
            f"{'-' if accepted is None else format(accepted, '.0%')} |"
        )
    return "\n".join([*lines, "", *verdicts(rows), ""])


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """The goal beside what was measured; none where nothing was measured with that many at once."""
    return [
        f"- {row['method']}, {row['workload']}, temperature {row['temperature']:g}, "
        f"{row['at once']} at once: {row['speedup']:.3f} "
        f"of the speed without guesses{_between(row['interval'])} "
        f"(goal {GOAL_SPEEDUP:g}: {'met' if row['speedup'] >= GOAL_SPEEDUP else 'missed'})"
        for row in rows
        if row["adapts"] and row["at once"] >= GOAL_BATCH
    ]


def _between(interval: tuple[float, float] | None) -> str:
    return (
        ""
        if interval is None
        else f", {interval[0]:.3f} to {interval[1]:.3f} with {CONFIDENCE:.0%} confidence"
    )


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Measure speculation on a CPU.", allow_abbrev=False)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[4, 4, 9], help="one number, or one for each --batch"
    )
    parser.add_argument("--output", type=Path, help="write the page here as well")
    options = parser.parse_args()
    rounds = options.rounds * len(options.batch) if len(options.rounds) == 1 else options.rounds
    if len(rounds) != len(options.batch):
        parser.error(
            f"--rounds has {len(rounds)} numbers and --batch {len(options.batch)}: give one, or one for each"
        )
    be_as_the_engine("benchmarks.cpu.speculation")
    load_before = os.getloadavg()[0]
    rows = run(dict(zip(options.batch, rounds, strict=True)))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    ).stdout.strip()
    batches, of_each = (" ".join(map(str, one)) for one in (options.batch, rounds))
    page = render(
        rows,
        [
            f"Written by `python -m benchmarks.cpu.speculation --batch {batches} --rounds {of_each}`.",
            f"Commit {commit}, {processor_name()}, {len(os.sched_getaffinity(0))} CPUs.",
            f"Load average: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        ],
    )
    print(page)
    if options.output is not None:
        options.output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
