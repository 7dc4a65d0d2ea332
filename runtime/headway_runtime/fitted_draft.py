"""A draft model with the vocabulary of the model that checks: its own is that, cut or padded at its end."""

import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.models.model import Model


class FittedDraft:
    """Is a `Model` itself. own_vocab_size: of `model`."""

    def __init__(self, model: Model, own_vocab_size: int, vocab_size: int) -> None:
        self._model = model
        self._own_vocab_size, self._vocab_size = own_vocab_size, vocab_size

    @property
    def ran_as_one(self) -> bool:
        return self._model.ran_as_one

    @property
    def linears(self) -> list[AnyLinear]:
        return self._model.linears

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self._model.attention_layers

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        # Ids beyond the draft's vocabulary, which only padding of the other one has, mean nothing to it.
        if self._own_vocab_size < self._vocab_size:
            token_ids = token_ids.clamp(max=self._own_vocab_size - 1)
        return self._model.forward(token_ids, positions, cache, inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """As many logits as the model that checks has: the same tokens then meet the same random numbers."""
        logits = self._model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size].contiguous() if missing else logits
        return torch.cat((logits, logits.new_full((len(logits), missing), -torch.inf)), dim=1)
