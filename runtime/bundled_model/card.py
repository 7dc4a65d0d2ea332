"""Writes the model cards from measured scores: `python -m bundled_model.card`.

Every number in a card comes from the file that `python -m bundled_model.evaluate --output` wrote or
from the options, so that a card cannot claim what was not measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bundled_model.export import load_exported
from bundled_model.network import DRAFT_NAME, TARGET_NAME, NetworkShape
from bundled_model.recipe import CURRICULUM, DRAFT_CURRICULUM

CARD = """# {name}

{purpose}

{parameters:,} parameters, Llama architecture: {shape.num_hidden_layers} layers of width {shape.hidden_size},
{shape.num_attention_heads} query heads and {shape.num_key_value_heads} key-value heads of {shape.head_dim},
feed-forward width {shape.intermediate_size}, embeddings tied to the output. Weights in bfloat16,
byte-level BPE of {shape.vocab_size:,} tokens with each digit a token of its own, chat template in
`tokenizer_config.json`. Trained on rows of at most {longest_row:,} tokens. All text comes from templates
in `runtime/bundled_model/`; the licence is the project's, Apache-2.0.

It knows nothing of the world beyond its templates: use it to test a serving system, not to get answers.

## Held-out accuracy

{num_tasks} held-out tasks per line (seed {seed}), greedy, bfloat16, run by transformers.
The sums, ranges, strings, objects and stories of held-out tasks never occur in training; documents are
drawn anew; facts are known ones asked in words not trained on; memory has few values and all occur.
{columns_note}

{table}

## Training

Seed {training_seed}, {steps:,} steps of {tokens_per_step:,} tokens, {minutes} minutes
on {hardware}.

    cd runtime
    python -m bundled_model.train {command}
    python -m bundled_model.evaluate headway_runtime/bundled/{target} \\
      --draft headway_runtime/bundled/{draft} --count {num_tasks} --output scores.json

One uninterrupted run of the command gives the committed weights to the last bit; on another kind of
processor or with another PyTorch the numbers differ in the last digits, and the accuracy by a few tasks.
"""

PURPOSES = {
    TARGET_NAME: "The small model that Headway ships to test itself: its answers can be right or wrong.",
    DRAFT_NAME: f"The draft for speculative decoding with {TARGET_NAME}: the same tokenizer, the same data.",
}


def table_of(scores: list[dict[str, Any]], name: str) -> str:
    if name == TARGET_NAME:
        lines = ["| task | right |", "| --- | --- |"]
        return "\n".join([*lines, *(f"| {one['name']} | {one['accuracy']:.1%} |" for one in scores)])
    lines = ["| task | right | agrees with the target |", "| --- | --- | --- |"]
    rows = (f"| {one['name']} | {one['draft_accuracy']:.1%} | {one['agreement']:.1%} |" for one in scores)
    return "\n".join([*lines, *rows])


def columns_note(scores: list[dict[str, Any]], name: str) -> str:
    if name == TARGET_NAME:
        return "Recall asks for a row of a table, passage for a fact in sentences that all look alike."
    mean = sum(one["agreement"] for one in scores) / len(scores)
    return f"Agreement: the share of the target's answer tokens the draft picks, {mean:.1%} on average."


def write_card(directory: Path, measured: dict[str, Any], options: argparse.Namespace) -> None:
    name = directory.name
    network = load_exported(directory)
    shape: NetworkShape = network.shape
    is_target = name == TARGET_NAME
    steps = options.target_steps if is_target else options.draft_steps
    tokens_per_step = options.target_tokens_per_step if is_target else options.draft_tokens_per_step
    arguments = [f"--model {name}", f"--steps {steps}", f"--tokens-per-step {tokens_per_step}"]
    arguments += [f"--seed {options.seed}", f"--workers {2 if is_target else 1}", "--compile"]
    arguments.append(f"--output headway_runtime/bundled/{name}")
    scores = measured["scores"]
    curriculum = CURRICULUM if is_target else DRAFT_CURRICULUM
    card = CARD.format(
        name=name,
        purpose=PURPOSES[name],
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        shape=shape,
        longest_row=max(max(stage.lengths) for stage in curriculum),
        num_tasks=scores[0]["num_tasks"],
        seed=measured["seed"],
        columns_note=columns_note(scores, name),
        table=table_of(scores, name),
        training_seed=options.seed,
        steps=steps,
        tokens_per_step=tokens_per_step,
        minutes=options.target_minutes if is_target else options.draft_minutes,
        hardware=options.hardware,
        command=" \\\n      ".join(arguments),
        target=TARGET_NAME,
        draft=DRAFT_NAME,
    )
    (directory / "README.md").write_text(card)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bundled_model.card", description=__doc__)
    parser.add_argument("bundled", type=Path, help="the directory that holds both exported models")
    parser.add_argument("--scores", type=Path, required=True, help="what evaluate wrote")
    parser.add_argument("--seed", type=int, default=1, help="the training's seed")
    for model in ("target", "draft"):
        parser.add_argument(f"--{model}-steps", type=int, required=True)
        parser.add_argument(f"--{model}-tokens-per-step", type=int, default=8192)
        parser.add_argument(
            f"--{model}-minutes", type=int, required=True, help="wall-clock time of its training"
        )
    parser.add_argument("--hardware", required=True, help="processor and how busy it was")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    measured = json.loads(options.scores.read_text())
    for name in (TARGET_NAME, DRAFT_NAME):
        write_card(options.bundled / name, measured, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
