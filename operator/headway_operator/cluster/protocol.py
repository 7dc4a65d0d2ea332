"""What a cluster must be able to do. Two implementations: `kubernetes.py` and `local.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from headway_operator.state import ChildKey, Manifest, Observed, ServiceKey, Site


class Cluster(Protocol):
    """One place where services live. Every call has a time limit; its errors are of `ClusterError`'s tree."""

    @property
    def site(self) -> Site:
        """What the renderer must know of this world."""

    async def check_alone(self, key: ServiceKey) -> None:
        """Raise OtherOperatorError where another operator looks after the service."""

    async def observe(self, key: ServiceKey) -> Observed:
        """Read the service's children as they are now."""

    async def model_caches(self, namespace: str, names: Sequence[str]) -> Mapping[str, Manifest | None]:
        """The ModelCaches of these names as they are now, status included; None for one that is not there."""

    async def digests(self, key: ServiceKey, files: Sequence[str]) -> Mapping[str, str]:
        """A digest of each file that `spec.quality` names; "" where it cannot be seen from here.

        A file that is known not to be there is left out.
        """

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """Server-side apply one child with Headway's field manager. Never sets replicas of a revision."""

    async def repair(self, key: ServiceKey, child: ChildKey) -> None:
        """Undo what others changed in the object of a revision or gateway that is kept and not rendered."""

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        """Set the replicas of one revision through its scale subresource."""

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        """Delete one child that is ours and no longer wanted; absent is success."""

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        """Say which replica should go first when replicas are removed (lowest first)."""

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a status is kept, as far as that is known: an older definition keeps less of it."""

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Replace the status subresource."""

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Record an event on the service."""

    async def load_memory(self, key: ServiceKey) -> Mapping[str, Any] | None:
        """The controller's checkpoint, or None."""

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any], until: float) -> None:
        """Write the controller's checkpoint. until: other operators leave the service to this one."""
