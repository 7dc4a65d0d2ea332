"""What guessing tokens ahead brought, counted: guesses, those that came true, and time."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftSnapshot:
    """Everything so far.

    num_drafts: times that tokens were guessed for a sequence. num_tokens, num_accepted: tokens guessed, and
    those that came true. accepted_at: of these, how many were the first, second, ... guess.
    seconds: of decode steps with guesses, guessing included. plain_seconds: what the same tokens would have
    taken without, by what steps without guesses take; their ratio is the speed-up.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    seconds: float = 0.0
    plain_seconds: float = 0.0


@dataclass(slots=True)
class DraftCounters:
    """The live numbers."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Tokens guessed for one sequence in one step."""
        self.num_drafts += 1
        self.num_tokens += num_drafted
        self.num_accepted += num_accepted
        self.accepted_at.extend([0] * (num_accepted - len(self.accepted_at)))
        for index in range(num_accepted):
            self.accepted_at[index] += 1

    def took(self, seconds: float, plain_seconds: float) -> None:
        """A step with guesses, and what its tokens would have taken without."""
        self.seconds += seconds
        self.plain_seconds += plain_seconds

    def snapshot(self) -> DraftSnapshot:
        """A copy."""
        return DraftSnapshot(
            self.num_drafts,
            self.num_tokens,
            self.num_accepted,
            tuple(self.accepted_at),
            self.seconds,
            self.plain_seconds,
        )
