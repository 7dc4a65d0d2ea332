"""One choice of an answer while it is generated: engine outputs in, text that may be sent out.

Puts the detokenizer, the stop strings and the log-probabilities together. A token's log-probability is let
out with the text it belongs to, so that a stop string that is being held back cannot be read from there
either; a token that the stop string cut, wholly or in part, is left out unless each token is to have its
own. Knows no JSON and no HTTP.

This is the hot path: a choice of plain text costs a detokenizer call per output. What only some clients ask
for (echo, token ids, usage with every chunk) is in `choice_details`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headway_runtime.detokenizer import Detokenizer, StopStrings
from headway_runtime.request import FinishReason, RequestOutput, TokenLogprobs
from headway_runtime.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token's log-probabilities; `text_offset` is where its text begins, in characters of the answer.

    logprobs: None for the first token of a prompt, which nothing precedes.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class DeltaDetails:
    """What a delta carries for those who asked for it.

    usage: of the choice so far: tokens of its prompt, generated, and found in the cache.
    """

    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    usage: tuple[int, int, int] | None = None


# Not frozen, as one is made for every token: assigning a frozen one's fields takes three times as long.
@dataclass(slots=True)
class Delta:
    """What one batch of outputs adds. `finish_reason` comes once, with the last delta of a choice.

    stop_reason: the stop string or the client's stop token that ended the choice, if one did.
    """

    text: str
    entries: list[TokenEntry]
    finish_reason: str | None
    stop_reason: str | int | None = None
    details: DeltaDetails | None = None


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of a choice become its text.

    stops: the strings that end it; with_stop: whether they, and stop tokens, are part of the text.
    min_tokens: stop strings begin to count with the text of the first token after so many.
    stop_token_ids: all tokens that end it; stop_reasons: those of them that the client named.
    special_tokens: whether their names are part of the text, or those of which that is so.
    keeps_cut_tokens: whether tokens that a stop string cut have log-probabilities, too.
    """

    stops: tuple[str, ...] = ()
    with_stop: bool = False
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_reasons: frozenset[int] = frozenset()
    special_tokens: bool | frozenset[int] = False
    keeps_cut_tokens: bool = False


class Choice:
    """The state of one choice."""

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_entries",
        "_released",
        "_rules",
        "_stops",
        "finish_reason",
        "index",
        "is_first_byte_written",
        "num_cached_tokens",
        "num_generated",
        "prompt_logprobs",
        "request_id",
        "stop_reason",
        "sum_logprobs",
    )

    def __init__(self, index: int, request_id: str, vocabulary: Vocabulary, rules: TextRules) -> None:
        self.index = index
        self.request_id = request_id
        self.num_generated = 0
        self.num_cached_tokens = 0
        self.sum_logprobs = 0.0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.is_first_byte_written = False
        self._detokenizer = Detokenizer(vocabulary, special_tokens=rules.special_tokens)
        self._stops = StopStrings(rules.stops, included=rules.with_stop) if rules.stops else None
        self._rules = rules
        self._entries: list[tuple[int, TokenEntry]] = []
        # Characters of the answer so far: decoded, and let out to the client.
        self._decoded = 0
        self._released = 0

    @property
    def is_stopped_by_text(self) -> bool:
        """Whether a stop string ended this choice, which the engine has to be told."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def mean_logprob(self) -> float:
        """Of the generated tokens, if their log-probabilities were asked for."""
        return self.sum_logprobs / max(1, self.num_generated)

    def feed(self, output: RequestOutput) -> Delta:
        """Take in one output (not one with an error)."""
        assert self.finish_reason is None, "nothing may follow the end of a choice"
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if self._stops is None and not output.logprobs and output.finish_reason is None:
            self.num_generated += len(output.token_ids)
            text = self._detokenizer.push(output.token_ids)
            return Delta(text, [], None)
        text = self._feed_one_by_one(output)
        if output.finish_reason is not None and not self.is_stopped_by_text:
            tail = self._detokenizer.finish()
            self._decoded += len(tail)
            text += tail if self._stops is None else self._pass_stops(tail) + self._stops.finish()
            self.finish_reason = _FINISH_REASONS[output.finish_reason]
        if self.is_stopped_by_text:
            assert self._stops is not None
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        self._released += len(text)
        return Delta(text, self._entries_let_out(), self.finish_reason, self.stop_reason)

    def _feed_one_by_one(self, output: RequestOutput) -> str:
        text = ""
        stop_token_id = self._stop_token_of(output)
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            if self.is_stopped_by_text:
                break
            self.num_generated += 1
            offset = self._decoded
            is_hidden = position == last and stop_token_id is not None and not self._rules.with_stop
            part = "" if is_hidden else self._detokenizer.push((token_id,))
            self._decoded += len(part)
            if output.logprobs:
                logprobs = output.logprobs[position]
                self.sum_logprobs += logprobs.chosen
                # A token that ends inside a character goes with the rest of that character.
                end = self._decoded + 1 if self._detokenizer.holds_back else self._decoded
                self._entries.append((end, TokenEntry(token_id, offset, logprobs)))
            text += self._pass_stops(part)
        if stop_token_id in self._rules.stop_reasons and not self.is_stopped_by_text:
            self.stop_reason = stop_token_id
        return text

    def _stop_token_of(self, output: RequestOutput) -> int | None:
        """The token that ended the choice, if one did."""
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return None
        token_id = output.token_ids[-1]
        return token_id if token_id in self._rules.stop_token_ids else None

    def _pass_stops(self, text: str) -> str:
        """Stop strings count from where one ends in the text of the first token after min_tokens."""
        if self._stops is None:
            return text
        return self._stops.push(text, is_too_early=self.num_generated <= self._rules.min_tokens)

    def _entries_let_out(self) -> list[TokenEntry]:
        if not self._entries:
            return []
        is_cut = self.is_stopped_by_text and not self._rules.keeps_cut_tokens
        is_whole = self.finish_reason is not None and not is_cut
        let_out = [entry for end, entry in self._entries if is_whole or end <= self._released]
        del self._entries[: len(let_out)]
        return let_out


_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # Nobody reads the answer to a request that was aborted, but a stream must still end.
    FinishReason.ABORT: "stop",
}
