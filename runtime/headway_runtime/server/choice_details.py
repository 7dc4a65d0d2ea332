"""A choice whose client asked for more than its text: the prompt before it, token ids, running usage.

Wraps the plain choice, which stays as lean as it is for everybody else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from headway_runtime.choice import Choice, Delta, DeltaDetails, TextRules, TokenEntry
from headway_runtime.detokenizer import Detokenizer
from headway_runtime.request import RequestOutput
from headway_runtime.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The text of a prompt, and where in it each of its tokens begins, in characters."""

    text: str
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Details:
    """What of it was asked for. prompt_token_ids: of this choice's prompt.

    echo: the prompt goes before the answer, and its tokens' log-probabilities (num_logprobs best ones of
        each) before those of the answer.
    num_prompt_logprobs: they are wanted apart from the answer.
    hides_answer: nothing but the prompt is wanted; the one token that the engine makes is left out.
    """

    prompt_token_ids: Sequence[int]
    echo: EchoedPrompt | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    hides_answer: bool = False
    with_token_ids: bool = False
    with_usage: bool = False


class DetailedChoice(Choice):
    """The state of one choice, and what of its details has been sent."""

    __slots__ = ("_details", "_has_begun", "token_ids")

    def __init__(
        self, index: int, request_id: str, vocabulary: Vocabulary, rules: TextRules, details: Details
    ) -> None:
        super().__init__(index, request_id, vocabulary, rules)
        self._details = details
        self._has_begun = False
        self.token_ids: list[int] = []
        if details.echo is not None:
            self._decoded = self._released = len(details.echo.text)

    @property
    def details(self) -> Details:
        return self._details

    def feed(self, output: RequestOutput) -> Delta:
        """Take in one output; the first one brings the prompt along, if that was asked for."""
        before = self.num_generated
        delta = super().feed(output)
        token_ids = output.token_ids[: self.num_generated - before]
        details, is_first = self._details, not self._has_begun
        self._has_begun = True
        if is_first:
            self.prompt_logprobs = output.prompt_logprobs
        if details.hides_answer:
            token_ids = ()
            self.num_generated = 0
            delta = Delta("", [], "length" if delta.finish_reason else None)
        if is_first and details.echo is not None:
            delta.text = details.echo.text + delta.text
            if details.num_logprobs is not None:
                delta.entries = (
                    self.prompt_entries(details.num_logprobs, details.echo.offsets) + delta.entries
                )
        self.token_ids += token_ids
        if details.with_token_ids or details.with_usage:
            delta.details = DeltaDetails(
                token_ids if details.with_token_ids else None,
                details.prompt_token_ids if details.with_token_ids and is_first else None,
                self._usage() if details.with_usage else None,
            )
        return delta

    def prompt_entries(self, num_top: int, offsets: Sequence[int] | None = None) -> list[TokenEntry]:
        """The prompt's tokens with their log-probabilities, and so many best ones of each."""
        token_ids, logprobs = self._details.prompt_token_ids, self.prompt_logprobs
        assert logprobs is not None, "the engine was asked for the prompt's log-probabilities"
        return [
            TokenEntry(token_id, offset, one and replace(one, top=one.top[:num_top]))
            for token_id, offset, one in zip(token_ids, offsets or repeat(0), logprobs, strict=False)
        ]

    def _usage(self) -> tuple[int, int, int]:
        return len(self._details.prompt_token_ids), self.num_generated, self.num_cached_tokens


def spell_prompt(token_ids: Sequence[int], tokenizer: Tokenizer, *, special_tokens: bool) -> EchoedPrompt:
    """The text of a prompt that came as token ids."""
    detokenizer = Detokenizer(tokenizer.vocabulary, special_tokens=special_tokens)
    offsets, parts = [], []
    num_characters = 0
    for token_id in token_ids:
        offsets.append(num_characters)
        part = detokenizer.push((token_id,))
        num_characters += len(part)
        parts.append(part)
    text = "".join([*parts, detokenizer.finish()])
    # Some decoders take the space off the very start of a text.
    whole = tokenizer.decode(token_ids, skip_special_tokens=not special_tokens)
    shift = len(text) - len(whole)
    if shift > 0 and text.endswith(whole):
        return EchoedPrompt(whole, [max(0, offset - shift) for offset in offsets])
    return EchoedPrompt(text, offsets)


def place_tokens(
    text: str, token_ids: Sequence[int], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> EchoedPrompt:
    """A text with its own tokens, `token_ids`.

    Where the tokens spell the text, they say themselves where each begins. Where they do not (the text names
    special tokens, or is normalised), the tokenizer says it, which may leave out a token's own spaces.
    """
    spelled = spell_prompt(token_ids, tokenizer, special_tokens=False)
    if spelled.text == text:
        return spelled
    return EchoedPrompt(text, tokenizer.token_offsets(text, add_special_tokens=add_special_tokens))
