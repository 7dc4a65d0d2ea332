"""Log-probabilities of the model's own distribution: of tokens that were chosen, and of prompts' tokens.

They are natural logarithms of softmax(logits), before temperature, penalties, biases and masks.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.draws import block_size_of
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.request import TokenLogprobs

# Logits that are held at once, however long a prompt and however large the vocabulary is.
LOGITS_AT_ONCE = 1 << 24
# Float32 copies of more than this no longer fit a processor's cache.
CPU_LOGITS_AT_ONCE = 1 << 19

# What brings entries once the device has computed them.
Reading = Callable[[], list[TokenLogprobs]]


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], *, with_ranks: bool = False
) -> list[TokenLogprobs]:
    """logits: [rows, vocab_size]; the other two have one entry per row: the token, and how many best ones."""
    if uses_triton(logits.device):
        begun = _begun(logits, token_ids, num_top, with_ranks=with_ranks)
        transfers.Moment(logits.device).wait()
        return begun()
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


def _begun(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], *, with_ranks: bool) -> Reading:
    """By kernels, without waiting for them: what is returned may be called once they have run."""
    from headway_runtime.device_sampler import listed, on_host
    from headway_runtime.kernels.triton.top_logprobs import top_logprobs

    vocab_size = logits.shape[1]
    tokens = transfers.sent_integers(token_ids, logits.device)
    most = min(max(num_top, default=0), vocab_size)
    found = top_logprobs(logits, None, tokens, most, block_size_of(vocab_size), with_ranks=with_ranks)
    return partial(listed, on_host(found), num_top)


class PromptLogprobs:
    """Entries, with ranks, of the tokens that follow some rows, one each, which are being computed.

    They can be read once the step has passed that computes the rows. Where there are kernels, making this
    waits for nothing.
    """

    def __init__(
        self,
        first_row: int,
        to_logits: Callable[[int, int], Tensor],
        vocab_size: int,
        token_ids: Sequence[int],
        num_top: int,
    ) -> None:
        """to_logits: those after rows [first, last), [rows, vocab_size].

        The logits of all rows together may be gigabytes; only a slice of them exists at a time.
        """
        size = max(1, LOGITS_AT_ONCE // vocab_size)
        self._readings: list[Reading] = []
        for start in range(0, len(token_ids), size):
            tokens = token_ids[start : start + size]
            logits = to_logits(first_row + start, first_row + start + len(tokens))
            tops = [num_top] * len(tokens)
            if uses_triton(logits.device):
                reading = _begun(logits, tokens, tops, with_ranks=True)
            else:
                reading = partial(list, token_logprobs(logits, tokens, tops, with_ranks=True))
            self._readings.append(reading)

    def read(self) -> list[TokenLogprobs]:
        return [entry for reading in self._readings for entry in reading()]


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
