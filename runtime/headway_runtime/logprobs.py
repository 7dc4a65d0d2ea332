"""Log-probabilities of the model's own distribution: of tokens that were chosen, and of prompts' tokens.

They are natural logarithms of softmax(logits), before temperature, penalties, biases and masks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway_runtime.draws import block_size_of
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.request import TokenLogprobs

# Logits that are held at once, however long a prompt and however large the vocabulary is.
LOGITS_AT_ONCE = 1 << 24
# Float32 copies of more than this no longer fit a processor's cache.
CPU_LOGITS_AT_ONCE = 1 << 19


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], *, with_ranks: bool = False
) -> list[TokenLogprobs]:
    """logits: [rows, vocab_size]; the other two have one entry per row: the token, and how many best ones."""
    if uses_triton(logits.device):
        return _by_kernel(logits, token_ids, num_top, with_ranks=with_ranks)
    at_once = CPU_LOGITS_AT_ONCE if logits.device.type == "cpu" else LOGITS_AT_ONCE
    size = max(1, at_once // logits.shape[1])
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        end = start + size
        rows = logits[start:end].float()
        index = torch.tensor(token_ids[start:end], device=logits.device).unsqueeze(1)
        own = rows.gather(1, index)
        ranks: list[int | None] = [None] * len(rows)
        if with_ranks:
            ranks = (rows > own).sum(dim=-1).add_(1).tolist()
        entries += _entries(rows, own, num_top[start:end], ranks)
    return entries


def _by_kernel(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], *, with_ranks: bool
) -> list[TokenLogprobs]:
    from headway_runtime.device_sampler import listed
    from headway_runtime.kernels.triton.top_logprobs import top_logprobs

    vocab_size = logits.shape[1]
    tokens = torch.tensor(token_ids, device=logits.device)
    most = min(max(num_top, default=0), vocab_size)
    found = top_logprobs(logits, None, tokens, most, block_size_of(vocab_size), with_ranks=with_ranks)
    return listed(found, num_top)


def prompt_logprobs(
    first_row: int,
    to_logits: Callable[[int, int], Tensor],
    vocab_size: int,
    token_ids: list[int],
    num_top: int,
) -> list[TokenLogprobs]:
    """Entries, with ranks, of the tokens that follow the rows from `first_row` on, one each.

    to_logits: those after rows [first, last), [rows, vocab_size].

    The logits of all rows together may be gigabytes; only a slice of them exists at a time.
    """
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), size):
        tokens = token_ids[start : start + size]
        logits = to_logits(first_row + start, first_row + start + len(tokens))
        entries += token_logprobs(logits, tokens, [num_top] * len(tokens), with_ranks=True)
    return entries


def _entries(
    logits: Tensor, own: Tensor, num_top: Sequence[int], ranks: Sequence[int | None]
) -> list[TokenLogprobs]:
    """logits: float32 [rows, vocab_size]. own: those of the tokens [rows, 1]."""
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (own - normalizers).flatten().tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(one, (), rank) for one, rank in zip(chosen, ranks, strict=True)]
    best, tokens = logits.topk(min(most, logits.shape[1]), dim=-1)
    rows = zip(chosen, num_top, (best - normalizers).tolist(), tokens.tolist(), ranks, strict=True)
    return [
        TokenLogprobs(one, tuple(zip(row_tokens[:num], row_values[:num], strict=True)), rank)
        for one, num, row_values, row_tokens, rank in rows
    ]
