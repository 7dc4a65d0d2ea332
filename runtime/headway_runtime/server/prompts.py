"""From a checked body to engine requests: template, tokens, lengths, sampling parameters.

Pure but for drawing a seed where the client gave none. May take tens of milliseconds for a long prompt, so
the server runs it in a thread when the body is large. Refuses, as the client's fault, what can never fit.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway_runtime.chat import ChatTemplate
from headway_runtime.errors import ContextLengthError, InvalidRequestError
from headway_runtime.request import Request, SamplingParams
from headway_runtime.server.protocol import MAX_CHOICES, ChatBody, ChatMessage, CompletionBody
from headway_runtime.tokenizer import Tokenizer

# Distance between the seeds of one request's choices: odd and large, so that neighbours of a client's seed
# (which clients count up by one) never meet.
SEED_STRIDE = 0x9E3779B97F4A7C15
SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the HTTP process knows of the model. num_kv_tokens: what the KV cache holds."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    max_model_len: int
    num_kv_tokens: int

    @property
    def max_tokens_in_all(self) -> int:
        """Prompt and answer of one sequence together."""
        return min(self.max_model_len, self.num_kv_tokens)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Engine requests, choice by choice: n for the first prompt, then n for the next."""

    requests: list[Request]
    num_prompt_tokens: int
    choices_per_prompt: int


def prepare_chat(body: ChatBody, model: ServedModel, request_id: str, received_at: float) -> Prepared:
    """InvalidRequestError (ContextLengthError) for messages that cannot be served."""
    token_ids = encode_messages(body.messages, model, must_fit=True)
    return _prepare(body, [token_ids], "messages", model, request_id, received_at)


def prepare_completion(
    body: CompletionBody, model: ServedModel, request_id: str, received_at: float
) -> Prepared:
    """InvalidRequestError (ContextLengthError) for prompts that cannot be served."""
    if not body.prompts:
        raise InvalidRequestError("prompt=[] holds no prompt; send at least one", param="prompt")
    prompts = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            _refuse_hopeless(prompt, "prompt", model)
            prompts.append(model.tokenizer.encode(prompt, add_special_tokens=True))
        else:
            prompts.append(prompt)
    return _prepare(body, prompts, "prompt", model, request_id, received_at)


def encode_messages(messages: Sequence[ChatMessage], model: ServedModel, *, must_fit: bool) -> list[int]:
    """Token ids of a chat. The template writes the special tokens itself, so none are added.

    ContextLengthError at once, if it must fit the context, for what is sure not to.
    """
    if model.chat_template is None:
        raise InvalidRequestError(
            "messages: this model has no chat template; use /v1/completions", param="messages"
        )
    text = model.chat_template.render([message.for_template() for message in messages])
    if must_fit:
        _refuse_hopeless(text, "messages", model)
    return model.tokenizer.encode(text, add_special_tokens=False)


def _prepare(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Sequence[int]],
    param: str,
    model: ServedModel,
    request_id: str,
    received_at: float,
) -> Prepared:
    num_choices = body.n or 1
    if len(prompts) * num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"n={num_choices} times {len(prompts)} prompts is more than {MAX_CHOICES} choices; send fewer",
            param="n",
        )
    stop_token_ids = _stop_token_ids(body, model)
    seed = secrets.randbits(62) if body.seed is None else body.seed
    requests: list[Request] = []
    for token_ids in prompts:
        room = _room(token_ids, param, model)
        sampling = _sampling(body, stop_token_ids, room)
        for choice in range(num_choices):
            index = len(requests)
            # A seed fixes each choice of a request; prompts in one list share the seeds of their choices.
            choice_seed = (seed + choice * SEED_STRIDE) & SEED_MASK
            seeded = replace(sampling, seed=choice_seed)
            requests.append(Request(f"{request_id}-{index}", tuple(token_ids), seeded, received_at))
    return Prepared(requests, sum(len(token_ids) for token_ids in prompts), num_choices)


def _refuse_hopeless(text: str, param: str, model: ServedModel) -> None:
    """Refuse a text that cannot fit by its length alone, before it is encoded."""
    fewest = model.tokenizer.fewest_tokens(text)
    if fewest > model.max_tokens_in_all:
        raise ContextLengthError(
            f"{param} has more than {fewest} tokens, but prompt and answer together may have "
            f"{model.max_tokens_in_all}; shorten it",
            param=param,
        )


def _room(token_ids: Sequence[int], param: str, model: ServedModel) -> int:
    """Tokens that the answer may have."""
    if not token_ids:
        raise InvalidRequestError(f"{param} is empty; send at least one token", param=param)
    if max(token_ids) >= model.vocab_size:
        raise InvalidRequestError(
            f"{param} holds token id {max(token_ids)}; this model's ids end at {model.vocab_size - 1}",
            param=param,
        )
    room = model.max_tokens_in_all - len(token_ids)
    if room < 1:
        raise ContextLengthError(
            f"{param} has {len(token_ids)} tokens, but prompt and answer together may have "
            f"{model.max_tokens_in_all}; shorten it",
            param=param,
        )
    return room


def _stop_token_ids(body: ChatBody | CompletionBody, model: ServedModel) -> frozenset[int]:
    wanted = frozenset(body.stop_token_ids or ())
    if wanted and max(wanted) >= model.vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids holds {max(wanted)}; this model's ids end at {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    return wanted if body.ignore_eos else wanted | model.tokenizer.eos_token_ids


def _sampling(body: ChatBody | CompletionBody, stop_token_ids: frozenset[int], room: int) -> SamplingParams:
    max_tokens = room if body.tokens_wanted is None else min(room, body.tokens_wanted)
    if body.min_tokens > (room if body.tokens_wanted is None else body.tokens_wanted):
        raise InvalidRequestError(
            f"min_tokens={body.min_tokens} is more than the answer may have; lower it", param="min_tokens"
        )
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens, max_tokens),
        stop_token_ids=stop_token_ids,
        num_logprobs=body.num_logprobs,
    )
