"""One choice of an answer while it is generated: engine outputs in, text that may be sent out.

Puts the detokenizer, the stop strings and the log-probabilities together. A token's log-probability is let
out with the text it belongs to, so that a stop string that is being held back cannot be read from there
either; a token that the stop string cut, wholly or in part, is left out. Knows no JSON and no HTTP.
"""

from dataclasses import dataclass

from headway_runtime.detokenizer import Detokenizer, StopStrings
from headway_runtime.request import FinishReason, RequestOutput, TokenLogprobs
from headway_runtime.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token's log-probabilities; `text_offset` is where its text begins, in characters of the answer."""

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What one batch of outputs adds. `finish_reason` comes once, with the last delta of a choice."""

    text: str
    entries: list[TokenEntry]
    finish_reason: str | None


class Choice:
    """The state of one choice."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_entries",
        "_min_tokens",
        "_released",
        "_stops",
        "finish_reason",
        "index",
        "is_first_byte_written",
        "num_cached_tokens",
        "num_generated",
        "request_id",
    )

    def __init__(
        self, index: int, request_id: str, vocabulary: Vocabulary, stops: tuple[str, ...], min_tokens: int
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_generated = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.is_first_byte_written = False
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._entries: list[tuple[int, TokenEntry]] = []
        # Characters of the answer so far: decoded, and let out to the client.
        self._decoded = 0
        self._released = 0

    @property
    def is_stopped_by_text(self) -> bool:
        """Whether a stop string ended this choice, which the engine has to be told."""
        return self._stops is not None and self._stops.matched is not None

    def feed(self, output: RequestOutput) -> Delta:
        """Take in one output (not one with an error)."""
        assert self.finish_reason is None, "nothing may follow the end of a choice"
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if self._stops is None and not output.logprobs:
            self.num_generated += len(output.token_ids)
            text = self._detokenizer.push(output.token_ids)
        else:
            text = self._feed_one_by_one(output)
        if output.finish_reason is not None and not self.is_stopped_by_text:
            tail = self._detokenizer.finish()
            self._decoded += len(tail)
            text += tail if self._stops is None else self._pass_stops(tail) + self._stops.finish()
            self.finish_reason = _FINISH_REASONS[output.finish_reason]
        if self.is_stopped_by_text:
            self.finish_reason = "stop"
        self._released += len(text)
        return Delta(text, self._entries_let_out(), self.finish_reason)

    def _feed_one_by_one(self, output: RequestOutput) -> str:
        text = ""
        for position, token_id in enumerate(output.token_ids):
            if self.is_stopped_by_text:
                break
            self.num_generated += 1
            offset = self._decoded
            part = self._detokenizer.push((token_id,))
            self._decoded += len(part)
            if output.logprobs:
                entry = TokenEntry(token_id, offset, output.logprobs[position])
                # A token that ends inside a character goes with the rest of that character.
                end = self._decoded + 1 if self._detokenizer.holds_back else self._decoded
                self._entries.append((end, entry))
            text += self._pass_stops(part)
        return text

    def _pass_stops(self, text: str) -> str:
        """Stop strings begin to count with the text of the first token after min_tokens."""
        if self._stops is None or self.num_generated <= self._min_tokens:
            return text
        return self._stops.push(text)

    def _entries_let_out(self) -> list[TokenEntry]:
        if not self._entries:
            return []
        is_whole = self.finish_reason is not None and not self.is_stopped_by_text
        let_out = [entry for end, entry in self._entries if is_whole or end <= self._released]
        del self._entries[: len(let_out)]
        return let_out


_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # Nobody reads the answer to a request that was aborted, but a stream must still end.
    FinishReason.ABORT: "stop",
}
