"""The attention of one decoder layer, made of a checkpoint's tensors."""

import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache, attend
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.layers.norm import HeadNorm
from headway_runtime.layers.row_codes import Rows, product_of, wanted_codes
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.loader import Weights
from headway_runtime.models.projections import projection, projection_back
from headway_runtime.parallel.tensor_group import TensorGroup


class SelfAttention:
    """Projections, norms of heads where the model has them, attention, and the projection back.

    Of several ranks each has some heads; what it returns is the sum of all.
    """

    __slots__ = ("_group", "_head_norm", "_output", "_qkv", "_rope", "layer")

    def __init__(
        self,
        name: str,
        index: int,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        group: TensorGroup,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        """norm_offset: what is added to the weights of the norms of heads."""
        own, head_dim = config.layers[index], config.head_dim
        self.layer = AttentionLayer(
            index, scale=config.attention_scale, window=own.window, soft_cap=config.attention_soft_cap
        )
        self._rope = own.rope
        self._group = group
        query_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
        heads = group.share.of(config.num_attention_heads)
        kv_heads = group.share.of_kv_heads(config.num_kv_heads)
        queries, kv = heads.times(head_dim), kv_heads.times(head_dim)
        names = [f"{name}.{which}_proj" for which in "qkv"]
        self._qkv = projection(
            weights,
            dict(zip(names, (query_size, kv_size, kv_size), strict=True)),
            config.hidden_size,
            has_bias=config.has_qkv_bias,
            rows=dict(zip(names, (queries, kv, kv), strict=True)) if group.size > 1 else None,
        )
        self._output = projection_back(
            weights,
            f"{name}.o_proj",
            config.hidden_size,
            query_size,
            queries,
            has_bias=config.has_output_bias,
        )
        self._head_norm: HeadNorm | None = None
        if config.normalizes_heads:
            norms = [
                (weights.take(f"{name}.{which}_norm.weight", (head_dim,)).float() + norm_offset, count)
                for which, count in (("q", len(heads)), ("k", len(kv_heads)))
            ]
            self._head_norm = HeadNorm(norms, config.rms_norm_eps, dtype)

    def wanted_codes(self, num_rows: int) -> torch.dtype | None:
        """See row_codes.py."""
        return wanted_codes(self._qkv, num_rows)

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """In the order of their work."""
        return self._qkv, self._output

    def __call__(
        self,
        x: Rows,
        rotations: list[tuple[Tensor, Tensor]],
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """x: [tokens, hidden_size], as codes where they are wanted. rotations: by each of the model's
        tables."""
        qkv = product_of(self._qkv, x)
        attended = attend(qkv, rotations[self._rope], self.layer, cache, inputs, self._head_norm)
        return self._group.add_up(self._output(attended))
