"""What the controller remembers between passes; serialisable, so that a restart forgets little."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from headway_operator.slo.window import NO_TARGETS, Baseline, Slice
from headway_operator.state import Limits, Targets

VERSION = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Times are seconds since the epoch; None means never.

    began_at: when this memory began. replicas, limits: what was last decided.
    initial: where the spec had limits begin. targets: those that the exact counters in `slices` were taken
    against. limits_changed_at, replicas_raised_at: last changes by decision.
    violated_since, violated_at: first and last pass of the violation at hand.
    backlog, backlog_at: requests waiting a few seconds ago, to see whether the queue shrinks.
    enough_since: since when one replica fewer would have been enough.
    ceiling_seqs, ceiling_until: a `max_num_seqs` that broke the TPOT target, not tried again for a while.
    floor_replicas, floor_until: a number of replicas that proved too few and is not tried again for a while.
    lowered_to, lowered_at: the last removal, to learn from when it proves wrong.
    idle_since: since when nobody has asked for anything. parked_replicas: how many there were when the
    service was suspended; None while it is not.
    """

    began_at: float = 0.0
    replicas: int | None = None
    limits: Limits | None = None
    initial: Limits | None = None
    targets: Targets = NO_TARGETS
    slices: tuple[Slice, ...] = ()
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    limits_changed_at: float | None = None
    replicas_raised_at: float | None = None
    violated_since: float | None = None
    violated_at: float | None = None
    backlog: int = 0
    backlog_at: float | None = None
    enough_since: float | None = None
    ceiling_seqs: int | None = None
    ceiling_until: float = 0.0
    floor_replicas: int | None = None
    floor_until: float = 0.0
    lowered_to: int | None = None
    lowered_at: float | None = None
    idle_since: float | None = None
    parked_replicas: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        return {
            "version": VERSION,
            **plain,
            "parked_replicas": self.parked_replicas,
            "limits": _pair(self.limits),
            "initial": _pair(self.initial),
            "targets": [*astuple(self.targets)],
            "slices": [one.to_dict() for one in self.slices],
            "baselines": {name: baseline.to_dict() for name, baseline in self.baselines.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None, now: float) -> "Memory":
        """The memory that `to_dict` wrote; a fresh one, begun at `now`, for None or another version.

        That fewer replicas would have been enough, or none, is not believed across a restart: nobody watched.
        Raises KeyError, TypeError or ValueError for a memory that was damaged.
        """
        if not data or data.get("version") != VERSION:
            return cls(began_at=now)
        memory = cls(
            **{name: data[name] for name in _PLAIN_FIELDS},
            limits=None if data["limits"] is None else Limits(*data["limits"]),
            initial=None if data["initial"] is None else Limits(*data["initial"]),
            targets=Targets(*data["targets"]),
            slices=tuple(Slice.from_dict(one) for one in data["slices"]),
            baselines={name: Baseline.from_dict(one) for name, one in data["baselines"].items()},
            parked_replicas=data.get("parked_replicas"),  # which a checkpoint of an earlier version lacks
        )
        return replace(memory, enough_since=None)


_PLAIN_FIELDS = (
    "began_at",
    "replicas",
    "limits_changed_at",
    "replicas_raised_at",
    "violated_since",
    "violated_at",
    "backlog",
    "backlog_at",
    "enough_since",
    "ceiling_seqs",
    "ceiling_until",
    "floor_replicas",
    "floor_until",
    "lowered_to",
    "lowered_at",
)


def _pair(limits: Limits | None) -> list[int] | None:
    return None if limits is None else [limits.max_num_seqs, limits.max_num_batched_tokens]
