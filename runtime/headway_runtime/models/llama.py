"""Llama 2 and 3: pre-norm decoder layers of grouped-query attention and a SiLU-gated MLP.

Owns the arithmetic between token ids and logits. Where KV lies, and which tokens a step holds, comes with
`AttentionInputs`. Projections that read the same input are merged into one weight at load.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.attention import AttentionInputs, KVCache, attend
from headway_runtime.layers.linear import Linear, PackedLinear, make_linear
from headway_runtime.layers.rotary import RotaryTable, rotate_
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.loader import Weights

# So many rows go through an MLP at once on a CPU: its wide middle then stays in the processor's cache, and
# they are enough for products at full speed.
CPU_MLP_ROWS = 256


class LlamaLayer:
    """One decoder layer."""

    __slots__ = ("_config", "_down", "_gate_up", "_index", "_input_norm", "_output", "_post_norm", "_qkv")

    def __init__(self, index: int, config: ModelConfig, weights: Weights) -> None:
        self._index = index
        self._config = config
        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._input_norm = weights.take(f"{prefix}.input_layernorm.weight", (hidden,))
        self._post_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        qkv = {
            f"{attention}.q_proj": query_size,
            f"{attention}.k_proj": kv_size,
            f"{attention}.v_proj": kv_size,
        }
        gate_up = dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), config.intermediate_size)
        self._qkv = _merged(weights, qkv, hidden, has_bias=config.attention_bias)
        self._output = _merged(
            weights, {f"{attention}.o_proj": hidden}, query_size, has_bias=config.attention_bias
        )
        self._gate_up = _merged(weights, gate_up, hidden, has_bias=config.mlp_bias)
        self._down = _merged(
            weights, {f"{mlp}.down_proj": hidden}, config.intermediate_size, has_bias=config.mlp_bias
        )

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """hidden: [tokens, hidden_size], before and after."""
        config = self._config
        normed = functional.rms_norm(hidden, self._input_norm.shape, self._input_norm, config.rms_norm_eps)
        hidden = self._output(self._attend(self._qkv(normed), rotation, cache, inputs)).add_(hidden)
        is_cpu = hidden.device.type == "cpu"
        for rows in torch.split(hidden, CPU_MLP_ROWS) if is_cpu else (hidden,):
            rows.add_(self._mlp(rows))
        return hidden

    def _mlp(self, hidden: Tensor) -> Tensor:
        normed = functional.rms_norm(
            hidden, self._post_norm.shape, self._post_norm, self._config.rms_norm_eps
        )
        gate, up = self._gate_up(normed).chunk(2, -1)
        return self._down(functional.silu(gate).mul_(up))

    def _attend(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        config = self._config
        tokens = qkv.shape[0]
        num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
        query_size = config.num_attention_heads * head_dim
        # Queries and keys lie side by side, so that both are rotated in place, in one go.
        rotated = qkv[:, : query_size + num_kv_heads * head_dim]
        rotate_(rotated.view(tokens, -1, head_dim), *rotation)
        query = qkv[:, :query_size].view(tokens, num_kv_heads, -1, head_dim)
        key_value = qkv[:, query_size:].view(tokens, 2 * num_kv_heads, head_dim)
        return attend(query, key_value, self._index, cache, inputs)


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
        self._config = config
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", shape)
        self._layers = [LlamaLayer(index, config, weights) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", (config.hidden_size,))
        tied = config.tie_word_embeddings
        self._head = make_linear(self._embedding if tied else weights.take("lm_head.weight", shape))
        # A tied checkpoint may carry the head as well; it is the same tensor.
        weights.finish(unused=["lm_head.weight"] if tied else [])
        self._rotary = RotaryTable(config, num_positions, dtype, device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """Compute a step's tokens and store their KV. Returns hidden states [tokens, hidden_size]."""
        hidden = self._embedding.index_select(0, token_ids)
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, rotation, cache, inputs)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of some rows of what `forward` returned."""
        normed = functional.rms_norm(hidden, self._norm.shape, self._norm, self._config.rms_norm_eps)
        return self._head(normed)


def _merged(
    weights: Weights, outputs: dict[str, int], num_inputs: int, *, has_bias: bool
) -> Linear | PackedLinear:
    """One linear layer of several that read the same input. outputs: name and number of outputs of each."""
    weight = torch.cat([weights.take(f"{name}.weight", (size, num_inputs)) for name, size in outputs.items()])
    if not has_bias:
        return make_linear(weight)
    return make_linear(
        weight, torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in outputs.items()])
    )
