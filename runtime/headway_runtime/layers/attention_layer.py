"""How one layer of a model attends, as a value: what a model says of a layer and the kernels are made for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A model lists those of its layers as `attention_layers`.

    index: of the layer in the cache.
    scale: what scores, products of queries and keys, are multiplied by; 1 / sqrt(head_dim) for most models.
    window: a token attends to itself and to the `window - 1` tokens before it; None: to all before it.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap), before any mask; None: they stay as they are.
    """

    index: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position + 1 - self.window)
