"""Tokens from step to step without the host: what one step samples is what the next one computes.

Known to the host is only who gets a token, not which: its sequence then ends in UNREAD. Owns what the latest
step sampled, as it lies on the device. Of several ranks the first one samples, and others get it when they
need it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import UNREAD, Chunk
from headway_runtime.parallel.tensor_group import TensorGroup


class TokenFeed:
    """The samples of the latest step."""

    def __init__(self) -> None:
        self._chunks: Sequence[Chunk] = ()
        self._tokens: Tensor | None = None

    def keep(self, chunks: Sequence[Chunk], tokens: Tensor | None) -> None:
        """A step was launched. tokens: int64 [chunks], negative where there is none; None without chunks."""
        self._chunks, self._tokens = chunks, tokens

    @property
    def tokens(self) -> Tensor | None:
        """What the latest step sampled."""
        return self._tokens

    def sources(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """By index of the chunk, of those that end in a token of the latest step: which of its samples."""
        wanted = [index for index, one in enumerate(chunks) if one.samples and one.token_ids[-1] == UNREAD]
        if not wanted:
            return {}
        # A list of tokens is its sequence's own.
        sample_of = {id(one.token_ids): sample for sample, one in enumerate(self._chunks)}
        return {index: sample_of[id(chunks[index].token_ids)] for index in wanted}

    def unread(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """The latest token of each chunk that ends in one of the latest step: int64 [chunks], on the device,
        negative for the others; None where there are only those."""
        sources = self.sources(chunks)
        if not sources or self._tokens is None:
            return None
        device = self._tokens.device
        places = transfers.sent_integers((sources.get(index, -1) for index in range(len(chunks))), device)
        return torch.where(places < 0, -1, torch.index_select(self._tokens, 0, places.clamp(min=0)))

    def expect(self, count: int, device: torch.device) -> None:
        """A step was launched of which another rank samples so many tokens."""
        self.keep((), torch.zeros(count, dtype=torch.int64, device=device))

    def fill(self, token_ids: Tensor, fed: tuple[Tensor, Tensor] | None, group: TensorGroup) -> None:
        """Write samples where they are computed. fed: the rows, and the sample of each, on the device.

        group: of the ranks that compute the step, all of which get what the first one sampled.
        """
        if fed is None:
            return
        assert self._tokens is not None
        group.from_first(self._tokens)
        rows, samples = fed
        # What has no token ends; until that is known, any token will do.
        found = torch.index_select(self._tokens, 0, samples).clamp_(min=0)
        token_ids.index_copy_(0, rows, found)
