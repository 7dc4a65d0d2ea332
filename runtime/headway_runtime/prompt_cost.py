"""What a prompt's tokens cost a step, in tokens that attend to nothing: more, the more they attend to.

A token's products take the same time wherever it stands; its attention takes time for every token before it.
So a chunk at the end of a prompt of 60,000 tokens can take seven times as long as one at its beginning, and
who decodes beside it waits for that. Counted by what they cost, chunks get shorter the further they come, and
steps of one budget take the same time:

    cost of a token that attends to n tokens, itself included = 1 + n / doubling_context
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptCost:
    """doubling_context: tokens that one attends to which costs as much as two that attend to nothing; 0: all
    cost the same, however many they attend to."""

    doubling_context: int = 0

    def of(self, start: int, num_tokens: int) -> int:
        """Of tokens at positions from `start` on, in tokens that attend to nothing, to the nearest one."""
        if not self.doubling_context:
            return num_tokens
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens + (2 * pairs + self.doubling_context) // (2 * self.doubling_context)

    def most_tokens(self, start: int, budget: int) -> int:
        """The most tokens from `start` on that cost no more."""
        if not self.doubling_context or budget < 1:
            return max(0, budget)
        # The root of n + n (start + (n + 1) / 2) / doubling_context = budget.
        linear = 2 * (self.doubling_context + start) + 1
        return (math.isqrt(linear * linear + 8 * self.doubling_context * budget) - linear) // 2


EVEN = PromptCost()
