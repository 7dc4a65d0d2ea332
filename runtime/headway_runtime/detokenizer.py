"""Generated token ids to text, piece by piece: never half a UTF-8 character, never part of a stop string.

The text that comes out of `Detokenizer`, joined, is exactly what the `tokenizers` library's own decoder
makes of all the tokens at once after a prompt, broken byte sequences included: those become U+FFFD by its
rules, which is why a run of raw byte tokens is held back until the run has ended.

`StopStrings` sits behind it and holds back any end of the text that may be the start of a stop string.
Knows nothing of requests, HTTP or when to stop the engine.
"""

import codecs
from collections.abc import Sequence
from functools import partial

from headway_runtime.tokenizer import Vocabulary

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence, as its tokens come."""

    __slots__ = ("_byte_level", "_piece", "_run", "_utf8")

    def __init__(self, vocabulary: Vocabulary, *, special_tokens: bool | frozenset[int] = False) -> None:
        """special_tokens: whether their names are part of the text, or those of which that is so."""
        self._piece = vocabulary.piece
        if isinstance(special_tokens, frozenset) and special_tokens:
            self._piece = partial(vocabulary.piece_or_name_of, special_tokens)
        elif special_tokens:
            self._piece = vocabulary.piece_or_name
        self._byte_level = vocabulary.is_byte_level
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()

    @property
    def holds_back(self) -> bool:
        """Whether tokens have come whose text, or the end of it, has not been returned yet."""
        return bool(self._utf8.getstate()[0]) if self._byte_level else bool(self._run)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now that `token_ids` have come; the rest is kept for later."""
        piece = self._piece
        if self._byte_level:
            return self._utf8.decode(b"".join([piece(token_id) for token_id in token_ids]))  # type: ignore[misc]
        texts = []
        for token_id in token_ids:
            part = piece(token_id)
            if isinstance(part, bytes):
                self._run += part
            elif part:
                texts.append(self._end_run())
                texts.append(part)
        return "".join(texts)

    def finish(self) -> str:
        """What was still kept; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", True) if self._byte_level else self._end_run()

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            # The library's rule for byte tokens: one bad byte spoils its whole run.
            return REPLACEMENT * len(run)


class StopStrings:
    """Looks for the first stop string in a text that arrives in pieces."""

    __slots__ = ("_held", "_included", "_longest_start", "_num_too_early", "_starts", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """included: whether the stop string that is found is the end of the text, or what follows it."""
        assert stops, "at least one stop string"
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._starts = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest_start = max(len(stop) for stop in stops) - 1
        self._included = included
        self._held = ""
        # Characters at the start of what is held in which no match may end.
        self._num_too_early = 0
        self.matched: str | None = None

    def push(self, text: str, *, is_too_early: bool = False) -> str:
        """The part of the text so far that no stop string can touch any more.

        is_too_early: no match may end in this piece, though one may begin there.
        Once `matched` is set, the text up to the match has been returned in full and nothing more comes.
        The match that ends first wins, the longer of two that end together: what is found does not depend
        on how the text was cut into pieces.
        """
        if self.matched is not None:
            return ""
        text = self._held + text
        early = len(text) if is_too_early else self._num_too_early
        found = [
            (index + len(stop), index, stop)
            for stop in self._stops
            if (index := text.find(stop, max(0, early + 1 - len(stop)))) >= 0
        ]
        if found:
            end, index, self.matched = min(found)
            self._held = ""
            return text[: end if self._included else index]
        num_held = next(
            (
                length
                for length in range(min(self._longest_start, len(text)), 0, -1)
                if text[-length:] in self._starts
            ),
            0,
        )
        num_let_out = len(text) - num_held
        self._held, self._num_too_early = text[num_let_out:], max(0, early - num_let_out)
        return text[:num_let_out]

    def finish(self) -> str:
        """What was held back, now that the text has ended without a match."""
        held, self._held = self._held, ""
        return held
