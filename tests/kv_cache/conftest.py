"""Caches with some sequences in them, attention in float32 as the reference, and engines of small models."""

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.layers import cpu_kernels
from headway_runtime.layers.attention import (
    AttentionInputs,
    AttentionLayer,
    Decodes,
    DecodesAgain,
    FirstChunk,
    KVCache,
    KVShape,
    LaterChunk,
    attend,
)
from headway_runtime.layers.masks import Masks
from headway_runtime.metrics import EngineMetrics
from headway_runtime.models import llama
from headway_runtime.models.self_attention import SelfAttention
from headway_runtime.request import Request, RequestOutput, SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown if the test fails
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Rows:
    """Rows of a step before they are rotated, and after, in float32: [rows, heads, head_dim]."""

    qkv: Tensor
    rotation: tuple[Tensor, Tensor]
    rotated: Tensor

    def only(self, row: int) -> "Rows":
        own = slice(row, row + 1)
        return Rows(self.qkv[own], (self.rotation[0][own], self.rotation[1][own]), self.rotated[own])


class Paged:
    """One layer's cache of random numbers, blocks in random order, and steps over it.

    shape: KV heads, query heads that share one, head size, block size.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        kept: torch.dtype,
        generator: torch.Generator,
        layer: AttentionLayer | None = None,
    ) -> None:
        self.heads, self.groups, self.dim, self.block_size = shape
        self.dtype, self._generator = dtype, generator
        self.layer = layer or AttentionLayer(0, scale=self.dim**-0.5)
        self.num_blocks = 3 + 700 // self.block_size
        kv_shape = KVShape(1, self.num_blocks, self.block_size, self.heads, self.dim)
        self.cache = KVCache(kv_shape, self.groups, dtype, CPU, [self.layer], kept)
        self.kv = self.cache.layers[0]
        self._free = (torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist()

    def table(self, length: int) -> Tensor:
        """Blocks for so many tokens, which nobody else has."""
        return torch.tensor([self._free.pop() for _ in range(-(-length // self.block_size))])

    def rows(self, count: int, spread: float = 1.0) -> Rows:
        heads = (self.groups + 2) * self.heads
        qkv = torch.randn((count, heads * self.dim), generator=self._generator).mul_(spread).to(self.dtype)
        angles = torch.rand((count, self.dim // 2), generator=self._generator) * 2 * math.pi
        cosine = torch.cat((angles.cos(), angles.cos()), -1).to(self.dtype)
        sine = torch.cat((-angles.sin(), angles.sin()), -1).to(self.dtype)
        rotated = qkv.float().view(count, heads, self.dim).clone()
        turned = rotated[:, : -self.heads]
        swapped = turned.roll(self.dim // 2, -1)
        rotated[:, : -self.heads] = turned * cosine.float()[:, None] + swapped * sine.float()[:, None]
        return Rows(qkv, (cosine, sine), rotated)

    def slots(self, table: Tensor, first: int, count: int) -> Tensor:
        positions = torch.arange(first, first + count)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def chunk(self, rows: Rows, table: Tensor, first: int) -> Tensor:
        """Attend as a prompt's tokens from position `first` on."""
        count = len(rows.qkv)
        positions = torch.arange(first, first + count)
        own = table[: -(-(first + count) // self.block_size)]
        context = torch.arange(len(own) * self.block_size if first else count)
        masks = Masks(positions, context, self.dtype)
        call = LaterChunk(0, count, first, own, masks) if first else FirstChunk(0, count, masks)
        return self._attend(rows, self.slots(table, first, count), call, num_decodes=0)

    def decodes(self, rows: Rows, tables: list[Tensor], positions: list[int]) -> Tensor:
        """Attend as one new token each of several sequences."""
        width = max(map(len, tables))
        padded = torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in tables])
        at = torch.tensor(positions)
        slots = torch.cat(
            [self.slots(table, first, 1) for table, first in zip(tables, positions, strict=True)]
        )
        masks = Masks(at, torch.arange(width * self.block_size), self.dtype)
        return self._attend(rows, slots, Decodes(0, len(rows.qkv), padded, at, masks), len(rows.qkv))

    def decodes_again(self, rows: Rows, table: Tensor, first: int) -> Tensor:
        """Attend as tokens of one sequence that were generated before."""
        count = len(rows.qkv)
        call = DecodesAgain(0, count, table.expand(count, -1), torch.arange(first, first + count))
        return self._attend(rows, self.slots(table, first, count), call, num_decodes=0)

    def _attend(self, rows: Rows, slots: Tensor, call: Any, num_decodes: int) -> Tensor:
        place = None if self.cache.kernels else (slots // self.block_size, slots % self.block_size)
        inputs = AttentionInputs(slots, place, [call], num_decodes)
        rotation = (rows.rotation[0].clone(), rows.rotation[1].clone())
        return attend(rows.qkv.clone(), rotation, self.layer, self.cache, inputs)

    def want(self, rows: Rows, table: Tensor, first: int) -> Tensor:
        """What rows at positions from `first` on attend to, in float32, of what the cache holds now."""
        positions = range(first, first + len(rows.rotated))
        by_head = self.kv.by_head(table, torch.float32)[:, : positions.stop]
        key, value = by_head.chunk(2)
        query = rows.rotated[:, : self.heads * self.groups].reshape(-1, self.heads, self.groups, self.dim)
        scores = query @ key.transpose(1, 2) * self.layer.scale
        if self.layer.soft_cap is not None:
            scores = self.layer.soft_cap * (scores / self.layer.soft_cap).tanh()
        for row, position in enumerate(positions):
            scores[row, ..., position + 1 :] = -math.inf
            scores[row, ..., : self.layer.first_seen(position)] = -math.inf
        return (scores.softmax(-1) @ value).flatten(1)


@pytest.fixture
def make_paged(generator: torch.Generator) -> Callable[..., Paged]:
    """make_paged(shape, dtype, kept, layer)."""

    def make(
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        kept: torch.dtype,
        layer: AttentionLayer | None = None,
    ) -> Paged:
        return Paged(shape, dtype, kept, generator, layer)

    return make


@pytest.fixture(params=["kernels", "pytorch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention by our own kernels, and by PyTorch's operators."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
    elif cpu_kernels.activate_and_multiply("silu", 64, torch.float32, CPU) is None:
        pytest.skip("this machine compiles no CPU kernels")
    return str(request.param)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a Mistral without windows, and the same in transformers."""

    folder: Path
    model: Any

    def greedy(self, prompt: list[int], count: int, window: int | None) -> list[int]:
        """The tokens that transformers generates, each from a whole new computation, with that window."""
        self.model.config.sliding_window = window
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small float32 model of random weights, whose attention decides what it says."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(11)
    config = MistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        sliding_window=None,
    )
    config._attn_implementation = "eager"
    model: Any = MistralForCausalLM(config)
    model.eval()
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


@pytest.fixture
def give_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """give_layers(window=..., soft_cap=...): layers attend that way from now on."""

    def give(**changes: Any) -> None:
        class Changed(SelfAttention):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self.layer = replace(self.layer, **changes)

        monkeypatch.setattr(llama, "SelfAttention", Changed)

    return give


class EngineDriver:
    """An engine, stepped to the end of its work with all invariants checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, request_id: str, prompt: Iterable[int], **sampling: Any) -> None:
        now = time.monotonic()
        params = SamplingParams(**{"temperature": 0.0} | sampling)
        self.engine.add_request(Request(request_id, tuple(prompt), params, now), now)
        self.outputs[request_id] = []

    def run(self, max_steps: int = 10000) -> None:
        while self.engine.has_work:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            for one in self.engine.step(time.monotonic()).outputs:
                self.outputs[one.request_id].append(one)
            self.engine.check_integrity()

    def tokens(self, request_id: str) -> list[int]:
        return [token for one in self.outputs[request_id] for token in one.token_ids]

    def counter(self, name: str) -> int:
        return self.metrics.snapshot().counters[name]


@pytest.fixture
def start_engine(checkpoint: Checkpoint) -> Callable[..., EngineDriver]:
    """start_engine(folder, **changes of the config)."""

    def start(folder: Path | None = None, **changes: Any) -> EngineDriver:
        config = EngineConfig(
            model_path=str(folder or checkpoint.folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=256,
            block_size=16,
            kv_cache_memory_bytes=16 * 2**20,
            envelope=Envelope(16, 256),
            limits=Limits(16, 256),
            max_waiting=100,
            num_threads=1,
        )
        return EngineDriver(replace(config, **changes))

    return start
