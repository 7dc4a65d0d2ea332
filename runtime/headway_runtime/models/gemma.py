"""Decoder layers of Gemma 2 and 3: norms before and after both the attention and the MLP.

The norms' weights are stored as what is to be added to one. That sum and the product with it are made in
float32, as the models were trained. What else differs from Llama is told by the config.
"""

import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.feed_forward import feed_forward, in_pieces
from headway_runtime.models.loader import Weights
from headway_runtime.models.self_attention import SelfAttention
from headway_runtime.parallel.tensor_group import TensorGroup

NORM_OFFSET = 1.0


def gemma_norm(name: str, config: ModelConfig, weights: Weights, dtype: torch.dtype) -> RMSNorm:
    """The norm of hidden states of that name."""
    weight = weights.take(f"{name}.weight", (config.hidden_size,))
    return RMSNorm(weight.float() + NORM_OFFSET, config.rms_norm_eps, dtype)


class GemmaLayer:
    """One decoder layer."""

    __slots__ = (
        "_after_attention",
        "_after_mlp",
        "_attention",
        "_before_attention",
        "_before_mlp",
        "_group",
        "_mlp",
    )

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
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            gemma_norm(f"{prefix}{name}_layernorm", config, weights, dtype)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self._attention = SelfAttention(
            f"{prefix}self_attn", index, config, weights, dtype, group, norm_offset=NORM_OFFSET
        )
        self._group = group
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
        """As LlamaLayer's."""
        before = self._before_attention
        normed = before(hidden) if delta is None else before.add_(hidden, delta)
        delta = self._attention(normed, rotations, cache, inputs)
        return in_pieces(hidden, delta, self._feed_forward)

    def _feed_forward(self, hidden: Tensor, delta: Tensor) -> Tensor:
        normed = self._before_mlp.add_normed_(hidden, delta, self._after_attention)
        return self._after_mlp(self._group.add_up(self._mlp(normed)))
