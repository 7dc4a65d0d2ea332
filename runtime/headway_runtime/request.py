"""A request as the engine sees it, and what comes back: token ids in, token ids out.

Knows nothing of HTTP, text or torch. Times are seconds of `time.monotonic()`, which all processes of
one machine share; the engine is told them and reads no clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from headway_runtime.errors import InvalidRequestError

# The engine tells priorities from -MAX_PRIORITY to MAX_PRIORITY apart. The bound is what gives ageing its
# worth: a request is overtaken only by those that come within `priority_ageing_seconds` for each unit by
# which theirs is better.
# At 60 s nobody is overtaken by what comes later than 2 * 100 * 60 s after him; at priority 0, 100 * 60 s.
MAX_PRIORITY = 100
# What a request may ask for, as in vLLM: 64 bits. What lies beyond the bound counts as the bound.
SMALLEST_PRIORITY, LARGEST_PRIORITY = -(2**63), 2**63 - 1
MAX_SALT_CHARACTERS = 1024


class FinishReason(StrEnum):
    """Why a request ended; every accepted request gets exactly one."""

    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client went away or asked for the end
    ERROR = "error"  # the engine could not go on with it


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "ebnf"]


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A JSON schema that a larger grammar was made of. param: the request's field that it came from; owner:
    whose it is, in a message."""

    param: str
    owner: str
    source: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole answer must match. source: a JSON schema, a regular expression, a JSON list of choices,
    or a grammar's text, by its kind; empty for json_object.

    param: the request's field that it came from, to be named if it turns out to be of no use; unless that is
    because of one of the parts.
    InvalidRequestError for a kind that there is not.
    """

    kind: GrammarKind
    source: str = ""
    param: str = "structured_outputs"
    parts: tuple[GrammarPart, ...] = ()

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise InvalidRequestError(
                f"kind={self.kind!r} is no kind of grammar; known are {', '.join(map(repr, kinds))}",
                param="grammar",
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Checked at the edge; the engine trusts it.

    temperature: 0 means greedy. top_k: 0 means all. top_p: 1.0 means all.
    min_p: tokens less likely than this share of the likeliest one are left out; 0.0 means none.
    presence_penalty, frequency_penalty: taken off the logits of generated tokens, once, or once per
        occurrence. repetition_penalty: divides positive and multiplies negative logits of tokens that occur
        in the prompt or the answer; 1.0 means none.
    logit_bias: (token id, what is added to its logit), each id once.
    allowed_token_ids: no other token is ever sampled; None means all.
    bad_words: sequences of tokens; the last of one never follows the others of it in the answer.
    seed: same seed and prompt give the same tokens at any batch size; None draws one per request at the edge.
    max_tokens: tokens to generate at most (already clipped to max_model_len).
    stop_token_ids: end-of-sequence ids included unless the client said ignore_eos.
    num_logprobs: how many best log-probabilities to return per token; None for none, 0 for the chosen one's.
    num_prompt_logprobs: likewise for the prompt's tokens.
    grammar: what the answer must match; None means anything.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def needs_reading(self) -> bool:
        """Whether the host must have read a step of such a request before the next one can be launched.

        What a grammar allows next is computed by the host, of the token that was sampled; so is what would
        complete a forbidden word.
        """
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)


def engine_priority(asked: int) -> int:
    """The nearest that the engine tells from others."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, asked))


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    received_at: when the first byte of the request was read, less what a gateway says it waited before.
    priority: the lower is served first; equals in order of arrival. At most MAX_PRIORITY either way.
    cache_salt: sequences share cached prefixes only with those of the same salt.
    adapter: name of the LoRA adapter to answer with; "": the model itself.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received_at: float
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, of the model's own distribution) at one position.

    rank: place of the position's token among all, the likeliest being 1; told of prompts' tokens only.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """What one step did for one request: its new tokens, and the end if this was it. Not frozen for the same
    reason as `Chunk`.

    Set on the first output only: num_cached_tokens counts prompt tokens whose KV was not computed for this
    request; queue_seconds is the time from received to first scheduled, prefill_seconds from there to the
    first token; prompt_logprobs has one entry per prompt token, None for the first one, if they were asked
    for.

    Set on the first output and the last one: late_share, of all requests that the engine has then, those that
    wait although their first tokens come too late to count (`promptness`); max_num_seqs, how many may run at
    once by then.

    computed_at: when its tokens were, `time.monotonic()`, which all processes of a machine share; 0.0 without
        tokens.
    error: why it ended with FinishReason.ERROR. error_param: the field of the request that is at fault, which
        makes it the client's error; None if it is not.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    computed_at: float = 0.0
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    late_share: float | None = None
    max_num_seqs: int | None = None
    error: str | None = None
    error_param: str | None = None
