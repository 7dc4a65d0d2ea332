"""The network being trained: a Llama in plain torch whose parameter names are Hugging Face's.

Owns the shapes and the forward pass over whole rows of tokens. It has no KV cache and no sampling:
serving is the engine's work, and judging goes through transformers, so that this file is checked
by an independent implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The numbers of a Llama `config.json` that decide parameter shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


TARGET_NAME = "headway-tiny"
DRAFT_NAME = "headway-tiny-draft"


def shape_of(name: str, vocab_size: int) -> NetworkShape:
    """The shape of one of the two bundled models."""
    if name == TARGET_NAME:
        return NetworkShape(vocab_size, 256, 768, 4, 4, 2)
    if name == DRAFT_NAME:
        return NetworkShape(vocab_size, 128, 160, 2, 4, 2)
    raise ValueError(f"name: {name!r} is no bundled model; use {TARGET_NAME!r} or {DRAFT_NAME!r}")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, length, _ = x.shape
        head_dim = self.shape.head_dim

        def heads(projection: nn.Linear) -> Tensor:
            projected: Tensor = projection(x)
            return projected.view(rows, length, -1, head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj), cosine, sine)
        key = rotate(heads(self.k_proj), cosine, sine)
        value = heads(self.v_proj)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """What Hugging Face calls `model`: embeddings, layers and the last norm."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """A Llama with tied embeddings; `forward` maps token ids [rows, length] to logits."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        depth_scale = (2 * shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = parameter.shape[1] ** -0.5 * (depth_scale if is_output else 1.0)
                nn.init.normal_(parameter, std=std)

    def forward(self, token_ids: Tensor) -> Tensor:
        cosine, sine = rotary_tables(self.shape, token_ids.shape[1])
        x: Tensor = self.model.embed_tokens(token_ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rotary_tables(shape: NetworkShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] in the layout of Hugging Face (two equal halves)."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
