"""How long a step takes, learnt from what steps took: milliseconds = base + prefill*P + kv*K + sequence*D.

P: prompt tokens computed, counted by what they cost; D: sequences decoded for; K: tokens that these attend
to. Replicas sum the products of (1, P, D, K) with each other and with the time (`samples.Moments`); the
increment between two samples is the exact input of a least-squares fit over the steps between them.

The reservoir. Increments are gathered in buckets, by the kind of step (with prompts or without) and by
the octave of sequences per step. A bucket forgets: it keeps at most MOST_STEPS steps' weight, so that it
stands for the last minutes in which there were such steps, however long ago. All buckets count the same in
the fit, weighted by the square of their mean time: relative errors are made small, and a load that rarely
occurs is as well known as the usual one. A few dozen replicas fill it; those of a large fleet take turns.

Robustness. Left out are a replica's first WARM_UP_SECONDS, increments during which its limits changed, and
increments whose mean the model in force misses by more than OUTLIER. Where increments of one kind are missed
by more than WORST_MISS for PATIENCE_INCREMENTS in a row, of which a pass counts as MOST_OF_PASS at most, the
model is wrong, or what some buckets kept is: the reservoir begins anew. Until that holds steps enough, the
last model stays in force; then, while there are decodes of one octave only, that model at today's speed. A
fit that misses a bucket's mean by more than WORST_MISS is not taken; the last good one stays.

Coefficients are not negative: of the subsets of the four, the least-squares solution with least residual
among those without a negative coefficient (16 solutions of at most 4x4; exact, as NNLS is). A weak pull
towards the model in force decides what the data leave open. Pure Python, no state but what is handed in.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product, starmap
from math import sqrt
from operator import itemgetter, mul
from typing import Any

WARM_UP_SECONDS = 60.0
LEAST_STEPS = 20
MOST_STEPS = 4000.0
OUTLIER = 0.5
PATIENCE_INCREMENTS, MOST_OF_PASS = 24, 8
WORST_MISS = 0.35
PULL = 1e-4
# Without steps that computed prompts, or without ones that only decoded, there is no model.
LEAST_KIND_STEPS = 40

# Places in a row of sums, see `Moments`: of the Gram matrix of (1, P, D, K), and of its products with t.
_GRAM = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))
_CROSS = (10, 11, 12, 13)
_TIME, _TIME_SQUARED = 10, 14
_gram, _cross = itemgetter(*chain(*_GRAM)), itemgetter(*_CROSS)

Sums = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds: of a step, and for each prompt token, sequence and attended token in it."""

    base: float
    prefill: float
    sequence: float
    kv: float

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """In the order of the sums."""
        return (self.base, self.prefill, self.sequence, self.kv)

    def milliseconds(self, prefill_tokens: float, sequences: float, kv_tokens: float) -> float:
        """Of a step."""
        return self.base + self.prefill * prefill_tokens + self.sequence * sequences + self.kv * kv_tokens

    def slower(self, factor: float) -> "StepModel":
        """The model of steps that take so many times as long."""
        return StepModel(*(factor * one for one in self.coefficients))


@dataclass(frozen=True, slots=True)
class StepFit:
    """The reservoir and the model in force. residual: relative, of the last fit; num_odd: increments in a row
    that the model did not explain, without prompts and with them. is_anew: whether the reservoir was begun
    anew, after the model."""

    buckets: Mapping[str, Sums] = field(default_factory=dict)
    model: StepModel | None = None
    residual: float = 0.0
    num_odd: tuple[int, int] = (0, 0)
    is_anew: bool = False

    @property
    def context(self) -> float:
        """The most tokens that a sequence attended to on average in any bucket; 0 where none has decoded."""
        decoded = [sums[3] / sums[2] for sums in self.buckets.values() if sums[0] >= LEAST_STEPS and sums[2]]
        return max(decoded, default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "buckets": {name: list(sums) for name, sums in self.buckets.items()},
            "model": None if self.model is None else list(self.model.coefficients),
            "residual": self.residual,
            # Beside what earlier versions read.
            "num_odd": min(self.num_odd),
            "num_odd_of_kinds": list(self.num_odd),
            "is_anew": self.is_anew,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepFit":
        """The reverse of `to_dict`."""
        model = data["model"]
        return cls(
            {name: tuple(sums) for name, sums in data["buckets"].items()},
            None if model is None else StepModel(*model),
            data["residual"],
            # Checkpoints of earlier versions do not tell kinds apart.
            tuple(data.get("num_odd_of_kinds", (0, 0))),
            data.get("is_anew", False),
        )


def learnt(fit: StepFit, increments: Sequence[tuple[Sums, Sums]]) -> StepFit:
    """The fit after one more pass. increments: of each usable replica, sums of steps without and with
    prompts."""
    # In a row before this pass, unless it ends there, and in it.
    before, odd = [*fit.num_odd], [0, 0]
    model = fit.model if _is_ripe(fit.buckets) else None
    new: dict[tuple[str, int], list[Sums]] = defaultdict(list)
    for both in increments:
        for place, (kind, sums) in enumerate(zip("dp", both, strict=True)):
            if sums[0] < 1 or sums[_TIME] <= 0:
                continue
            missed = 0.0 if model is None else _mean_miss(model, sums)
            odd[place] += 1
            if missed <= WORST_MISS:
                before[place] = odd[place] = 0
            if missed <= OUTLIER:
                new[kind, int(sums[2] / sums[0]).bit_length()].append(sums)
    num_odd = (before[0] + min(odd[0], MOST_OF_PASS), before[1] + min(odd[1], MOST_OF_PASS))
    if max(num_odd) >= PATIENCE_INCREMENTS:
        return StepFit(model=fit.model, residual=fit.residual, is_anew=True)
    if not new:
        return replace(fit, num_odd=num_odd)
    buckets = dict(fit.buckets)
    for (kind, octave), rows in new.items():
        name = f"{kind}{octave}"
        buckets[name] = _forgetting(buckets.get(name), rows)
    after = replace(fit, buckets=buckets, num_odd=num_odd)
    found = _fitted(buckets, fit.model, is_anew=fit.is_anew)
    if found is None:
        return after
    model, residual, worst = found
    return replace(after, model=fit.model if worst > WORST_MISS else model, residual=residual)


def _forgetting(before: Sums | None, rows: Sequence[Sums]) -> Sums:
    """A bucket with these increments, and so much of what it was that it does not grow too heavy."""
    sums: Sums = tuple(map(sum, zip(*rows, strict=True)))
    if sums[0] > MOST_STEPS:
        sums = tuple(MOST_STEPS / sums[0] * one for one in sums)
    if before is None:
        return sums
    keep = min(1.0, (MOST_STEPS - sums[0]) / before[0])
    return tuple(keep * old + new for old, new in zip(before, sums, strict=True))


def _is_ripe(buckets: Mapping[str, Sums]) -> bool:
    """Whether there are steps enough of both kinds, in the buckets that a model is fitted to."""
    counts = {"d": 0.0, "p": 0.0}
    for name, sums in buckets.items():
        if sums[0] >= LEAST_STEPS:
            counts[name[0]] += sums[0]
    return min(counts.values()) >= LEAST_KIND_STEPS


def _merged(buckets: Mapping[str, Sums]) -> dict[str, Sums]:
    """Those that hold too few steps as one of their kind: a first model need not wait until some size of
    batch has come often enough."""
    found = {name: sums for name, sums in buckets.items() if sums[0] >= LEAST_STEPS}
    for kind in "dp":
        few = [sums for name, sums in buckets.items() if name[0] == kind and sums[0] < LEAST_STEPS]
        if few:
            found[f"{kind}-few"] = tuple(map(sum, zip(*few, strict=True)))
    return found


def _residual(model: StepModel, sums: Sums) -> float:
    """Root mean square of what the model misses, as a share of the mean time."""
    theta = model.coefficients
    explained = sum(map(mul, theta, _cross(sums)))
    square = sum(map(mul, starmap(mul, product(theta, repeat=2)), _gram(sums)))
    missed = max(0.0, sums[_TIME_SQUARED] - 2 * explained + square)
    return sqrt(missed / sums[0]) / (sums[_TIME] / sums[0])


def _mean_miss(model: StepModel, sums: Sums) -> float:
    """By how much the model misses the mean time of these steps, as a share of it."""
    return abs(sums[_TIME] - _explained(model, sums)) / sums[_TIME]


def _explained(model: StepModel, sums: Sums) -> float:
    """Milliseconds that the model says of these steps together."""
    return model.base * sums[0] + model.prefill * sums[1] + model.sequence * sums[2] + model.kv * sums[3]


def _fitted(
    buckets: Mapping[str, Sums], before: StepModel | None, *, is_anew: bool
) -> tuple[StepModel, float, float] | None:
    """The model over all buckets, its relative residual over steps, and the most that it misses a bucket's
    mean by; None where the data are too few."""
    known = buckets if _is_ripe(buckets) else _merged(buckets)
    if not _is_ripe(known):
        return None
    known = {name: sums for name, sums in known.items() if sums[0] >= LEAST_STEPS}
    rows = list(known.values())
    if is_anew and before is not None and (model := _rescaled(before, known)) is not None:
        return _judged(model, rows)
    weights = [sums[0] / sums[_TIME] ** 2 for sums in rows]
    total = [sum(map(mul, weights, column)) for column in zip(*rows, strict=True)]
    scale = [sqrt(total[_GRAM[i][i]]) or 1.0 for i in range(4)]
    gram = [[total[_GRAM[i][j]] / (scale[i] * scale[j]) for j in range(4)] for i in range(4)]
    cross = [total[_CROSS[i]] / scale[i] for i in range(4)]
    pulled = (0.0,) * 4 if before is None else before.coefficients
    for i in range(4):
        gram[i][i] += PULL
        cross[i] += PULL * pulled[i] * scale[i]
    solved = nonnegative_least_squares(gram, cross)
    model = StepModel(*(solved[i] / scale[i] for i in range(4)))
    if model.base <= 0.0 and model.sequence <= 0.0 and model.kv <= 0.0:
        return None
    return _judged(model, rows)


def _judged(model: StepModel, rows: Sequence[Sums]) -> tuple[StepModel, float, float]:
    residual = sqrt(sum(_residual(model, sums) ** 2 for sums in rows) / len(rows))
    return model, residual, max(_mean_miss(model, sums) for sums in rows)


def _rescaled(before: StepModel, known: Mapping[str, Sums]) -> StepModel | None:
    """The model in force at today's speed, where steps decoded for about the same number of sequences.

    Of these nobody can tell what a step costs from what a sequence does; the last model could, and what has
    changed is most likely how fast the replica is. None where steps were of several sizes, or where that
    would leave nothing for prompts.
    """
    decodes = [sums for name, sums in known.items() if name[0] == "d"]
    prompts = [sums for name, sums in known.items() if name[0] == "p"]
    if len(decodes) > 1:
        return None
    rest = StepModel(before.base, 0.0, before.sequence, before.kv)
    explained = sum(_explained(rest, sums) for sums in decodes)
    if explained <= 0.0:
        return None
    speed = sum(sums[_TIME] for sums in decodes) / explained
    left = sum(sums[_TIME] - speed * _explained(rest, sums) for sums in prompts)
    tokens = sum(sums[1] for sums in prompts)
    if left <= 0.0 or tokens <= 0.0:
        return None
    return StepModel(speed * rest.base, left / tokens, speed * rest.sequence, speed * rest.kv)


def nonnegative_least_squares(gram: Sequence[Sequence[float]], cross: Sequence[float]) -> list[float]:
    """The x without a negative entry that minimises x'Gx - 2c'x, for a positive definite G of a few rows.

    There is one, and it is the one where some entries are 0 and more of each of these would make it worse
    (Karush, Kuhn and Tucker); so the search ends there.
    """
    size = len(cross)
    best, best_value = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for kept in combinations(range(size), count):
            part = _solved([[gram[i][j] for j in kept] for i in kept], [cross[i] for i in kept])
            if part is None or min(part) < 0.0:
                continue
            found = [0.0] * size
            for i, one in zip(kept, part, strict=True):
                found[i] = one
            if all(
                sum(gram[i][j] * found[j] for j in kept) >= cross[i] for i in range(size) if i not in kept
            ):
                return found
            # At the solution x'Gx = c'x, so the objective is -c'x.
            value = -sum(cross[i] * one for i, one in zip(kept, part, strict=True))
            if value < best_value:
                best, best_value = found, value
    return best


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Gaussian elimination with pivots; None for a singular matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[column], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
