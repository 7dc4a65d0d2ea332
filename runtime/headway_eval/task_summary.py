"""What the answers of both models to the same tasks come to. Plain numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway_eval.intervals import discordant_probability, wilson


@dataclass(frozen=True, slots=True)
class Paired:
    """One task's outcome: whether each of the two was right."""

    kind: str
    model_right: bool
    baseline_right: bool


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """num_lost: tasks that only the baseline got right; num_won: that only the model did."""

    name: str
    num_tasks: int
    model_right: int
    baseline_right: int
    num_lost: int
    num_won: int

    @property
    def model_accuracy(self) -> float:
        return self.model_right / self.num_tasks

    @property
    def baseline_accuracy(self) -> float:
        return self.baseline_right / self.num_tasks

    @property
    def model_interval(self) -> tuple[float, float]:
        return wilson(self.model_right, self.num_tasks)

    @property
    def baseline_interval(self) -> tuple[float, float]:
        return wilson(self.baseline_right, self.num_tasks)

    @property
    def drop_points(self) -> float:
        """Percentage points that the model is worse by; negative where it is better."""
        return 100 * (self.baseline_right - self.model_right) / self.num_tasks

    @property
    def probability_by_chance(self) -> float:
        """Of so uneven a split, if the model were as good as the baseline."""
        return discordant_probability(self.num_lost, self.num_won)


@dataclass(frozen=True, slots=True)
class SuiteSummary:
    """One file of tasks: all of them, and each kind on its own, in order of appearance."""

    whole: TaskSummary
    kinds: tuple[TaskSummary, ...]


def summarize_suite(name: str, outcomes: Sequence[Paired]) -> SuiteSummary:
    """outcomes: at least one."""
    kinds = tuple(dict.fromkeys(one.kind for one in outcomes))
    parts = tuple(_summarize(kind, (one for one in outcomes if one.kind == kind)) for kind in kinds)
    return SuiteSummary(_summarize(name, outcomes), parts)


def _summarize(name: str, outcomes: Iterable[Paired]) -> TaskSummary:
    listed = list(outcomes)
    return TaskSummary(
        name,
        len(listed),
        sum(one.model_right for one in listed),
        sum(one.baseline_right for one in listed),
        sum(one.baseline_right and not one.model_right for one in listed),
        sum(one.model_right and not one.baseline_right for one in listed),
    )
