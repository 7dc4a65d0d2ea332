"""From a checked body to engine requests: template, tokens, lengths, sampling parameters, cache salt.

Pure but for drawing a seed where the client gave none. May take tens of milliseconds for a long prompt, so
the server runs it in a thread when the body is large. Refuses, as the client's fault, what can never fit.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headway_runtime.bad_words import bad_word_tokens
from headway_runtime.chat import ChatTemplate
from headway_runtime.errors import ContextLengthError, InvalidRequestError, RequestCode
from headway_runtime.generation_defaults import NO_DEFAULTS, GenerationDefaults
from headway_runtime.request import Grammar, Request, engine_priority
from headway_runtime.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_CHOICES, counted_logprobs, shown
from headway_runtime.seeds import choice_seed
from headway_runtime.server.api_keys import Tenant
from headway_runtime.server.cache_salts import cache_salt
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.choice_details import EchoedPrompt, place_tokens, spell_prompt
from headway_runtime.server.protocol import CompletionBody, GenerationBody
from headway_runtime.server.sampling_fields import sampling_of
from headway_runtime.server.template_fields import TemplateFields, render_prompt
from headway_runtime.server.tool_auto_grammar import auto_call_grammar
from headway_runtime.server.tool_calls.choose import ToolCallFormat
from headway_runtime.tokenizer import Tokenizer

# What is to be truncated has to be encoded first: a text so many times too long is refused without that.
TRUNCATABLE_CONTEXTS = 16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the HTTP process knows of the model. num_kv_tokens: what the KV cache holds.

    max_waiting: how many choices may wait at once.
    tool_calls: how it writes calls of tools, if that is known.
    trusts_request_templates: whether requests may bring chat templates.
    defaults: what a request that leaves a field of sampling out is given.
    adapter: name of the LoRA adapter that a request asks for; "": none.
    max_logprobs: best log-probabilities that a request may have of each token; -1: any number.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    max_waiting: int
    tool_calls: ToolCallFormat | None = None
    trusts_request_templates: bool = False
    defaults: GenerationDefaults = NO_DEFAULTS
    adapter: str = ""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS

    @property
    def template_variables(self) -> Mapping[str, str]:
        """What every template is given: the names of the special tokens."""
        return self.tokenizer.special_tokens

    @property
    def max_tokens_in_all(self) -> int:
        """Prompt and answer of one sequence together."""
        return min(self.max_model_len, self.num_kv_tokens)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the server knows of a request besides its body. request_id: unlike that of any other request."""

    request_id: str
    received_at: float
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt. param: where the request has it. echo: its text, if the answer is to begin with it."""

    token_ids: tuple[int, ...]
    param: str
    echo: EchoedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Engine requests, choice by choice: all of the first prompt, then all of the next.

    choices_per_prompt: sequences that are run. answers_per_prompt: the best of them, which are sent.
    """

    requests: list[Request]
    prompts: Sequence[EncodedPrompt]
    choices_per_prompt: int
    answers_per_prompt: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def prepare_chat(body: ChatBody, model: ServedModel, arrival: Arrival) -> Prepared:
    """InvalidRequestError (ContextLengthError) for messages that cannot be served."""
    if body.may_call and not body.must_call and model.tool_calls is None:
        raise InvalidRequestError(
            "tools: it is not known how this model writes calls, so it cannot choose to make any; start the "
            "server with --tool-call-parser, or send tool_choice 'required', 'none' or a tool's name",
            param="tools",
        )
    _check_choices(body, model.max_waiting)
    token_ids = encode_chat(
        body,
        model,
        longest=_longest_encoded(body, model),
        add_special_tokens=body.add_special_tokens is True,
    )
    prompt = EncodedPrompt(_truncate(token_ids, body, model), "messages")
    grammar = body.grammar
    if model.tool_calls is not None and body.may_call and not body.must_call:
        grammar = auto_call_grammar(body, model.tool_calls.name, model.tokenizer.vocabulary)
    return _prepare(body, [prompt], model, arrival, grammar)


def prepare_completion(body: CompletionBody, model: ServedModel, arrival: Arrival) -> Prepared:
    """InvalidRequestError (ContextLengthError) for prompts that cannot be served."""
    _check_choices(body, model.max_waiting)
    given: Sequence[str | list[int]] = body.prompts
    # The list that a single prompt may be in is not worth naming.
    name = "prompt" if len(given) == 1 else "prompt[{}]"
    prompts = [_encode_prompt(one, name.format(at), body, model) for at, one in enumerate(given)]
    return _prepare(body, prompts, model, arrival, body.grammar)


def encode_chat(
    body: TemplateFields, model: ServedModel, *, longest: int | None, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of a chat. The template writes the special tokens itself, so none are added unasked.

    ContextLengthError at once for what is sure to have more than `longest` tokens.
    """
    text = render_prompt(body, model)
    if longest is not None:
        _refuse_hopeless(text, "messages", model, longest)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _encode_prompt(
    prompt: str | list[int], param: str, body: CompletionBody, model: ServedModel
) -> EncodedPrompt:
    tokenizer, with_special = model.tokenizer, body.add_special_tokens is not False
    if isinstance(prompt, str):
        _refuse_hopeless(prompt, param, model, _longest_encoded(body, model))
        token_ids = tokenizer.encode(prompt, add_special_tokens=with_special)
    else:
        token_ids = prompt
    if not token_ids:
        code: RequestCode = "empty_string" if isinstance(prompt, str) else "empty_array"
        message = f"{param}={shown(prompt)} is empty; send at least one token"
        raise InvalidRequestError(message, param=param, code=code)
    kept = _truncate(token_ids, body, model)
    if not body.echo:
        return EncodedPrompt(kept, param)
    if isinstance(prompt, str) and len(kept) == len(token_ids):
        placed = place_tokens(prompt, kept, tokenizer, add_special_tokens=with_special)
    else:
        _check_vocabulary(kept, param, model)
        placed = spell_prompt(kept, tokenizer, special_tokens=body.skip_special_tokens is False)
    return EncodedPrompt(kept, param, placed)


def _prepare(
    body: ChatBody | CompletionBody,
    prompts: Sequence[EncodedPrompt],
    model: ServedModel,
    arrival: Arrival,
    grammar: Grammar | None,
) -> Prepared:
    answers, choices = body.n or 1, _choices_per_prompt(body)
    salt = cache_salt(arrival.tenant.key_digest, body.cache_salt)
    # The best are those of the highest mean log-probability, which the engine then has to tell.
    name = "logprobs" if isinstance(body, CompletionBody) else "top_logprobs"
    num_logprobs = _counted(name, body.num_logprobs, model)
    if num_logprobs is None and choices > answers:
        num_logprobs = 0
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    bad_words = bad_word_tokens(body.bad_words or (), encode)
    _check_vocabulary([token for word in bad_words for token in word], "bad_words", model)
    requests: list[Request] = []
    for prompt in prompts:
        sampling = sampling_of(
            body,
            defaults=model.defaults,
            vocab_size=model.vocab_size,
            eos_token_ids=model.tokenizer.eos_token_ids,
            room=_room(prompt, model),
            grammar=grammar,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body, model),
            bad_words=bad_words,
        )
        # A seed that was sent is every prompt's; without one, equal prompts are to get answers of their own.
        seed = secrets.randbits(62) if body.seed is None else body.seed
        for choice in range(choices):
            own = replace(sampling, seed=choice_seed(seed, choice))
            if choice and prompt.echo is None:
                # One choice's prompt is like another's; an echo needs its own with its first token.
                own = replace(own, num_prompt_logprobs=None)
            requests.append(
                Request(
                    f"{arrival.request_id}-{len(requests)}",
                    prompt.token_ids,
                    own,
                    arrival.received_at,
                    priority=engine_priority(body.priority or 0),
                    cache_salt=salt,
                    adapter=model.adapter,
                )
            )
    return Prepared(requests, prompts, choices, answers)


def _choices_per_prompt(body: ChatBody | CompletionBody) -> int:
    """Sequences to run, of which n are sent."""
    return (body.best_of if isinstance(body, CompletionBody) else None) or body.n or 1


def _check_choices(body: ChatBody | CompletionBody, max_waiting: int) -> None:
    """Before any prompt is encoded: there may be millions of them."""
    num_prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
    choices = _choices_per_prompt(body)
    if not num_prompts:
        raise InvalidRequestError(
            "prompt=[] is empty; send at least one prompt", param="prompt", code="empty_array"
        )
    most, why = MAX_CHOICES, ""
    if max_waiting < most:
        # They come together; more would never all be let in.
        most, why = max_waiting, " that may wait here at once (--max-waiting)"
    if num_prompts * choices > most:
        is_best_of = isinstance(body, CompletionBody) and body.best_of
        field = "prompt" if choices == 1 else "best_of" if is_best_of else "n"
        given = field if choices == 1 else f"{field}={choices}"
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise InvalidRequestError(
            f"{given} makes {prompts} of {choices} choices, more than the {most}{why}; send fewer",
            param=field,
            code="array_above_max_length" if field == "prompt" else "integer_above_max_value",
        )


def _counted(field: str, wanted: int | None, model: ServedModel) -> int | None:
    return counted_logprobs(field, wanted, model.max_logprobs, model.vocab_size)


def _num_prompt_logprobs(body: ChatBody | CompletionBody, model: ServedModel) -> int | None:
    """As many as were asked for, in one way or the other."""
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    asked = (_counted("prompt_logprobs", body.prompt_logprobs, model), _counted("logprobs", echoed, model))
    wanted = [one for one in asked if one is not None]
    return max(wanted) if wanted else None


def _longest_encoded(body: GenerationBody, model: ServedModel) -> int:
    """Tokens that a text may have at most to be encoded at all."""
    contexts = 1 if body.truncate_prompt_tokens is None else TRUNCATABLE_CONTEXTS
    return contexts * model.max_tokens_in_all


def _truncate(token_ids: Sequence[int], body: GenerationBody, model: ServedModel) -> tuple[int, ...]:
    """What truncate_prompt_tokens leaves: the end, or with truncation_side=right the beginning."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return tuple(token_ids)
    if limit == -1:
        # As many as leave room for what was asked for.
        limit = max(1, model.max_tokens_in_all - max(1, body.tokens_wanted or 1))
    return tuple(token_ids[:limit] if body.truncation_side == "right" else token_ids[-limit:])


def _refuse_hopeless(text: str, param: str, model: ServedModel, longest: int) -> None:
    """Refuse a text that cannot fit by its length alone, before it is encoded."""
    fewest = model.tokenizer.fewest_tokens(text)
    if fewest > longest:
        raise ContextLengthError(
            f"{param} has more than {fewest} tokens, but prompt and answer together may have "
            f"{model.max_tokens_in_all}; shorten it",
            param=param,
        )


def _check_vocabulary(token_ids: Sequence[int], param: str, model: ServedModel) -> None:
    if token_ids and max(token_ids) >= model.vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {max(token_ids)}; this model's ids end at {model.vocab_size - 1}; "
            "use its tokenizer",
            param=param,
        )


def _room(prompt: EncodedPrompt, model: ServedModel) -> int:
    """Tokens that the answer may have."""
    token_ids, param = prompt.token_ids, prompt.param
    if not token_ids:
        # Only a template makes nothing of something.
        raise InvalidRequestError(f"{param} comes to no token; send some text", param=param)
    _check_vocabulary(token_ids, param, model)
    room = model.max_tokens_in_all - len(token_ids)
    if room < 1:
        raise ContextLengthError(
            f"{param} has {len(token_ids)} tokens, but prompt and answer together may have "
            f"{model.max_tokens_in_all}; shorten it",
            param=param,
        )
    return room
