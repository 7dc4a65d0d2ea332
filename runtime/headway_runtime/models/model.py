"""What the engine needs of a model, whatever its architecture."""

from typing import Protocol

from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, KVCache
from headway_runtime.layers.linear import AnyLinear


class Model(Protocol):
    """A model on its device."""

    @property
    def linears(self) -> list[AnyLinear]:
        """All linear layers, in the order of their work."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """Compute a step's tokens and store their KV. Returns hidden states [tokens, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of some rows of what `forward` returned."""
