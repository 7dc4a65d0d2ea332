"""Cuts a long text into overlapping windows, so that each token is scored once and with context before it.

The first window begins with the text and scores all its tokens but the first, which nothing precedes. Each
later one begins `stride` tokens after the one before and scores only what that one did not reach; so every
token but those of the first window has at least `window - stride` tokens of context. Knows no model.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, end) of a text, of which those from `scored_from` on are scored."""

    start: int
    end: int
    scored_from: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """window: most tokens that are attended together, at least 2; stride: from 1 to window - 1."""
    assert window >= 2, window
    assert 1 <= stride < window, (stride, window)
    scored_from = 1
    for start in range(0, num_tokens, stride):
        end = min(num_tokens, start + window)
        if scored_from < end:
            yield Window(start, end, scored_from)
        scored_from = end
        if end == num_tokens:
            return
