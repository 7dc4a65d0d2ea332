"""What the ranks of a model exchange, counted by the first of them. Imports no torch."""

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Traffic:
    """So far.

    num_ranks: that share the model. num_bytes: of tensors that were added up, gathered or sent, as a rank
    has them.
    seconds: until these were done, waiting for the slowest rank included; 0 on a GPU, which nobody waits for.
    """

    num_ranks: int = 1
    num_exchanges: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def snapshot(self) -> "Traffic":
        """A copy."""
        return replace(self)

    def set_back(self, before: "Traffic") -> "Traffic":
        """Be as at a `snapshot`, because what was counted since has not been done; returns that."""
        since = Traffic(self.num_ranks, self.num_exchanges - before.num_exchanges)
        since.num_bytes = self.num_bytes - before.num_bytes
        self.num_exchanges, self.num_bytes, self.seconds = (
            before.num_exchanges,
            before.num_bytes,
            before.seconds,
        )
        return since

    def add(self, more: "Traffic") -> None:
        """Count what was done without having been counted. Nobody waits for it, so it takes no seconds."""
        self.num_exchanges += more.num_exchanges
        self.num_bytes += more.num_bytes
