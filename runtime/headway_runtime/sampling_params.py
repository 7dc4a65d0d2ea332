"""How answers are sampled, as users of the in-process engine say it: checked when it is made.

Names and defaults are those of vLLM's class of the same name, ranges those of the HTTP API. What depends on
the model (its vocabulary, the room in its context) is checked by `for_engine`, which makes the engine's own
parameters of it.
"""

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from headway_runtime import request
from headway_runtime.bad_words import Encode, bad_word_tokens
from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import Grammar
from headway_runtime.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
# As many as vLLM takes unless told otherwise; each is encoded twice when its request is read.
MAX_BAD_WORDS = 128
MAX_TOKENS = 2**31 - 1
# Of each token, unless the engine is told otherwise: OpenAI's bound in chats.
DEFAULT_MAX_LOGPROBS = 20
# As many log-probabilities as the vocabulary has tokens.
ALL_LOGPROBS = -1
MAX_SEED = 2**63 - 1
# Colder than this is greedy: dividing by it would leave no difference between the best tokens but rounding.
COLDEST_TEMPERATURE = 1e-5

# Longer values are cut in messages.
MAX_SHOWN_CHARACTERS = 80

# Field -> lowest and highest value, both allowed.
INTEGERS = {
    "n": (1, MAX_CHOICES),
    "top_k": (-1, MAX_TOKENS),
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "logprobs": (ALL_LOGPROBS, MAX_TOKENS),
    "prompt_logprobs": (ALL_LOGPROBS, MAX_TOKENS),
    "seed": (-MAX_SEED - 1, MAX_SEED),
}
NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, sys.float_info.max),
}
# Of those, the ones whose lowest value itself is not allowed.
ABOVE_LOWEST = frozenset(("repetition_penalty",))
# No logit that a penalty changes is chosen, or left, for more than this; more could leave float32's range.
MAX_REPETITION_PENALTY = 1e6
BIASES = (-100.0, 100.0)
OPTIONAL = frozenset(("max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens"))
SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is answered. InvalidRequestError, naming field, value and remedy, for what cannot be.

    n: answers to each prompt.
    temperature: 0 is greedy. top_k: 0 and -1 keep all. top_p: share of probability kept; 0 is
        greedy. min_p: share of the likeliest token's below which others are left out.
    presence_penalty, frequency_penalty, repetition_penalty: as OpenAI and vLLM define them.
    logit_bias: token id -> what is added to its logit. allowed_token_ids: no other is ever sampled.
    bad_words: texts that an answer does not have, as far as it would spell them by their own tokens.
    seed: the same tokens each time; None draws one.
    max_tokens: None is as many as fit. min_tokens: before them no stop counts.
    stop: one string or up to 16, which end an answer; stop_token_ids: tokens that do, besides the model's own
        ends (unless ignore_eos).
    logprobs, prompt_logprobs: how many best log-probabilities to return per token; None for none, -1 for all.
        At most `max_logprobs` of the engine.
    truncate_prompt_tokens: of a longer prompt the last so many are taken; -1: as many as leave room.
    detokenize: False leaves the text of answers empty. spaces_between_special_tokens: changes nothing, as
        the model's own tokenizer.json says how tokens are joined.
    structured_outputs, grammar: what an answer must match, in vLLM's words or in the engine's own.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    bad_words: Collection[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Collection[str] | None = None
    stop_token_ids: Collection[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, (lowest, highest) in INTEGERS.items():
            check_integer(name, getattr(self, name), lowest, highest)
        for name, (least, most) in NUMBERS.items():
            check_number(name, getattr(self, name), least, most)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, getattr(self, name), "want True or False")
        self._check_stops()
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_token_ids(name, getattr(self, name))
        _check_words(self.bad_words)
        _check_biases(self.logit_bias)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise wrong("allowed_token_ids", self.allowed_token_ids, "allow at least one, or give None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", self.min_tokens, f"is more than max_tokens={self.max_tokens}; lower it")
        self._check_vllms_own()
        _check_grammar(self.grammar)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def for_engine(
        self, *, vocab_size: int, eos_token_ids: frozenset[int], room: int, encode: Encode, max_logprobs: int
    ) -> request.SamplingParams:
        """The engine's parameters, but for the seed. room: tokens that the answer may have. encode:
        a text, without special tokens. max_logprobs: best log-probabilities per token; -1 is no bound.

        InvalidRequestError for token ids that the model does not have.
        """
        stop_token_ids = frozenset(self.stop_token_ids or ())
        bias = tuple((self.logit_bias or {}).items())
        named: Mapping[str, Collection[int]] = {
            "stop_token_ids": stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": [token_id for token_id, _ in bias],
        }
        for name, token_ids in named.items():
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {max(token_ids)}; this model's ids end at {vocab_size - 1}; "
                    "use its tokenizer",
                    param=name,
                )
        if not self.ignore_eos:
            stop_token_ids |= eos_token_ids
        max_tokens = room if self.max_tokens is None else min(room, self.max_tokens)
        allowed = None if self.allowed_token_ids is None else frozenset(self.allowed_token_ids)
        if self.min_tokens and allowed is not None and allowed <= stop_token_ids:
            raise wrong(
                "allowed_token_ids",
                sorted(allowed),
                f"are all stop tokens, which min_tokens={self.min_tokens} forbids; allow another",
            )
        return request.SamplingParams(
            temperature=engine_temperature(self.temperature, self.top_p),
            top_k=max(0, self.top_k),
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=engine_penalty(self.repetition_penalty),
            logit_bias=bias,
            allowed_token_ids=allowed,
            bad_words=bad_word_tokens(tuple(self.bad_words or ()), encode),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            stop_token_ids=stop_token_ids,
            num_logprobs=counted_logprobs("logprobs", self.logprobs, max_logprobs, vocab_size),
            num_prompt_logprobs=counted_logprobs(
                "prompt_logprobs", self.prompt_logprobs, max_logprobs, vocab_size
            ),
            grammar=self._engine_grammar(),
        )

    def _engine_grammar(self) -> Grammar | None:
        """Its text may be the engine's to refuse; then its param is the field to be named."""
        if self.structured_outputs is not None:
            return replace(self.structured_outputs.as_grammar(), param="structured_outputs")
        return None if self.grammar is None else replace(self.grammar, param="grammar")

    def _check_vllms_own(self) -> None:
        limit = self.truncate_prompt_tokens
        check_integer("truncate_prompt_tokens", limit, -1, MAX_TOKENS)
        if limit == 0:
            raise wrong("truncate_prompt_tokens", limit, "leaves nothing; keep at least one token")
        if self.stop and not self.detokenize:
            raise wrong("detokenize", False, "stop strings are looked for in the text; leave one of them out")
        outputs = self.structured_outputs
        if outputs is not None and not isinstance(outputs, StructuredOutputsParams):
            raise wrong("structured_outputs", outputs, "want StructuredOutputsParams(...)")
        if outputs is not None and self.grammar is not None:
            raise wrong("grammar", self.grammar, "says what structured_outputs says, too; give one of them")

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str | Collection):
            raise wrong("stop", self.stop, "want a string, or a list of strings")
        if len(self.stops) > MAX_STOPS:
            raise wrong("stop", self.stop, f"give at most {MAX_STOPS} strings")
        for one in self.stops:
            if not is_text(one) or not 1 <= len(one) <= MAX_STOP_CHARACTERS:
                raise wrong("stop", one, f"each is a string of 1 to {MAX_STOP_CHARACTERS} characters")


def engine_temperature(temperature: float, top_p: float) -> float:
    """0, which is greedy, for what would leave nothing to draw from but the likeliest token."""
    return 0.0 if temperature < COLDEST_TEMPERATURE or top_p == 0.0 else temperature


def engine_penalty(repetition_penalty: float) -> float:
    """The same in effect, and such that logits stay within float32."""
    return min(MAX_REPETITION_PENALTY, max(1 / MAX_REPETITION_PENALTY, repetition_penalty))


def counted_logprobs(name: str, wanted: int | None, most: int, vocab_size: int) -> int | None:
    """How many best log-probabilities that is. most: -1 is no bound.

    InvalidRequestError for more than the engine gives.
    """
    if wanted is None:
        return None
    count = vocab_size if wanted == ALL_LOGPROBS else wanted
    if most != ALL_LOGPROBS and count > most:
        given = "asks for all that the vocabulary has" if wanted == ALL_LOGPROBS else "is too many"
        raise InvalidRequestError(
            f"{name}={wanted} {given}; ask for at most {most}, or have the server started with a higher "
            "--max-logprobs",
            param=name,
            code="integer_above_max_value",
        )
    return min(count, vocab_size)


def wrong(name: str, value: object, remedy: str) -> InvalidRequestError:
    """The error that names a field, what it was given and what to do instead."""
    return InvalidRequestError(f"{name}={shown(value)}: {remedy}", param=name)


def shown(value: object) -> str:
    """A value as messages show it: no longer than anybody reads."""
    try:
        text = repr(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string that has bytes: half a surrogate pair has none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_integer(name: str, value: object, lowest: int, highest: int) -> None:
    """InvalidRequestError unless it is one within the bounds, or None where the field may be left open."""
    if value is None and name in OPTIONAL:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, value, "want an integer" + (" or None" if name in OPTIONAL else ""))
    if not lowest <= value <= highest:
        raise wrong(name, value, f"is outside [{lowest}, {highest}]; choose a value inside that range")


def check_number(name: str, value: object, lowest: float, highest: float) -> None:
    """InvalidRequestError unless it is one within the bounds."""
    # A whole number may be too large to be a float, which is what asking whether it is finite makes of it.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise wrong(name, value, "want a finite number")
    if not lowest <= value <= highest or (name in ABOVE_LOWEST and value == lowest):
        bracket = "(" if name in ABOVE_LOWEST else "["
        raise wrong(
            name, value, f"is outside {bracket}{lowest:g}, {highest:g}]; choose a value inside that range"
        )


def _check_token_ids(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Collection):
        raise wrong(name, value, "want a list of token ids")
    for one in value:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise wrong(name, one, "is no token id; token ids are integers from 0")
        if one > MAX_TOKENS:
            raise wrong(name, one, f"is no token id; the highest is {MAX_TOKENS}")


def _check_words(value: object) -> None:
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Collection):
        raise wrong("bad_words", value, "want a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise wrong("bad_words", value, f"give at most {MAX_BAD_WORDS} strings")
    for one in value:
        if not is_text(one) or not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            raise wrong("bad_words", one, f"each is a string of 1 to {MAX_STOP_CHARACTERS} characters")


def _check_grammar(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Grammar):
        raise wrong("grammar", value, "want a Grammar, such as Grammar('regex', r'[0-9]+')")
    if not is_text(value.source):
        raise wrong("grammar", value.source, "the source of a grammar is a string; JSON is given as its text")


def _check_biases(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", value, "want a dict of token ids and numbers")
    _check_token_ids("logit_bias", tuple(value))
    for bias in value.values():
        check_number("logit_bias", bias, *BIASES)
