"""One kernel at one shape: how it is run, what it must give and cost, and who else does the same work.

Knows no kernel. Inputs are random and fresh for each `Work`; what is not a sequence's, or is still to be
written, holds NaN wherever a number can.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from benchmarks.gpu.costs import Cost
from torch import Generator, Tensor

Result: TypeAlias = Tensor | tuple[Tensor, ...]
# Called once, it prepares what is timed.
Peer: TypeAlias = Callable[[], Callable[[], object]]


def as_it_is(result: Any) -> Result:
    found: Result = result
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """One set of inputs.

    run: the kernel, as layers launch it. It may change its inputs.
    exact: the same by torch in float32 or better, called before `run`; None where that takes too long or too
        much memory. Integers are compared one by one.
    shown: of what `run` returned, what `exact` returns.
    peers: who else does the same work, by name.
    """

    run: Callable[[], Any]
    exact: Callable[[], Result] | None = None
    shown: Callable[[Any], Result] = as_it_is
    peers: Mapping[str, Peer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """kernel, shape_class: whose entry in the tables the launch looks up; no class: there is no entry.

    make: with random numbers of a generator, on its device.
    tolerance: of the error, see `error_of`.
    """

    name: str
    kernel: str
    shape_class: str | None
    make: Callable[[Generator], Work]
    cost: Cost
    tolerance: float = 1e-2


def error_of(got: Result, want: Result) -> float:
    """The largest of all tensors: the norm of the difference over the norm of what is wanted; of integers
    the share that differs. Infinite where anything is no number, or of another shape."""
    pairs = zip(_listed(got), _listed(want), strict=True)
    return max((_error(mine, theirs) for mine, theirs in pairs), default=0.0)


def _listed(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    if not got.dtype.is_floating_point:
        return float((got != want.to(got.device, got.dtype)).float().mean())
    exact = want.to(got.device, torch.float32)
    difference = float((got.float() - exact).norm())
    size = float(exact.norm())
    return difference / max(size, 1e-30) if math.isfinite(difference) else math.inf


def checked(case: Case, work: Work) -> float | None:
    """The error of one run; None if nothing is there to compare with. Memory that is given out holds NaN."""
    if work.exact is None:
        return None
    want = work.exact()
    with _poisoned_memory():
        got = work.run()
    return error_of(work.shown(got), want)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """PyTorch fills what `torch.empty` gives out as long as it is told to be deterministic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def generator_on(device: str, seed: int) -> Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(generator: Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)
