"""Which replicas are in trouble, and the one cause that is told for all of them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from headway_operator.state import Gateway, Loss, Observed, Replica, is_crashing

# A new replica that waits for something is in trouble once it has waited for so long: a node may just be
# added.
PATIENCE_SECONDS = 60.0
# A replica that was lost is told of for so long; the one in its place has started by then, or says why not.
LOSS_SECONDS = 600.0


def crashing(observed: Observed) -> list[Replica]:
    """Those that cannot run."""
    return [replica for replica in observed.replicas if is_crashing(replica)]


def in_trouble(observed: Observed, now: float) -> list[Replica]:
    """Those that cannot run, and those that have waited too long for something that they name."""
    return [
        replica
        for replica in observed.replicas
        if is_crashing(replica)
        or (
            replica.reason
            and replica.phase in ("pending", "starting")
            and now - replica.created_at >= PATIENCE_SECONDS
        )
    ]


def gateway_is_in_trouble(gateway: Gateway, now: float) -> bool:
    """Whether one of its pods does not serve and says why, and has not just been made; others may serve."""
    has_waited = gateway.waits_since is None or now - gateway.waits_since >= PATIENCE_SECONDS
    return bool(gateway.reason) and has_waited


def gateway_words(gateway: Gateway) -> str:
    """What is wrong with the gateway, told apart from what is wrong with a replica."""
    if not gateway.reason:
        return gateway.message or "the gateway is not ready yet"
    which = "a gateway is not ready, another one is" if gateway.ready else "no gateway is ready"
    return f"{which}: {gateway.message or gateway.reason}"


def recent_losses(observed: Observed, now: float) -> list[Loss]:
    """Replicas that were taken away lately, the latest first."""
    return [loss for loss in observed.losses if now - loss.at < LOSS_SECONDS]


def cause_of(replicas: Iterable[Replica], losses: Sequence[Loss] = ()) -> tuple[str, str]:
    """The commonest reason of those replicas with one replica's words for it; else why others were lost."""
    replicas = list(replicas)
    named = [replica for replica in replicas if replica.reason]
    if named:
        reason, _ = Counter(replica.reason for replica in named).most_common(1)[0]
        example = next(replica for replica in named if replica.reason == reason)
        return reason, f"{example.name}: {example.message or reason}"
    phases = Counter(replica.phase for replica in replicas)
    waiting = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    if losses:
        after = f"; in its place: {waiting}" if waiting else ""
        return losses[0].reason, f"{losses[0].name}: {losses[0].message}{after}"
    return ("ReplicasStarting", waiting) if waiting else ("NoReplicas", "no replica exists yet")
