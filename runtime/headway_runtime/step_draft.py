"""A step in the making: how many tokens each sequence gets of it, what is left to give, and its batch. No
blocks."""

from dataclasses import dataclass, field

from headway_runtime.batch import Batch, Chunk
from headway_runtime.prompt_cost import EVEN, PromptCost
from headway_runtime.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """The tokens given so far, and budgets of what tokens cost; a decode and a guess cost 1 each.

    largest: what long prompts may take together while others want some; long_budget: what is left of it.
    is_full: a prompt was cut short by the budget. What is left is less than a token of it costs, and no room
    for another prompt; with long_budget likewise.
    cost: of a prompt's tokens. drafts: of those that may be guessed. prompts: all prompts under way, and
    those admitted.
    """

    budget: int
    largest: int
    long_budget: int
    cost: PromptCost = EVEN
    is_full: bool = False
    shares: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, int] = field(default_factory=dict)
    prompts: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def takes_prompts(self) -> bool:
        """Whether a prompt may still have a part."""
        return self.budget > 0 and not self.is_full

    def part_for(self, start: int, num_pending: int) -> int:
        """Tokens that a prompt gets at first which is computed up to `start`: at least one, whatever it
        costs, where there is any budget for it."""
        limit = self.budget if self._is_short(start, num_pending) else min(self.budget, self.long_budget)
        return min(num_pending, max(1, self.cost.most_tokens(start, limit))) if limit > 0 else 0

    def part_alone(self, start: int, num_pending: int) -> int:
        """All that a prompt gets, first and last, if it is the only one."""
        first = self.part_for(start, num_pending)
        left = self.budget - self.cost.of(start, first)
        return first + min(num_pending - first, self.cost.most_tokens(start + first, left))

    def give_decode(self, sequence: Sequence) -> None:
        """Its one token."""
        self.shares[sequence] = 1
        self.budget -= 1

    def take_back(self, sequence: Sequence) -> None:
        """What a sequence was given that is preempted: nothing, or a decode's token."""
        self.budget += self.shares.pop(sequence, 0)
        self.preempted.append(sequence)

    def give_prompt(self, sequence: Sequence) -> None:
        """Give a prompt its first part."""
        start, num_pending = sequence.num_computed, sequence.num_pending
        num_tokens = self.part_for(start, num_pending)
        is_cut = num_tokens < num_pending
        is_long = not self._is_short(start, num_pending)
        if is_cut and not (is_long and self.long_budget < self.budget):
            self.is_full = True
        if is_long:
            left = self.long_budget - self.cost.of(start, num_tokens)
            self.long_budget = min(0, left) if is_cut else left
        self.prompts.append(sequence)
        self._give(sequence, start, num_tokens)

    def give_rest(self) -> None:
        """What is left goes to the prompts that were cut short, by rank."""
        for sequence in self.prompts:
            given = self.shares.get(sequence, 0)
            start = sequence.num_computed + given
            most = self.cost.most_tokens(start, self.budget)
            self._give(sequence, start, min(sequence.num_pending - given, most))

    def batch(self) -> Batch:
        """The step's work; notes in its sequences what they are given."""
        decodes: list[Chunk] = []
        others: list[Chunk] = []
        drafts = self.drafts
        num_drafted = sum(drafts.values())
        for sequence, share in self.shares.items():
            request, token_ids, start = sequence.request, sequence.token_ids, sequence.num_computed
            end = start + share
            num_drafts = drafts.get(sequence, 0) if drafts else 0
            sequence.num_given = end + num_drafts
            num_known = len(token_ids)
            # By position: names take a third longer, for each sequence of each step.
            (decodes if share == 1 else others).append(
                Chunk(
                    request.request_id,
                    token_ids,
                    start,
                    share,
                    sequence.block_table,
                    num_known - sequence.num_prompt,
                    end == num_known,
                    request.sampling,
                    sequence.matcher,
                    num_drafts,
                    (),
                    sequence.adapter.slot,
                )
            )
        num_tokens = sum(self.shares.values()) + num_drafted
        return Batch((*decodes, *others), len(decodes), num_tokens, num_drafted)

    def _is_short(self, start: int, num_pending: int) -> bool:
        return self.cost.of(start, num_pending) <= self.largest

    def _give(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        if num_tokens > 0:
            self.shares[sequence] = self.shares.get(sequence, 0) + num_tokens
            self.budget -= self.cost.of(start, num_tokens)
