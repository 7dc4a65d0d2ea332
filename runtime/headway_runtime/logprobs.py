"""Log-probabilities of the model's own distribution: of tokens that were chosen, and of prompts' tokens.

They are natural logarithms of softmax(logits), before temperature, penalties, biases and masks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway_runtime.request import TokenLogprobs

# Float32 logits that are held at once, however long a prompt and however large the vocabulary is (64 MiB).
LOGITS_AT_ONCE = 1 << 24


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """logits: [rows, vocab_size]; the other two have one entry per row: the token, and how many best ones."""
    size = max(1, LOGITS_AT_ONCE // logits.shape[1])
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        end = start + size
        entries += _entries(logits[start:end].float(), token_ids[start:end], num_top[start:end])
    return entries


def prompt_logprobs(
    hidden: Tensor, to_logits: Callable[[Tensor], Tensor], vocab_size: int, token_ids: list[int], num_top: int
) -> list[TokenLogprobs]:
    """Entries of the tokens that follow each row of hidden states [rows, hidden_size].

    The logits of all rows together may be gigabytes; only a slice of them exists at a time.
    """
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    entries: list[TokenLogprobs] = []
    for rows, tokens in zip(torch.split(hidden, size), _split(token_ids, size), strict=True):
        logits = to_logits(rows).float()
        found = _entries(logits, tokens, [num_top] * len(tokens))
        own = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
        ranks = (logits > own).sum(dim=-1).add_(1).tolist()
        entries += [replace(entry, rank=rank) for entry, rank in zip(found, ranks, strict=True)]
    return entries


def _split(token_ids: list[int], size: int) -> Iterator[list[int]]:
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))


def _entries(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    index = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = (logits.gather(1, index) - normalizers).flatten().tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(own, ()) for own in chosen]
    best, tokens = logits.topk(min(most, logits.shape[1]), dim=-1)
    rows = zip(chosen, num_top, (best - normalizers).tolist(), tokens.tolist(), strict=True)
    return [
        TokenLogprobs(own, tuple(zip(row_tokens[:num], row_values[:num], strict=True)))
        for own, num, row_values, row_tokens in rows
    ]
