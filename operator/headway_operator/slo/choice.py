"""What a rule of the controller chose: a change, or to hold with the reason why."""

from dataclasses import dataclass

from headway_operator.samples import Limits
from headway_operator.slo.situation import Situation


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule chose. trims: see `knobs`; None where no limit moved."""

    replicas: int
    limits: Limits
    cause: str
    message: str
    blocker: str = ""
    trims: tuple[float, float] | None = None


def hold(situation: Situation, cause: str, message: str, blocker: str = "") -> Choice:
    """No change, except for what today's bounds of the spec ask, or the end of a suspension."""
    remembered, desired = situation.memory.replicas, situation.supply.desired
    if remembered is not None and remembered != desired and not situation.other_scaler:
        is_resumed = situation.memory.parked_replicas is not None
        why = "spec.suspend is false again" if is_resumed else "the spec's bounds ask for it"
        message = f"{why}: replicas {remembered} -> {desired}"
        return Choice(
            desired, situation.limits, "Resumed" if is_resumed else "BoundsChanged", message, blocker
        )
    return Choice(desired, situation.limits, cause, message, blocker)
