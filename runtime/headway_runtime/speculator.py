"""Guessing as the runner sees it: guesses for a batch, and word of what became of them."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headway_runtime.batch import Batch, Chunk, Verified
from headway_runtime.config import EngineConfig, SpeculativeConfig
from headway_runtime.draft_model import DraftModel
from headway_runtime.errors import ConfigError
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.model_loading import load_model, make_cache, make_inputs
from headway_runtime.models.model import Model
from headway_runtime.ngram_drafts import NgramDrafts
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.verification import possible

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs
    from headway_runtime.layers.attention import KVCache


class Drafter(Protocol):
    """Who guesses."""

    def propose(self, chunks: list[Chunk]) -> list[tuple[int, ...]]:
        """Up to `num_drafts` guesses for each chunk."""


class LoadedDraft:
    """The model that guesses, loaded before it is known how many KV blocks there will be."""

    def __init__(self, folder: Path, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.model_config: ModelConfig = read_model_config(folder)
        self.model: Model = load_model(
            folder, self.model_config, config, choose_quantization("auto", folder), dtype, device
        )


def load_draft(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> LoadedDraft | None:
    """None where no model guesses."""
    speculative = config.speculative
    if speculative is None or speculative.model_path is None:
        return None
    return LoadedDraft(Path(speculative.model_path), config, dtype, device)


class Speculator:
    """One engine's guesses."""

    def __init__(
        self,
        speculative: SpeculativeConfig,
        loaded: LoadedDraft | None,
        config: EngineConfig,
        num_blocks: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """loaded: for the method "draft_model". vocab_size: of the model that checks."""
        self._draft_model: DraftModel | None = None
        self._drafter: Drafter
        if loaded is None:
            if speculative.method != "ngram":
                raise ConfigError(
                    f"speculative.method={speculative.method!r}: there is no model to guess; name one"
                )
            lengths = (speculative.prompt_lookup_min, speculative.prompt_lookup_max)
            self._drafter = NgramDrafts(*lengths, config.envelope.max_num_seqs)
        else:
            cache = make_cache(loaded.model, loaded.model_config, config, num_blocks, dtype, device)
            inputs = make_inputs(loaded.model, config, cache, dtype, device)
            self._drafter = self._draft_model = DraftModel(
                loaded.model, loaded.model_config, config, cache, inputs, vocab_size, device
            )
        # Of the latest call of `propose`.
        self.seconds = 0.0

    def open_graphs(self, make: Callable[[Model, "KVCache"], "DecodeGraphs | None"]) -> None:
        """Record passes of the draft model, if there is one."""
        if self._draft_model is not None:
            self._draft_model.open_graphs(make)

    @property
    def graphs(self) -> "DecodeGraphs | None":
        """Recorded passes; None where there are none."""
        return None if self._draft_model is None else self._draft_model.graphs

    @property
    def num_passes(self) -> int:
        """Passes of the draft model in the latest step that say what a pass costs."""
        return 0 if self._draft_model is None else self._draft_model.num_passes

    @property
    def pass_seconds(self) -> float:
        """What these took."""
        return 0.0 if self._draft_model is None else self._draft_model.pass_seconds

    @property
    def caught_up(self) -> tuple[int, float]:
        """Of how many sequences the draft model computed in the latest step what it lacked; seconds."""
        model = self._draft_model
        return (0, 0.0) if model is None else (model.num_caught_up, model.catch_up_seconds)

    def propose(self, batch: Batch) -> dict[int, tuple[int, ...]]:
        """Guesses by the index of their chunk, as many as the request can take."""
        self.seconds = 0.0
        if not batch.num_drafts:
            if self._draft_model is not None:
                self._draft_model.forget_times()
            return {}
        started_at = time.monotonic()
        wanted = [(index, chunk) for index, chunk in enumerate(batch.chunks) if chunk.num_drafts]
        proposed = self._drafter.propose([chunk for _, chunk in wanted])
        found = {
            index: drafts
            for (index, chunk), guesses in zip(wanted, proposed, strict=True)
            if (drafts := possible(chunk, guesses))
        }
        self.seconds = time.monotonic() - started_at
        return found

    def computed(self, batch: Batch) -> None:
        """The model computes the batch."""
        if self._draft_model is not None:
            self._draft_model.computed(batch)

    def accepted(self, batch: Batch, verified: dict[int, Verified]) -> None:
        """What became of guesses, by the index of their chunk."""
        if self._draft_model is not None:
            for index, one in verified.items():
                self._draft_model.accepted(batch.chunks[index], len(one.samples))

    def loaded(self, blocks: Iterable[int]) -> None:
        """The model's KV of these blocks was brought back from elsewhere; no draft's is kept there."""
        if self._draft_model is not None:
            self._draft_model.forget_blocks(blocks)

    def clear_blocks(self, blocks: Tensor) -> None:
        """Zero what lies in these blocks."""
        if self._draft_model is not None:
            self._draft_model.clear_blocks(blocks)
