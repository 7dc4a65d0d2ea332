"""What the controller remembers between passes; serialisable, so that a restart forgets little."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from headway_operator.samples import Limits, Targets
from headway_operator.slo.baselines import NO_TARGETS, Baseline
from headway_operator.slo.ceiling import Ceiling
from headway_operator.slo.forecast import Course
from headway_operator.slo.growth import NO_COLUMNS, Columns
from headway_operator.slo.marks import Mark
from headway_operator.slo.pace import AS_TOLD, Pace
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepFit
from headway_operator.slo.usual import Usual

VERSION = 2
LEAST_KAPPA, MOST_KAPPA = 0.5, 1.1
NO_FIT, PLAIN, NO_COURSE = StepFit(), Factors(), Course()
NO_BASELINES: Mapping[str, Baseline] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Regret:
    """A removal that was taken back: patience, when it had last been moved, and the rise, as before that."""

    patience: float
    patience_at: float | None
    regretted_rise: float = 0.0


class Recommended(NamedTuple):
    """What the load called for at a time. per_second: requests that one replica was trusted with then, 0
    where that was not known. roomy: as in `replicas.Recommendation`."""

    at: float
    replicas: int
    per_second: float = 0.0
    roomy: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Of trust: from what to what, and requests per second that the model told of one replica then."""

    before: float
    after: float
    per_second: float


class Memory(NamedTuple):
    """Times are seconds since the epoch; None means never.

    began_at: when this memory began. replicas, limits: what was last decided.
    initial: where the spec had limits begin. targets: those that the exact counters in `slices` were taken
    against. limits_changed_at, replicas_raised_at, replicas_lowered_at: last changes by decision.
    violated_since, violated_at: first and last pass of the violation at hand.
    backlog, backlog_at: requests waiting a few seconds ago, to see whether the queue shrinks.
    recommended: the highest of each few seconds, over the time that removal looks back.
    watched_since: since when there has been somebody to look; not before the last restart.
    late_at: when requests last waited for too long.
    idle_since: since when nobody has asked for anything. parked_replicas: how many there were when the
    service was suspended; None while it is not.
    fit, workload, usual, factors (last at factors_at), course, starts: what was learnt (`sizing`). kappa: the
    trust in it, as of the pass at kappa_at, last cut at kappa_cut_at. cut: while it may be explained, not of
    the checkpoint. crowded_since: since when requests have been late at every replica; late_since: at any of
    those that are to be. excused_at: until when TTFT was missed for want of replicas. ceiling: the most that
    one was seen to do in such a crowd. pace: of steps, over what they are told to be. patience: how many
    times as long as at first is looked back before a removal, last moved at patience_at; regretted_rise: the
    largest of the load, as a share, that made removals regretted since it was 1. removed_at: of the last
    removal, while it may be regretted or its regret taken back. removed_load: how many replicas the load was
    worth then, 0 where that is not known. removed_from: how many there were before it, or before the first of
    those that went one after another. removed_per_second: what one was trusted with then. regret: while it
    may be taken back. revision: the newest, by its hash.
    trims: of max_num_seqs and max_num_batched_tokens, over the model's.
    last_decision: as `history` writes it. decisions: those before it, each as JSON. marks, columns (of
    baselines, added up): not of the checkpoint.
    """

    began_at: float = 0.0
    replicas: int | None = None
    limits: Limits | None = None
    initial: Limits | None = None
    targets: Targets = NO_TARGETS
    slices: tuple[Slice, ...] = ()
    baselines: Mapping[str, Baseline] = NO_BASELINES
    limits_changed_at: float | None = None
    replicas_raised_at: float | None = None
    replicas_lowered_at: float | None = None
    violated_since: float | None = None
    violated_at: float | None = None
    backlog: int = 0
    backlog_at: float | None = None
    recommended: tuple[Recommended, ...] = ()
    watched_since: float | None = None
    late_at: float | None = None
    idle_since: float | None = None
    parked_replicas: int | None = None
    fit: StepFit = NO_FIT
    workload: Workload | None = None
    usual: Usual | None = None
    factors: Factors = PLAIN
    factors_at: float | None = None
    course: Course = NO_COURSE
    starts: tuple[tuple[float, float], ...] = ()
    kappa: float = 1.0
    kappa_at: float | None = None
    kappa_cut_at: float | None = None
    cut: Cut | None = None
    crowded_since: float | None = None
    late_since: float | None = None
    excused_at: float | None = None
    ceiling: Ceiling | None = None
    pace: Pace = AS_TOLD
    patience: float = 1.0
    patience_at: float | None = None
    regretted_rise: float = 0.0
    removed_at: float | None = None
    removed_load: float = 0.0
    removed_from: int | None = None
    removed_per_second: float = 0.0
    regret: Regret | None = None
    revision: str = ""
    trims: tuple[float, float] = (1.0, 1.0)
    decisions: tuple[bytes, ...] = ()
    last_decision: Mapping[str, Any] | None = None
    marks: tuple[Mark, ...] = ()
    columns: Columns = NO_COLUMNS

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        work, usual = self.workload, self.usual
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            **{name: getattr(self, name) for name in _LATER_FIELDS},
            "limits": _pair(self.limits),
            "initial": _pair(self.initial),
            "targets": [*astuple(self.targets)],
            "slices": [one.to_dict() for one in self.slices],
            "baselines": {name: baseline.to_dict() for name, baseline in self.baselines.items()},
            "recommended": [list(one) for one in self.recommended],
            "fit": self.fit.to_dict(),
            "workload": None if work is None else [getattr(work, name) for name in _WORKLOAD_FIELDS],
            # Beside these, which earlier versions read.
            "workload_tokens": 0.0 if work is None else work.tokens,
            "usual": None if usual is None else asdict(usual),
            "factors": list(astuple(self.factors)),
            "pace": list(self.pace),
            "ceiling": None if self.ceiling is None else list(astuple(self.ceiling)),
            "course": self.course.to_dict(),
            "starts": [list(one) for one in self.starts],
            "regret": None if self.regret is None else list(astuple(self.regret)),
            "trims": list(self.trims),
            "decisions": [
                *map(json.loads, self.decisions),
                *(() if self.last_decision is None else (self.last_decision,)),
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None, now: float) -> "Memory":
        """The memory that `to_dict` wrote; a fresh one, begun at `now`, for None or another version. Of the
        first version only what a suspension set aside is still understood.

        That fewer replicas would have been enough, or none, is not believed across a restart: nobody watched.
        Raises KeyError, TypeError or ValueError for a memory that was damaged.
        """
        if not data or data.get("version") != VERSION:
            return cls(began_at=now, parked_replicas=(data or {}).get("parked_replicas"))
        work = data["workload"]
        return cls(
            **{name: data[name] for name in _PLAIN_FIELDS if name != "kappa"},
            # Checkpoints of earlier versions lack some.
            **{name: data[name] for name in _LATER_FIELDS if name in data},
            kappa=max(LEAST_KAPPA, min(MOST_KAPPA, data["kappa"])),
            limits=None if data["limits"] is None else Limits(*data["limits"]),
            initial=None if data["initial"] is None else Limits(*data["initial"]),
            targets=Targets(*data["targets"]),
            slices=tuple(Slice.from_dict(one) for one in data["slices"]),
            baselines={name: Baseline.from_dict(one) for name, one in data["baselines"].items()},
            # Those of checkpoints of earlier versions are shorter.
            recommended=tuple(Recommended(*one) for one in data["recommended"]),
            fit=StepFit.from_dict(data["fit"]),
            workload=None if work is None else _workload(work, data.get("workload_tokens", 0.0)),
            # In those of earlier versions the numbers are of passes, 20 at most: soon made up for.
            factors=Factors(*data["factors"]),
            # Checkpoints of earlier versions have none of these.
            usual=None if data.get("usual") is None else _usual(data["usual"]),
            pace=Pace(*data.get("pace", AS_TOLD)),
            ceiling=None if data.get("ceiling") is None else Ceiling(*data["ceiling"]),
            course=Course.from_dict(data["course"]),
            starts=tuple((at, seconds) for at, seconds in data["starts"]),
            regret=None if data.get("regret") is None else Regret(*data["regret"]),
            trims=(data["trims"][0], data["trims"][1]),
            decisions=tuple(json.dumps(one).encode() for one in data["decisions"][:-1]),
            last_decision=data["decisions"][-1] if data["decisions"] else None,
        )


_PLAIN_FIELDS = (
    *("began_at", "replicas", "limits_changed_at", "replicas_raised_at", "replicas_lowered_at"),
    *("violated_since", "violated_at", "backlog", "backlog_at", "parked_replicas"),
    *("kappa", "kappa_at", "kappa_cut_at"),
)
_LATER_FIELDS = (
    *(
        "late_at",
        "factors_at",
        "crowded_since",
        "late_since",
        "excused_at",
        "patience",
        "patience_at",
        "removed_at",
        "removed_from",
    ),
    *("regretted_rise", "removed_load", "removed_per_second", "revision"),
)
_WORKLOAD_FIELDS = ("prompt", "prompt_square", "answer", "context", "kv_share")


def _workload(numbers: Sequence[float], tokens: float) -> Workload:
    return Workload(**dict(zip(_WORKLOAD_FIELDS, numbers, strict=True)), tokens=tokens)


def _usual(data: Mapping[str, Any]) -> Usual:
    numbers = {name: data["workload"][name] for name in (*_WORKLOAD_FIELDS, "tokens")}
    return Usual(Workload(**numbers), data["seconds"], data["at"])


def _pair(limits: Limits | None) -> list[int] | None:
    return None if limits is None else [limits.max_num_seqs, limits.max_num_batched_tokens]
