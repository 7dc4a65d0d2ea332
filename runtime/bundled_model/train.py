"""Trains one of the two bundled models from nothing and exports it: `python -m bundled_model.train`.

The same seed, steps and number of threads give the same weights on the same kind of processor. A
checkpoint is written every few minutes; a run that was stopped goes on from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from bundled_model.export import export, load_exported
from bundled_model.network import DRAFT_NAME, TARGET_NAME, Network, shape_of
from bundled_model.optimizer import TwoOptimizers
from bundled_model.packing import Batch, Packer
from bundled_model.precision import mixed_precision
from bundled_model.recipe import TOKENS_PER_STEP, Recipe, recipe_of
from bundled_model.tokenizer import train_tokenizer
from bundled_model.workers import Worker, run_workers

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Trainer:
    """A network in training; `step` is the next one to be made."""

    network: Network
    optimizers: TwoOptimizers
    loss_of: LossFunction
    packer: Packer
    recipe: Recipe
    seed: int
    worker: Worker = field(default_factory=Worker)
    step: int = 0

    def batch(self, step: int) -> Batch:
        """This worker's share of the rows of a step."""
        length = self.recipe.row_length(self.seed, step)
        rows = max(1, self.recipe.tokens_per_step // self.worker.count // length)
        mix = self.recipe.stage(step).mixes[length]
        return self.packer.batch(f"{self.seed}/{step}/{self.worker.rank}", rows, length, mix)

    def losses(self) -> Iterator[float]:
        """Make the remaining steps; yields the mean loss per weighted token of each."""
        with ThreadPoolExecutor(1) as executor:
            upcoming = executor.submit(self.batch, self.step)
            while self.step < self.recipe.steps:
                batch = upcoming.result()
                upcoming = executor.submit(self.batch, self.step + 1)
                token_ids = torch.from_numpy(batch.token_ids)
                loss = self.loss_of(token_ids[:, :-1], token_ids[:, 1:], torch.from_numpy(batch.weights))
                loss.backward()  # type: ignore[no-untyped-call]
                self.worker.average_gradients(self.network)
                self.optimizers.step(self.recipe.rate_factor(self.step))
                self.step += 1
                yield loss.item()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "network": self.network.state_dict(),
            "muon": self.optimizers.muon.buffers,
            "adam": self.optimizers.adam.state_dict(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.network.load_state_dict(state["network"])
        self.optimizers.muon.buffers = state["muon"]
        self.optimizers.adam.load_state_dict(state["adam"])


def new_trainer(
    name: str, recipe: Recipe, seed: int, teacher: Network | None = None, worker: Worker | None = None
) -> Trainer:
    """A trainer at step 0; with a teacher, half of the loss is the distance to its predictions."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)
    network = Network(shape_of(name, tokenizer.get_vocab_size()))
    optimizers = TwoOptimizers(network, recipe.muon_rate, recipe.adam_rate)
    loss_of = loss_function(network, teacher)
    return Trainer(network, optimizers, loss_of, Packer(tokenizer), recipe, seed, worker or Worker())


def loss_function(network: Network, teacher: Network | None) -> LossFunction:
    """The weighted mean loss over (inputs, next tokens, weights), in bfloat16 where that is safe and fast."""

    def loss_of(inputs: Tensor, next_tokens: Tensor, weights: Tensor) -> Tensor:
        with mixed_precision():
            logits = network(inputs)
        flat = logits.float().flatten(0, 1)
        losses = functional.cross_entropy(flat, next_tokens.flatten(), reduction="none")
        if teacher is not None:
            with torch.no_grad(), mixed_precision():
                wanted = teacher(inputs).float().flatten(0, 1).softmax(-1)
            losses = 0.5 * losses + 0.5 * functional.cross_entropy(flat, wanted, reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()

    return loss_of


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bundled_model.train", description=__doc__)
    parser.add_argument("--model", choices=(TARGET_NAME, DRAFT_NAME), default=TARGET_NAME)
    parser.add_argument("--output", type=Path, required=True, help="directory for the exported model")
    parser.add_argument("--steps", type=int, default=2100, help="optimizer steps")
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP, help="over all workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--teacher", type=Path, help="exported target to distil from (for the draft)")
    parser.add_argument("--checkpoint", type=Path, help="file to write every few minutes and to go on from")
    parser.add_argument("--checkpoint-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--compile", action="store_true", help="use torch.compile: about 1.4 times as fast")
    return parser.parse_args(arguments)


def run(worker: Worker, options: argparse.Namespace) -> None:
    """Train in one worker; only the first prints and writes files."""
    torch.set_num_threads(1)
    teacher = load_exported(options.teacher).eval() if options.teacher else None
    recipe = recipe_of(options.model, options.steps, options.tokens_per_step)
    trainer = new_trainer(options.model, recipe, options.seed, teacher, worker)
    if options.compile:
        trainer.loss_of = torch.compile(trainer.loss_of, dynamic=False)
    if options.checkpoint and options.checkpoint.exists():
        trainer.load(options.checkpoint)
    started_at = time.monotonic()
    recent: list[float] = []
    for loss in trainer.losses():
        recent.append(loss)
        if not worker.is_first:
            continue
        if trainer.step % 20 == 0:
            seconds = time.monotonic() - started_at
            print(
                f"step {trainer.step} loss {sum(recent) / len(recent):.4f} seconds {seconds:.0f}", flush=True
            )
            recent.clear()
        if options.checkpoint and trainer.step % options.checkpoint_every == 0:
            trainer.save(options.checkpoint)
    if worker.is_first:
        export(trainer.network, trainer.packer.tokenizer, options.output)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    run_workers(options.workers, run, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
