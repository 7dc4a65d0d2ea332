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
