"""From a checked body to sampling parameters: defaults, what the model's vocabulary and context allow.

Pure. Refuses, as the client's fault and by the field's name, what this model cannot do.
"""

from collections.abc import Collection
from typing import TypeVar

from headway_runtime.errors import InvalidRequestError
from headway_runtime.generation_defaults import GenerationDefaults
from headway_runtime.request import Grammar, SamplingParams
from headway_runtime.sampling_params import engine_penalty, engine_temperature, shown
from headway_runtime.server.protocol import GenerationBody

Number = TypeVar("Number")


def sampling_of(
    body: GenerationBody,
    *,
    defaults: GenerationDefaults,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    room: int,
    grammar: Grammar | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """defaults: of what was left out. room: tokens that the answer may have. bad_words: as the engine has
    them.

    The seed is left at 0: each choice has its own.
    """
    stop_token_ids = frozenset(body.stop_token_ids or ())
    _check_ids("stop_token_ids", stop_token_ids, vocab_size)
    if not body.ignore_eos:
        stop_token_ids |= eos_token_ids
    wanted = _given(_given(body.tokens_wanted, defaults.max_new_tokens), room)
    min_tokens = body.min_tokens or 0
    if min_tokens > wanted:
        raise InvalidRequestError(
            f"min_tokens={min_tokens} is more than the answer may have ({wanted}); lower it",
            param="min_tokens",
        )
    # Where nothing but the prompt is wanted, the engine makes one token, which is not sent.
    max_tokens = max(1, min(room, wanted))
    temperature = _given(body.temperature, defaults.temperature)
    top_p = _given(body.top_p, defaults.top_p)
    penalty = _given(body.repetition_penalty, defaults.repetition_penalty)
    return SamplingParams(
        temperature=engine_temperature(temperature, top_p),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        top_p=top_p or 1.0,
        min_p=_given(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=engine_penalty(penalty),
        logit_bias=_logit_bias(body, vocab_size),
        allowed_token_ids=_allowed_token_ids(body, stop_token_ids, vocab_size),
        bad_words=bad_words,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=stop_token_ids,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        grammar=grammar,
    )


def _given(sent: Number | None, otherwise: Number) -> Number:
    return otherwise if sent is None else sent


def _logit_bias(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not body.logit_bias:
        return ()
    found: list[tuple[int, float]] = []
    for name, bias in body.logit_bias.items():
        # Written in the one usual way, so that no token can be named twice.
        is_number = name.isascii() and name.isdecimal() and len(name) <= 10
        token_id = int(name) if is_number else 0
        if not is_number or str(token_id) != name:
            raise InvalidRequestError(
                f"logit_bias names {shown(name)}, which is no token id; use ids such as '42'",
                param="logit_bias",
            )
        found.append((token_id, bias))
    _check_ids("logit_bias", [token_id for token_id, _ in found], vocab_size)
    return tuple(found)


def _allowed_token_ids(
    body: GenerationBody, stop_token_ids: frozenset[int], vocab_size: int
) -> frozenset[int] | None:
    if body.allowed_token_ids is None:
        return None
    allowed = frozenset(body.allowed_token_ids)
    _check_ids("allowed_token_ids", allowed, vocab_size)
    if body.min_tokens and allowed <= stop_token_ids:
        raise InvalidRequestError(
            f"allowed_token_ids allows nothing but stop tokens, which min_tokens={body.min_tokens} forbids; "
            "allow another token",
            param="allowed_token_ids",
        )
    return allowed


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"{field} holds token id {max(token_ids)}; this model's ids end at {vocab_size - 1}; use its "
            "tokenizer",
            param=field,
        )
