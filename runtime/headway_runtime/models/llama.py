"""Llama 2 and 3: pre-norm decoder layers of grouped-query attention and a SiLU-gated MLP.

Owns the arithmetic between token ids and logits. Where KV lies, and which tokens a step holds, comes with
`AttentionInputs`. Projections that read the same input are merged into one weight at load.
"""

import torch
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache, attend
from headway_runtime.layers.gate import SiluGate
from headway_runtime.layers.linear import AnyLinear, make_linear
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.layers.rotary import RotaryTable
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.loader import Weights
from headway_runtime.models.projections import projection

# So many rows go through an MLP at once on a CPU: its wide middle then stays in the processor's cache, and
# they are enough for products at full speed.
CPU_MLP_ROWS = 256


class LlamaLayer:
    """One decoder layer."""

    __slots__ = ("_attention", "_down", "_gate", "_gate_up", "_input_norm", "_output", "_post_norm", "_qkv")

    def __init__(
        self, index: int, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._attention = AttentionLayer(index)
        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._input_norm, self._post_norm = (
            RMSNorm(weights.take(f"{prefix}.{name}_layernorm.weight", (hidden,)), config.rms_norm_eps)
            for name in ("input", "post_attention")
        )
        qkv = {
            f"{attention}.q_proj": query_size,
            f"{attention}.k_proj": kv_size,
            f"{attention}.v_proj": kv_size,
        }
        gate_up = dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), config.intermediate_size)
        self._qkv = projection(weights, qkv, hidden, has_bias=config.attention_bias)
        self._output = projection(
            weights, {f"{attention}.o_proj": hidden}, query_size, has_bias=config.attention_bias
        )
        self._gate_up = projection(weights, gate_up, hidden, has_bias=config.mlp_bias)
        self._gate = SiluGate(config.intermediate_size, dtype, device)
        self._down = projection(
            weights, {f"{mlp}.down_proj": hidden}, config.intermediate_size, has_bias=config.mlp_bias
        )

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """In the order of their work."""
        return self._qkv, self._output, self._gate_up, self._down

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """hidden: [tokens, hidden_size]; the last layer's `delta` is added to it first.

        Returns this layer's delta; adding it is one pass with the norm that follows.
        """
        normed = self._input_norm(hidden) if delta is None else self._input_norm.add_(hidden, delta)
        delta = self._output(attend(self._qkv(normed), rotation, self._attention, cache, inputs))
        if hidden.device.type != "cpu" or len(hidden) <= CPU_MLP_ROWS:
            return self._mlp(hidden, delta)
        pieces = zip(torch.split(hidden, CPU_MLP_ROWS), torch.split(delta, CPU_MLP_ROWS), strict=True)
        for rows, deltas in pieces:
            deltas.copy_(self._mlp(rows, deltas))
        return delta

    def _mlp(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return self._down(self._gate(self._gate_up(self._post_norm.add_(hidden, delta))))


class Llama:
    """The whole model. num_positions: how long a sequence may become."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        self._layers = [
            LlamaLayer(index, config, weights, dtype, device) for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = (
            make_linear([self._embedding])
            if tied
            else projection(weights, {"lm_head": config.vocab_size}, config.hidden_size, has_bias=False)
        )
        # A tied checkpoint may carry the head as well; it is the same tensor.
        weights.finish(unused=["lm_head.weight"] if tied else [])
        self._rotary = RotaryTable(config, num_positions, dtype, device)

    @property
    def linears(self) -> list[AnyLinear]:
        """All linear layers, in the order of their work."""
        return [*(linear for layer in self._layers for linear in layer.linears), self._head]

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """Compute a step's tokens and store their KV. Returns hidden states [tokens, hidden_size]."""
        hidden = self._embedding.index_select(0, token_ids)
        rotation = self._rotary.at(positions)
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer(hidden, delta, rotation, cache, inputs)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of some rows of what `forward` returned."""
        return self._head(self._norm(hidden))
