"""What a parser of tool calls makes of a text: content, and calls piece by piece.

A parser takes a text in pieces and gives out what is certain. However the text is cut, what comes out of it
is the same once joined. None of them fails: what is no call is content, word for word.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of one call. index: of the call in the answer. name: once per call, in its first piece.

    arguments: what is added to the JSON text of the arguments, as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece


class ToolCallParser(Protocol):
    """The state of one answer."""

    def push(self, text: str) -> list[Piece]:
        """What has become certain with `text`."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, now that the answer has ended."""
        ...


def end_of_tag_start(text: str, tag: str) -> int:
    """Where the longest end of `text` begins that may be the start of `tag`; len(text) if there is none."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)
