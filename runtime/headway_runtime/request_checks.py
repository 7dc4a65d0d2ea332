"""What a request must be, whatever else is there: the engine refuses others at once."""

from headway_runtime.errors import AdapterNotFoundError, ContextLengthError, InvalidRequestError
from headway_runtime.request import Request, SamplingParams


def check_request(request: Request, *, vocab_size: int, max_model_len: int, has_adapters: bool) -> None:
    """InvalidRequestError, ContextLengthError or AdapterNotFoundError for one that can never run."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"prompt has {num_tokens} tokens, but the context of {max_model_len} tokens must hold "
            "it and at least one generated token; shorten the prompt",
            param="prompt",
        )
    if request.adapter and not has_adapters:
        raise AdapterNotFoundError(request.adapter)
    if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
        raise InvalidRequestError(
            f"prompt holds a token id outside [0, {vocab_size - 1}]; use this model's tokenizer",
            param="prompt",
        )
    _check_tokens(request.sampling, vocab_size)


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """InvalidRequestError for token ids that the model does not have."""
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": [token for word in sampling.bad_words for token in word],
    }
    for param, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidRequestError(
                f"{param} holds a token id outside [0, {vocab_size - 1}]; use this model's tokenizer",
                param=param,
            )
