"""What the operator tells a gateway: its revisions, their shares of requests, who may wait and for how long.

Told whole by `PUT /admin/routing` and kept in memory alone. A gateway that starts again goes by its flags
until the operator sees in its sample what it lacks. No I/O, no choosing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_gateway.errors import RoutingError

MOST_REVISIONS = 16
MOST_WEIGHT = 100
MOST_WAITING = 1_000_000
LONGEST_WAITING_SECONDS = 86_400.0
_FIELDS = ("revisions", "weights", "max_waiting", "waiting_timeout_seconds", "suspended")


@dataclass(frozen=True, slots=True)
class Routing:
    """weights: revision -> its share of requests; empty: by load alone.

    Beside revisions with a share, one without any takes a request only where no other can. is_suspended:
    every request is refused at once.
    """

    max_waiting: int
    waiting_timeout_seconds: float
    revisions: tuple[str, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)
    is_suspended: bool = False

    def revision_of(self, backend_id: str) -> str:
        """The revision of a backend, whose name begins with the revision's; "" if none."""
        mine = [revision for revision in self.revisions if backend_id.startswith(f"{revision}-")]
        return max(mine, key=len, default="")

    def to_dict(self) -> dict[str, Any]:
        """As it was told."""
        return {
            "revisions": list(self.revisions),
            "weights": dict(self.weights),
            "max_waiting": self.max_waiting,
            "waiting_timeout_seconds": self.waiting_timeout_seconds,
            "suspended": self.is_suspended,
        }


def parse_routing(content: bytes) -> Routing:
    """Read the body of `PUT /admin/routing`. Raises RoutingError naming field, value and remedy."""
    try:
        told = json.loads(content)
    except ValueError as error:
        raise RoutingError(f"the routing is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise RoutingError(f"the routing={told!r} is not an object; write one with {', '.join(_FIELDS)}")
    unknown, missing = sorted(set(told) - set(_FIELDS)), sorted(set(_FIELDS) - set(told))
    if unknown:
        raise RoutingError(f"{unknown[0]} is not a field of the routing; write {', '.join(_FIELDS)}")
    if missing:
        raise RoutingError(f"the routing lacks {missing[0]}; it is told whole")
    revisions = _revisions(told["revisions"])
    max_waiting, timeout, suspended = (
        told["max_waiting"],
        told["waiting_timeout_seconds"],
        told["suspended"],
    )
    if not _is_whole(max_waiting) or not 0 <= max_waiting <= MOST_WAITING:
        raise RoutingError(f"max_waiting={max_waiting!r} is not a number from 0 to {MOST_WAITING}")
    if not isinstance(timeout, int | float) or not 0 <= timeout <= LONGEST_WAITING_SECONDS:
        raise RoutingError(
            f"waiting_timeout_seconds={timeout!r} is not a time from 0 to {LONGEST_WAITING_SECONDS:g} seconds"
        )
    if not isinstance(suspended, bool):
        raise RoutingError(f"suspended={suspended!r} is neither true nor false")
    return Routing(max_waiting, float(timeout), revisions, _weights(told["weights"], revisions), suspended)


def _revisions(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise RoutingError(f"revisions={value!r} is not a list of names")
    if len(value) > MOST_REVISIONS:
        raise RoutingError(f"revisions has {len(value)} names; {MOST_REVISIONS} at most")
    return tuple(value)


def _weights(value: Any, revisions: tuple[str, ...]) -> dict[str, int]:
    if not isinstance(value, dict):
        raise RoutingError(f"weights={value!r} is not an object; write shares by revision, or an empty one")
    for revision, weight in value.items():
        if revision not in revisions:
            raise RoutingError(f"weights names {revision!r}, which is not among revisions; add it there")
        if not _is_whole(weight) or not 0 <= weight <= MOST_WEIGHT:
            raise RoutingError(f"weights[{revision!r}]={weight!r} is not a number from 0 to {MOST_WEIGHT}")
    if value and not any(value.values()):
        raise RoutingError("weights are all 0, so that nobody would be asked; give one a share")
    return dict(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
