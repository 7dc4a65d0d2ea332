"""What the engine needs of a model, whatever its architecture."""

from typing import Protocol

from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache
from headway_runtime.layers.linear import AnyLinear


class Model(Protocol):
    """A model on its device."""

    @property
    def ran_as_one(self) -> bool:
        """Whether `forward` last ran as a recording of it."""

    @property
    def linears(self) -> list[AnyLinear]:
        """All linear layers, in the order of their work."""

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """How each layer attends; their indices are their places in the list."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """Compute a step's tokens and store their KV. Returns hidden states [tokens, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of some rows of what `forward` returned.

        Of several ranks all must call it, as `forward`; the first one gets them.
        """
