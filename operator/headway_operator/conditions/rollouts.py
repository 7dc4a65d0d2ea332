"""What conditions say of a rollout: that it is paused, waits for room, is in a canary, or was given up."""

from headway_operator.conditions.condition import Condition
from headway_operator.rollout import Rollout
from headway_operator.rollout.trouble import is_failing, lacks_room
from headway_operator.spec import Service
from headway_operator.state import Observed, Rendered

REMEDY = "it is not tried again until the spec changes"


def progressing(
    service: Service, rendered: Rendered, observed: Observed, wanted: int, rollout: Rollout
) -> Condition | None:
    """Progressing while a rollout is what there is to say; None where it is not."""
    if rollout.given_up:
        return Condition("Progressing", "False", *_given_up(rollout))
    record = rollout.record
    if not record.candidate or record.candidate != rendered.revision.name or not wanted:
        return None
    mine = [one for one in observed.replicas if one.revision == rendered.revision.hash]
    num_ready = sum(one.phase == "ready" for one in mine)
    others = sum(one.phase == "ready" for one in observed.replicas) - num_ready
    if rollout.is_paused:
        failing = next(one for one in mine if is_failing(one))
        cause = f"{failing.name}: {failing.message or failing.reason}"
        words = f"revision {record.candidate} does not come up: {cause}; {_serving(others)}"
        return Condition("Progressing", "False", failing.reason, words)
    if rollout.most is not None:
        weight = f"gets {record.weight}% of the requests" if record.weight else "gets no requests yet"
        waits = f"; {rollout.waits_for}" if rollout.waits_for else ""
        return Condition("Progressing", "True", "Canary", f"revision {record.candidate} {weight}{waits}")
    roomless = next((one for one in mine if lacks_room(one)), None)
    if roomless is None or not others:
        return None
    own = f"revision {record.candidate} has {num_ready} of {wanted} replicas ready"
    words = f"{own}, {others} of older ones serve"
    if service.spec.rollout.max_unavailable:
        return Condition("Progressing", "True", "MakingRoom", f"{words}; one out, one in: {roomless.message}")
    return Condition("Progressing", "True", "WaitingForRoom", f"{words}; {roomless.message}")


def degraded(rollout: Rollout) -> Condition | None:
    """Degraded after a revision was given up."""
    return Condition("Degraded", "True", *_given_up(rollout)) if rollout.given_up else None


def _given_up(rollout: Rollout) -> tuple[str, str]:
    failed = rollout.record.failed
    assert failed is not None, "called for a revision that was given up"
    serves = f"revision {rollout.stable} serves"
    words = f"revision {failed.name} was given up: {failed.message}; {serves}; {REMEDY}"
    return failed.reason, words


def _serving(others: int) -> str:
    return f"the rollout is paused, {others} replicas of older revisions serve"
