"""Decode steps of a model as recorded work, by number of rows: everything from tokens to tokens.

    place_step -> embedding, decoder layers -> norm, head -> draw, which leaves tokens where the next step
    finds them

What runs so: steps in which every sequence computes its last known token, and wants the next one by
temperature and filters alone. Prompts, guesses, adapters, logits that are edited and log-probabilities run
kernel by kernel, as all steps do where there are no recordings. The kernels are the same either way; rows of
nobody may have products choose the form for more rows, whose sums are rounded in another order.

A few sizes are recorded at the start, the others by and by while there is nothing else to do. A step takes
the smallest one there is that holds it. If recording fails, that is said once, and what there is, is used.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from triton.errors import TritonError

from headway_runtime import transfers
from headway_runtime.batch import Chunk
from headway_runtime.device_sampler import PendingSamples
from headway_runtime.draws import block_size_of
from headway_runtime.graphs.capture import Capturer, Graph
from headway_runtime.graphs.sizes import first_of, smallest_that_holds
from headway_runtime.graphs.step_buffers import StepBuffers
from headway_runtime.kernels.triton.draw import draw
from headway_runtime.kernels.triton.place_step import place_step
from headway_runtime.layers.attention import KVCache
from headway_runtime.logit_edits import needs_edits
from headway_runtime.models.model import Model
from headway_runtime.request import SamplingParams

logger = logging.getLogger(__name__)

NO_SOURCES: Mapping[int, int] = MappingProxyType({})


class DecodeGraphs:
    """One model's. Its KV cache, and all weights, stay where they are from here on."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        capturer: Capturer,
        sizes: Sequence[int],
        *,
        most_sampled: int,
        max_model_len: int,
        vocab_size: int,
        limit_bytes: int | None,
        device: torch.device,
    ) -> None:
        """sizes: ascending. most_sampled: tokens of any step.

        limit_bytes: of memory, beyond which no more is recorded; None: there is none.
        """
        block_size = cache.shape.block_size
        self._model, self._cache, self._capturer = model, cache, capturer
        self._limit_bytes = limit_bytes
        self._block_size, self._draw_block_size = block_size, block_size_of(vocab_size)
        self.buffers = StepBuffers(
            max(sizes), most_sampled, -(-max_model_len // block_size), block_size, vocab_size, device
        )
        self._graphs: dict[int, Graph] = {}
        first = first_of(sizes)
        # In the order in which they are recorded: after the first ones, the largest that is left.
        self._wanted = [*first, *(size for size in sorted(sizes, reverse=True) if size not in first)]
        self._num_first = len(first)
        # Of the latest batch of which all rows were looked at, if its requests will stay what they are.
        self._plain_params: list[SamplingParams] = []
        # A copy of what stands in `buffers.tokens`.
        self._latest: Tensor | None = None
        self.num_bytes = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those recorded so far, ascending."""
        return tuple(sorted(self._graphs))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be recorded."""
        return not self._wanted

    def capture_first(self) -> None:
        """Record the sizes that the start waits for."""
        for _ in range(self._num_first):
            if self._wanted:
                self.capture_next()
        if self._graphs:
            logger.info(
                "decode steps of %s sequences are recorded, %.0f MB; %d more sizes follow while idle",
                ", ".join(map(str, self.sizes)),
                self.num_bytes / 1e6,
                len(self._wanted),
            )

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Record one more size. No step may be under way whose tokens are still wanted."""
        size = self._wanted.pop(0)
        if self._limit_bytes is not None and self.num_bytes >= self._limit_bytes:
            logger.info(
                "recorded decode steps take %d bytes of the %d set aside; sizes %s are left out",
                self.num_bytes,
                self._limit_bytes,
                [size, *self._wanted],
            )
            self._wanted.clear()
            return
        work = partial(self._step, size)
        # Nobody's rows alone, so that warming up changes no sequence's KV.
        self.buffers.fill((), size, NO_SOURCES)
        try:
            self._capturer.warm(work)
            used_before = self._capturer.used_bytes()
            self._graphs[size] = self._capturer.capture(work)
            self.num_bytes += max(0, self._capturer.used_bytes() - used_before)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, TritonError) as error:
            self._wanted.clear()
            rest = f"those of {', '.join(map(str, self.sizes))} are" if self._graphs else "none is"
            logger.warning(
                "a decode step of %d sequences cannot be recorded (%s: %s); %s used, and other steps run "
                "kernel by kernel; --enforce-eager leaves recording out",
                size,
                type(error).__name__,
                error,
                rest,
            )

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step of these runs as a recording."""
        if smallest_that_holds(self._graphs, len(chunks)) is None:
            return False
        if not all(
            one.num_tokens == 1 and one.samples and not one.ahead and not one.adapter for one in chunks
        ):
            return False
        params = [one.sampling for one in chunks]
        if params == self._plain_params:
            return True
        if not all(map(_is_plain, chunks)):
            return False
        # Whether stop tokens are forbidden changes from step to step; all else is the request's for good.
        if not any(one.min_tokens for one in params):
            self._plain_params = params
        return True

    def launch(
        self, chunks: Sequence[Chunk], before: Tensor | None = None, sources: Mapping[int, int] = NO_SOURCES
    ) -> PendingSamples:
        """Put a step that `takes` is true of on the device's queue, without waiting for anything.

        before: tokens that the step before has sampled, int64, on the device. sources: of chunks that
            compute one of these, by index, which one; the others know theirs.
        The samples are the chunks', in order; their tokens are a copy that is nobody else's.
        """
        size = smallest_that_holds(self._graphs, len(chunks))
        assert size is not None
        own = self.buffers.tokens
        if sources and before is not None and before is not self._latest:
            own[: len(before)].copy_(before)
        self.buffers.fill(chunks, size, sources)
        self._graphs[size].replay()
        self._latest = own[: len(chunks)].clone()
        params = [one.sampling for one in chunks]
        on_host, moment = transfers.brought(self._latest), transfers.Moment(own.device)
        return PendingSamples(self._latest, on_host, params, {}, (), None, moment)

    def _step(self, size: int) -> None:
        """The work of a step of so many rows. All that it reads is at the same place each time."""
        own = self.buffers
        token_ids = own.token_ids[:size]
        place_step(
            own.width,
            own.sent_tables,
            own.of("contexts", size),
            own.of("given", size),
            own.of("sources", size),
            own.tokens,
            token_ids,
            own.tables[:size],
            self._block_size,
        )
        hidden = self._model.forward(token_ids, own.of("positions", size), self._cache, own.attention(size))
        logits = self._model.logits(hidden)
        draw(logits, own.draws(size), own.tokens, self._draw_block_size, reads_places=False)


def _is_plain(chunk: Chunk) -> bool:
    return chunk.sampling.num_logprobs is None and not needs_edits(chunk)
