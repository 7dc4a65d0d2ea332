"""What only a recorded decode step launches: tokens and block tables, put where its kernels look for them."""

import torch
from benchmarks.gpu.cases.case import Case, Result, Work
from benchmarks.gpu.costs import Cost
from torch import Generator

from headway_runtime.kernels.triton.launch import DEFAULT
from headway_runtime.kernels.triton.place_step import KERNEL, place_step, place_step_by_torch

BLOCK_SIZE = 16
INTEGER_BYTES = 4
NOBODY = -7


def place_step_case(name: str, rows: int, context: int) -> Case:
    """Contexts up to that. Half of the rows compute what was sampled before; the last one is nobody's."""
    width = -(-context // BLOCK_SIZE)

    def make(generator: Generator) -> Work:
        device = generator.device

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, device=device).int()

        contexts = integers(1, context + 1, rows)
        contexts[-1] = 0
        sources = torch.where(integers(0, 2, rows) == 1, integers(0, rows, rows), -1).int()
        told = (
            torch.tensor([width], dtype=torch.int32, device=device),
            integers(1, 1000, rows * width),
            contexts,
            integers(0, 1000, rows),
            sources,
            integers(-1, 1000, rows).long(),
        )
        tokens = torch.full((rows,), NOBODY, dtype=torch.int64, device=device)
        # As wide as the longest sequence that there can be.
        tables = torch.full((rows, 2 * width), NOBODY, dtype=torch.int32, device=device)

        def exact() -> Result:
            own = tokens.clone(), tables.clone()
            place_step_by_torch(*told, *own, BLOCK_SIZE)
            return own

        def run() -> Result:
            place_step(*told, tokens, tables, BLOCK_SIZE)
            return tokens, tables

        return Work(run, exact)

    cost = Cost(rows * (2 * width + 6) * INTEGER_BYTES)
    return Case(name, KERNEL, DEFAULT, make, cost, tolerance=0.0)
