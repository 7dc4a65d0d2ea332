"""A step in the making: how many tokens each sequence gets of it, and what is left to give. No blocks."""

from dataclasses import dataclass, field

from headway_runtime.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """The tokens given so far.

    largest: tokens that long prompts may take together while others want some; long_budget: what is left.
    drafts: of those that may be guessed. prompts: all prompts under way, and those admitted.
    """

    budget: int
    largest: int
    long_budget: int
    shares: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, int] = field(default_factory=dict)
    prompts: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def part_for(self, num_pending: int) -> int:
        """Tokens that a prompt gets at first."""
        limit = self.budget if num_pending <= self.largest else min(self.budget, self.long_budget)
        return min(num_pending, limit)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens > 0:
            self.shares[sequence] = self.shares.get(sequence, 0) + num_tokens
            self.budget -= num_tokens

    def give_prompt(self, sequence: Sequence) -> None:
        """Give a prompt its first part."""
        num_pending = sequence.num_pending
        num_tokens = self.part_for(num_pending)
        if num_pending > self.largest:
            self.long_budget -= num_tokens
        self.prompts.append(sequence)
        self.give(sequence, num_tokens)

    def give_rest(self) -> None:
        """What is left goes to the prompts that were cut short, by rank."""
        for sequence in self.prompts:
            extra = min(sequence.num_pending - self.shares.get(sequence, 0), self.budget)
            self.give(sequence, extra)
