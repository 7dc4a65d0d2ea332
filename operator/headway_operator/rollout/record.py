"""What status remembers of rollouts, so that an operator that starts again goes on where the last one was.

The structures are those of `status.rollout`, camelCase outside. Times are as Kubernetes writes them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import msgspec
from msgspec import Struct

from headway_operator.state import RevisionPin

Slowness = Literal["", "suspected", "cleared"]


class Pin(Struct, frozen=True, rename="camel"):
    """A `RevisionPin` as status has it."""

    name: str
    hash: str
    runtime_image: str
    gateway_image: str
    gateway_hash: str
    spec_hash: str
    gateway_spec_hash: str = ""
    drain_timeout_seconds: int = 0

    @classmethod
    def of(cls, pin: RevisionPin) -> "Pin":
        """As status has it."""
        return cls(**asdict(pin))

    def pin(self) -> RevisionPin:
        """As everything else has it."""
        return RevisionPin(**msgspec.structs.asdict(self))


class Failure(Struct, frozen=True, rename="camel"):
    """A revision that was given up. spec_hash: of the spec that asked for it, and must not be tried again."""

    name: str
    spec_hash: str
    reason: str
    message: str
    failed_at: str


class Record(Struct, frozen=True, rename="camel", omit_defaults=True):
    """stable: what served whole last. candidate: what is to follow it, or "".

    ready_replicas, older_replicas: how far it has come: most of its own that were ready, fewest of others.
    progressed_at: "" while no replica is wanted. step: steps of the canary passed; weight,
    step_started_at: the share it gets, and since when. slowness: "suspected" while a step is repeated, since
    the candidate has been slower in it; "cleared" once it has not been so again.
    """

    stable: Pin | None = None
    candidate: str = ""
    started_at: str = ""
    progressed_at: str = ""
    ready_replicas: int = 0
    older_replicas: int = 0
    step: int = 0
    weight: int = 0
    step_started_at: str = ""
    slowness: Slowness = ""
    failed: Failure | None = None


def recorded(status: Mapping[str, Any]) -> Record | None:
    """What status has; None where it has nothing, or nothing that can be read."""
    told = status.get("rollout")
    if told is None:
        return None
    try:
        return msgspec.convert(told, Record)
    except msgspec.ValidationError:
        return None


def as_status(record: Record) -> dict[str, Any]:
    """The reverse."""
    result: dict[str, Any] = msgspec.to_builtins(record)
    return result
