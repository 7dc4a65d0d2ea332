"""Decoder layers of Llama 2 and 3, and of all that are built like it: Mistral, Qwen 2 and 3, and mixtures.

A norm before the attention and one before the MLP. What differs is told by the config: biases, norms of
heads, windows, and experts in place of an MLP.
"""

import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache
from headway_runtime.layers.experts import Experts
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.feed_forward import feed_forward, in_pieces
from headway_runtime.models.loader import Weights
from headway_runtime.models.self_attention import SelfAttention
from headway_runtime.parallel.tensor_group import TensorGroup


class LlamaLayer:
    """One decoder layer."""

    __slots__ = ("_attention", "_group", "_input_norm", "_mlp", "_post_norm")

    def __init__(
        self,
        prefix: str,
        index: int,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup,
    ) -> None:
        """prefix: of the names of the layer's tensors."""
        self._input_norm, self._post_norm = (
            RMSNorm(
                weights.take(f"{prefix}{name}_layernorm.weight", (config.hidden_size,)), config.rms_norm_eps
            )
            for name in ("input", "post_attention")
        )
        self._group = group
        self._attention = SelfAttention(f"{prefix}self_attn", index, config, weights, dtype, group)
        self._mlp = feed_forward(f"{prefix}mlp", index, config, weights, dtype, device, group.share)

    @property
    def attention(self) -> AttentionLayer:
        """How it attends."""
        return self._attention.layer

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """In the order of their work."""
        return *self._attention.linears, *self._mlp.linears

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotations: list[tuple[Tensor, Tensor]],
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """hidden: [tokens, hidden_size]; the last layer's `delta` is added to it first.

        Returns this layer's delta; adding it is one pass with the norm that follows.
        """
        codes = self._attention.wanted_codes(len(hidden))
        delta = self._attention(self._input_norm.rows(hidden, delta, codes), rotations, cache, inputs)
        if isinstance(self._mlp, Experts):
            # Each expert gets a share of the rows: few enough without cutting.
            return self._feed_forward(hidden, delta)
        return in_pieces(hidden, delta, self._feed_forward)

    def _feed_forward(self, hidden: Tensor, delta: Tensor) -> Tensor:
        mlp = self._mlp
        if isinstance(mlp, Experts):
            return self._group.add_up(mlp(self._post_norm.add_(hidden, delta)))
        return self._group.add_up(mlp(self._post_norm.rows(hidden, delta, mlp.wanted_codes(len(hidden)))))
