"""Where one sequence stands in the grammar that its generated tokens must match.

A matcher belongs to its sequence and goes with it. It is advanced with each token that the sequence takes,
and says when the answer is complete. What it allows next is read by the sampler.
"""

from typing import TYPE_CHECKING

from headway_runtime.grammar import shorten
from headway_runtime.request import FinishReason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class TokenMatcher:
    """One sequence's state.

    library_matcher: llguidance's own; this object is its only user.
    unwanted_ids: end-of-sequence tokens that do not end this request, so that they make no sense in it.
    param: the request's field that the grammar came from.
    """

    __slots__ = ("library_matcher", "param", "unwanted_ids")

    def __init__(self, library_matcher: "LLMatcher", unwanted_ids: frozenset[int], param: str) -> None:
        self.library_matcher = library_matcher
        self.unwanted_ids = unwanted_ids
        self.param = param

    @property
    def error(self) -> str | None:
        """Why the grammar can be followed no longer; None while it can."""
        if not self.library_matcher.is_error():
            return None
        return f"the grammar cannot be followed any further: {shorten(self.library_matcher.get_error())}"

    def after(self, token_id: int) -> "TokenMatcher | None":
        """A matcher that has taken one token more; None if the grammar does not allow it, or ends with it."""
        copied = TokenMatcher(self.library_matcher.deep_copy(), self.unwanted_ids, self.param)
        return copied if copied.advance(token_id) is None else None

    def advance(self, token_id: int) -> FinishReason | None:
        """Take the next token. STOP if nothing can follow it, ERROR if the grammar does not allow it."""
        if not self.library_matcher.consume_token(token_id):
            return FinishReason.ERROR
        return FinishReason.STOP if self.library_matcher.is_stopped() else None
