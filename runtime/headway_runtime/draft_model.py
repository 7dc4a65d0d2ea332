"""Guesses tokens with a second, smaller model. Owns that model, its KV, and what of it is valid.

The draft's KV lies in blocks of the same ids as the model's own, so whoever holds a block holds both, and the
prefix cache serves both. But the draft is run only for sequences that are guessed for, so its KV may be
behind: `_num_valid` says of each block how many of its first tokens the draft has computed. Before it guesses
for a sequence it computes what it lacks; if that is much, over several steps, in which nothing is guessed for
it.

Guesses are drawn with the request's temperature, filters, seed and positions; see `verification` for why.
Biases, penalties and grammars are left to the model that checks.
"""

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig
from headway_runtime.draft_passes import run_ahead
from headway_runtime.fitted_draft import FittedDraft
from headway_runtime.graphs.forms import DRAFT_TOKENS
from headway_runtime.layers.attention import KVCache
from headway_runtime.model_config import ModelConfig
from headway_runtime.models.model import Model
from headway_runtime.request import SamplingParams
from headway_runtime.sampler import make_sampler
from headway_runtime.step_inputs import StepInputBuilder

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs

# Tokens of all sequences together that may be computed in one step of what the draft lacks.
CATCH_UP_TOKENS = 512


class DraftModel:
    """model: of the draft's own config; its vocabulary is the model's, at most cut or padded at its end."""

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        config: EngineConfig,
        cache: KVCache,
        inputs: StepInputBuilder,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """vocab_size: of the model that checks."""
        self._model = FittedDraft(model, model_config.vocab_size, vocab_size)
        # As many as its rotary tables have, which YaRN and the like stretch.
        self._max_positions = model_config.longest_context
        self._block_size = config.block_size
        self._catch_up_tokens = min(CATCH_UP_TOKENS, config.envelope.max_num_batched_tokens)
        self._cache = cache
        self._inputs = inputs
        self._sampler = make_sampler(vocab_size, device)
        # Recorded passes; None where they run kernel by kernel.
        self.graphs: DecodeGraphs | None = None
        self._num_valid = array("i", [0]) * cache.shape.num_blocks
        self._plain: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        # Of the latest call: passes that say what a pass costs, and their time. The first one does not where
        # it had to catch up: that is time of its own.
        self.forget_times()

    def forget_times(self) -> None:
        """Nothing is guessed in this step."""
        self.num_passes, self.num_caught_up = 0, 0
        self.pass_seconds, self.catch_up_seconds = 0.0, 0.0

    def open_graphs(self, make: Callable[[Model, KVCache], "DecodeGraphs | None"]) -> None:
        """Record passes. make: of a model over its cache."""
        self.graphs = make(self._model, self._cache)

    def propose(self, chunks: list[Chunk]) -> list[tuple[int, ...]]:
        """Up to `num_drafts` guesses for each chunk, a decode."""
        guesses: list[list[int]] = [[] for _ in chunks]
        live = self._catching_up(chunks)
        self.forget_times()
        # All of that pass, where it is not of the size of any other.
        is_catching_up = any(one.num_tokens > DRAFT_TOKENS for _, one in live)
        self.num_caught_up = sum(one.num_tokens for _, one in live) if is_catching_up else 0
        tells = not self.num_caught_up
        while live:
            started_at = time.monotonic()
            num_ahead = self._run_ahead(live, chunks, guesses) if tells else 0
            if num_ahead:
                self.num_passes += num_ahead
                self.pass_seconds += time.monotonic() - started_at
                break
            tokens = self._run([chunk for _, chunk in live])
            following = []
            for (index, _), token_id in zip(live, tokens, strict=True):
                if token_id is None:
                    continue
                guesses[index].append(token_id)
                origin = chunks[index]
                position = len(origin.token_ids) + len(guesses[index]) - 1
                if len(guesses[index]) < origin.num_drafts and position < self._max_positions:
                    following.append((index, self._next(origin, guesses[index])))
            live = following
            seconds = time.monotonic() - started_at
            if tells:
                self.num_passes += 1
                self.pass_seconds += seconds
            else:
                self.catch_up_seconds = seconds
            tells = True
        return [tuple(one) for one in guesses]

    def computed(self, batch: Batch) -> None:
        """The model computes these chunks: what the draft knew of the places they are written to is void.

        Not so for sequences that were guessed for just now; `accepted` tells of these.
        """
        for chunk in batch.chunks:
            if not chunk.ahead:
                self._truncate(chunk.block_table, chunk.start, chunk.start + chunk.num_tokens)

    def accepted(self, chunk: Chunk, num_accepted: int) -> None:
        """So many of the guesses that `chunk` checks came true; the draft's KV of the others is void."""
        # The last guess was made, but not computed.
        num_valid = min(num_accepted, len(chunk.ahead) - 1)
        num_known = chunk.start + chunk.num_tokens - len(chunk.ahead)
        self._truncate(chunk.block_table, num_known + num_valid, num_known + len(chunk.ahead))

    def clear_blocks(self, blocks: Tensor) -> None:
        self._cache.clear(blocks)

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Nothing in these is the draft's of what the model has there."""
        for block in blocks:
            self._num_valid[block] = 0

    def _run_ahead(self, live: list[tuple[int, Chunk]], chunks: list[Chunk], guesses: list[list[int]]) -> int:
        """All passes that are left, where they are recorded; how many, 0 if they are not. Adds to guesses."""
        if self.graphs is None:
            return 0
        own = [chunk for _, chunk in live]
        counts = [
            min(
                chunks[index].num_drafts - len(guesses[index]),
                1 + max(0, self._max_positions - chunk.start - chunk.num_tokens),
            )
            for index, chunk in live
        ]
        found = run_ahead(self.graphs, own, counts)
        if found is None:
            return 0
        for (index, chunk), count, tokens in zip(live, counts, found, strict=True):
            end = chunk.start + chunk.num_tokens
            self._extend(chunk.block_table, chunk.start, end + count - 1)
            # Behind a token that is none, something was computed, but nothing that counts.
            self._truncate(chunk.block_table, end + len(tokens), end + count - 1)
            guesses[index].extend(tokens)
        return max(counts)

    def _catching_up(self, chunks: list[Chunk]) -> list[tuple[int, Chunk]]:
        """By index, the chunks that bring the draft up to the last known tokens, as far as there is room."""
        found = []
        budget = self._catch_up_tokens
        for index, chunk in enumerate(chunks):
            num_known = len(chunk.token_ids)
            start = min(self._num_computed(chunk), num_known - 1)
            count = min(num_known - start, budget, max(0, self._max_positions - start))
            if count <= 0:
                continue
            budget -= count
            catching_up = replace(
                chunk,
                start=start,
                num_tokens=count,
                samples=start + count == num_known,
                sampling=self._plain_sampling(chunk.sampling),
                matcher=None,
            )
            found.append((index, catching_up))
        return found

    def _next(self, origin: Chunk, guesses: list[int]) -> Chunk:
        """The decode after the latest guess."""
        num_known = len(origin.token_ids) + len(guesses)
        return replace(
            origin,
            start=num_known - 1,
            num_tokens=1,
            num_generated=origin.num_generated + len(guesses),
            samples=True,
            sampling=self._plain_sampling(origin.sampling),
            matcher=None,
            ahead=tuple(guesses),
        )

    def _run(self, chunks: list[Chunk]) -> list[int | None]:
        """One pass; the token guessed after each chunk, None where none is."""
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].num_tokens > 1)
        ordered = [chunks[index] for index in order]
        num_decodes = sum(one.num_tokens == 1 for one in ordered)
        batch = Batch(tuple(ordered), num_decodes, sum(one.num_tokens for one in ordered))
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        for chunk in chunks:
            self._extend(chunk.block_table, chunk.start, chunk.start + chunk.num_tokens)
        tokens: list[int | None] = [None] * len(chunks)
        if inputs.sampled:
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))[: len(inputs.sampled)]
            rows = [ordered[index] for index in inputs.sampled]
            for index, sample in zip(inputs.sampled, self._sampler(logits, rows), strict=True):
                tokens[order[index]] = sample.token_id
        return tokens

    def _num_computed(self, chunk: Chunk) -> int:
        """How many of the sequence's first tokens the draft has computed."""
        size, total = self._block_size, 0
        for block in chunk.block_table:
            valid = self._num_valid[block]
            total += valid
            if valid < size:
                break
        return total

    def _extend(self, table: "array[int]", start: int, end: int) -> None:
        """Tokens [start, end) are computed, and all before them."""
        size = self._block_size
        for index in range(start // size, (end - 1) // size + 1):
            self._num_valid[table[index]] = min(size, end - index * size)

    def _truncate(self, table: "array[int]", start: int, end: int) -> None:
        """Tokens [start, end) are not computed any more."""
        size = self._block_size
        for index in range(start // size, (end - 1) // size + 1):
            block = table[index]
            self._num_valid[block] = min(self._num_valid[block], max(0, start - index * size))

    def _plain_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """What of it decides the guesses. The same object for the same one, which makes comparing cheap."""
        known = self._plain.get(id(sampling))
        if known is None:
            if len(self._plain) > 4096:
                self._plain.clear()
            plain = SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
            )
            known = self._plain[id(sampling)] = (sampling, plain)
        return known[1]
