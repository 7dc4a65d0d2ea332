"""A whole model: an embedding, decoder layers, a norm and a head.

Owns the arithmetic between token ids and logits. Where KV lies, and which tokens a step holds, comes with
`AttentionInputs`. Projections that read the same input are merged into one weight at load.
"""

import torch
from torch import Tensor

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.attention import AttentionInputs, AttentionLayer, KVCache
from headway_runtime.layers.linear import AnyLinear, make_linear
from headway_runtime.layers.norm import RMSNorm
from headway_runtime.layers.rotary import RotaryTable
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.gemma import GemmaLayer, gemma_norm
from headway_runtime.models.llama import LlamaLayer
from headway_runtime.models.loader import Weights
from headway_runtime.models.projections import projection
from headway_runtime.models.taped_layers import Situation, TapedLayers
from headway_runtime.parallel.share import Range
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup

GEMMAS = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})

# The second where the text model is a part of another one.
HEADS = ("lm_head", "language_model.lm_head")


class Decoder:
    """num_positions: how long a sequence may become. group: of the ranks that share the model.

    situation: what decode steps depend on beside their tokens, for tapes of them; None: there are to be none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup = ALONE,
        *,
        situation: Situation | None = None,
    ) -> None:
        is_gemma = config.architecture in GEMMAS
        layer_type = GemmaLayer if is_gemma else LlamaLayer
        prefix = _prefix(config, weights)
        shape = (config.vocab_size, config.hidden_size)
        self._group, self._vocab_size = group, config.vocab_size
        self._tokens = group.share.of_vocabulary(config.vocab_size)
        own_tokens = self._tokens if group.size > 1 else None
        self._embedding = weights.take(f"{prefix}embed_tokens.weight", shape, own_tokens)
        # Gemma's is rounded to the type of the numbers that it multiplies.
        self._embedding_scale = (
            torch.tensor(config.hidden_size**0.5, device=device).to(dtype) if is_gemma else None
        )
        self._layers = [
            layer_type(f"{prefix}layers.{index}.", index, config, weights, dtype, device, group)
            for index in range(config.num_layers)
        ]
        self.ran_as_one = False
        self._taped: TapedLayers | None = None
        if situation is not None and group.size == 1:
            self._taped = TapedLayers(self._layers, num_positions, situation)
        if is_gemma:
            self._norm = gemma_norm(f"{prefix}norm", config, weights, dtype)
        else:
            weight = weights.take(f"{prefix}norm.weight", (config.hidden_size,))
            self._norm = RMSNorm(weight, config.rms_norm_eps)
        self._head = self._make_head(config, weights)
        self._logit_soft_cap = config.logit_soft_cap
        heads = [f"{name}.weight" for name in HEADS] if config.tie_word_embeddings else []
        self._check_tied(weights, heads, shape, own_tokens)
        foreign = [name for name in weights.names() if name.startswith(config.foreign_prefixes)]
        weights.finish(unused=heads + foreign)
        self._rotaries = [
            RotaryTable(rope, config.head_dim, num_positions, dtype, device) for rope in config.ropes
        ]

    @property
    def linears(self) -> list[AnyLinear]:
        """All linear layers, in the order of their work."""
        return [*(linear for layer in self._layers for linear in layer.linears), self._head]

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """How each layer attends."""
        return [layer.attention for layer in self._layers]

    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor:
        """Compute a step's tokens and store their KV. Returns hidden states [tokens, hidden_size]."""
        hidden = self._embedded(token_ids)
        if self._embedding_scale is not None:
            hidden.mul_(self._embedding_scale)
        rotations = [rotary.at(positions) for rotary in self._rotaries]
        taped = None if self._taped is None else self._taped(hidden, rotations, cache, inputs)
        self.ran_as_one = taped is not None
        if taped is not None:
            return taped
        delta: Tensor | None = None
        for layer in self._layers:
            delta = layer(hidden, delta, rotations, cache, inputs)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of some rows of what `forward` returned; on other ranks, their part."""
        logits = self._head(self._norm(hidden))
        if self._logit_soft_cap is not None:
            logits.div_(self._logit_soft_cap).tanh_().mul_(self._logit_soft_cap)
        return self._group.side_by_side(logits, self._vocab_size)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._embedding.index_select(0, token_ids)
        # Each token's row is one rank's; the others add zeros.
        own = token_ids - self._tokens.first
        is_foreign = (own < 0) | (own >= len(self._tokens))
        rows = self._embedding.index_select(0, own.masked_fill_(is_foreign, 0))
        return self._group.add_up(rows.masked_fill_(is_foreign.unsqueeze(1), 0))

    def _check_tied(
        self, weights: Weights, heads: list[str], shape: tuple[int, int], tokens: Range | None
    ) -> None:
        """A tied checkpoint may carry the head as well, if it is the same tensor."""
        for name in set(heads).intersection(weights.names()):
            if not torch.equal(weights.take(name, shape, tokens), self._embedding):
                raise ModelLoadError(
                    f"config.json: tie_word_embeddings=true, and the checkpoint's {name!r} is not its "
                    "embedding; set it to false, or leave the tensor out"
                )

    def _make_head(self, config: ModelConfig, weights: Weights) -> AnyLinear:
        if config.tie_word_embeddings:
            return make_linear([self._embedding], compresses=weights.compresses)
        known = weights.names()
        name = next((one for one in HEADS if f"{one}.weight" in known), HEADS[0])
        rows = {name: self._tokens} if self._group.size > 1 else None
        return projection(weights, {name: config.vocab_size}, config.hidden_size, has_bias=False, rows=rows)


def _prefix(config: ModelConfig, weights: Weights) -> str:
    """What the names of this checkpoint's tensors start with."""
    known = weights.names()
    return next(
        (one for one in config.tensor_prefixes if f"{one}embed_tokens.weight" in known),
        config.tensor_prefixes[0],
    )
