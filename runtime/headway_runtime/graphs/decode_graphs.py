"""Steps of a model as recorded work: everything from tokens to tokens, or to logits.

    place_step -> embedding, decoder layers -> norm, head -> draw, which leaves tokens where the next step
                                                 |           finds them
                                                 +-> copy, which leaves logits where sampling finds them

What runs so: steps in which every sequence computes its last known token, and perhaps guesses behind it.
Where all want the next one by temperature and filters alone, the draw is part of the recording. Else it ends
in logits, and what edits them, draws, and finds log-probabilities runs kernel by kernel behind it. Prompts
and adapters run kernel by kernel altogether, as all steps do where there are no recordings. The kernels are
the same either way; rows of nobody may have products choose the form for more rows, whose sums are rounded in
another order.

Some forms are recorded at the start, the others by and by while there is nothing else to do, and between two
steps when many have lacked one (`misses.py`). A step takes the smallest one there is that holds it. If
recording fails, that is said once, and what there is, is used. If it fails for want of memory, of which other
forms may need less, it is tried once more with all that can be had, and then that form alone is left out.

Of several ranks each records its share, sums over ranks included, and all have the same recordings: they
agree on each. The first one says which one a step takes, draws, and has its tokens sent to the others.
"""

import logging
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from headway_runtime.graphs.forms import FormPlan, StepForm
from headway_runtime.graphs.graph_memory import GraphMemory
from headway_runtime.graphs.misses import FormMisses
from headway_runtime.graphs.sizes import smallest_that_holds
from headway_runtime.graphs.step_buffers import Placed, StepBuffers
from headway_runtime.kernels.triton.draw import draw
from headway_runtime.kernels.triton.place_step import place_step
from headway_runtime.layers.attention import KVCache
from headway_runtime.logit_edits import needs_edits
from headway_runtime.models.model import Model
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.request import SamplingParams

logger = logging.getLogger(__name__)

NO_SOURCES: Mapping[int, int] = MappingProxyType({})
# What a step may raise for which nothing is wrong but that it cannot be recorded; OSError of kernels' folder.
RECORDING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError, TritonError)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """traffic: what ranks exchange in it."""

    graph: Graph
    traffic: Traffic


class DecodeGraphs:
    """One model's. Its KV cache, and all weights, stay where they are from here on."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        capturer: Capturer,
        plan: FormPlan,
        memory: GraphMemory,
        *,
        most_sampled: int,
        max_model_len: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_unread: int = 2,
        group: TensorGroup = ALONE,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """most_sampled: tokens of any step. dtype: of logits. most_unread: steps that are launched before the
        first of them is waited for. group: of the ranks that share the model.

        all_agree: whether all of them say yes; each asks it.
        """
        block_size = cache.shape.block_size
        self._model, self._cache, self._capturer, self._memory = model, cache, capturer, memory
        self._group, self._all_agree = group, all_agree
        self._block_size, self._draw_block_size = block_size, block_size_of(vocab_size)
        self.buffers = StepBuffers(
            plan.most_rows,
            most_sampled,
            -(-max_model_len // block_size),
            block_size,
            cache.num_groups,
            vocab_size,
            most_unread,
            device,
        )
        can_have_several = self.buffers.most_queries > 1
        first, later = (
            [form for form in forms if can_have_several or not form.has_several]
            for forms in (plan.first, plan.later)
        )
        self._wanted, self._num_first = [*first, *later], len(first)
        self._misses = FormMisses()
        self._graphs: dict[StepForm, _Recorded] = {}
        # Of each kind, by what it has of a form beside rows: their numbers, ascending.
        self._sizes: dict[tuple[bool, bool], list[int]] = {}
        # One for all forms, outside of what recordings share: the next step may be another one.
        self._logits: Tensor | None = None
        if self.is_first and plan.most_logit_rows:
            shape = (plan.most_logit_rows, vocab_size)
            self._logits = torch.empty(shape, dtype=dtype, device=device)
            memory.num_bytes += self._logits.nbytes
        # Of the latest batch of which all rows were looked at, if its requests will stay what they are.
        self._plain_params: list[SamplingParams] = []
        # A copy of what stands in `buffers.tokens`.
        self._latest: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank chooses tokens."""
        return self._group.share.rank == 0

    @property
    def forms(self) -> frozenset[StepForm]:
        """Those recorded so far."""
        return frozenset(self._graphs)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be recorded."""
        return not self._wanted

    @property
    def next_form(self) -> StepForm:
        """What is recorded next while idle. Only while something is left."""
        return self._wanted[0]

    @property
    def missed_form(self) -> StepForm | None:
        """What is to be recorded though there are steps to do, as many of them have lacked it."""
        return self._misses.due

    def capture_first(self) -> None:
        """Record the forms that the start waits for."""
        for _ in range(self._num_first):
            if self._wanted:
                self.capture(self.next_form)
        if self._graphs:
            logger.info(
                "steps of %s are recorded, %.0f MB; %d more follow while idle, or as steps lack them",
                self._told_forms(),
                self._memory.num_bytes / 1e6,
                len(self._wanted),
            )

    @torch.inference_mode()
    def capture(self, form: StepForm) -> None:
        """Record one that is left. No step may run; one that has not been read keeps its tokens, of which
        `tokens` and `samples` are copies."""
        self._wanted.remove(form)
        self._misses.forget(form)
        if not self._all_agree(not self._memory.is_full):
            logger.info(
                "recorded steps take %d bytes of the %s set aside; %d are left out, the first of %s",
                self._memory.num_bytes,
                self._memory.limit_bytes,
                1 + len(self._wanted),
                form.told,
            )
            self._give_up()
            return
        self._latest = None
        for has_tried in (False, True):
            if has_tried:
                self._capturer.give_back()
            error = self._captured(form)
            if self._all_agree(error is None):
                insort(self._sizes.setdefault((form.has_several, form.draws), []), form.num_rows)
                return
            self._graphs.pop(form, None)
            if not self._all_agree(_is_short_of_memory(error)):
                self._give_up()
                break
        logger.warning(
            "a decode step of %s cannot be recorded (%s); %s used, and other steps run kernel by kernel; "
            "--enforce-eager leaves recording out",
            form.told,
            "another rank says why" if error is None else f"{type(error).__name__}: {error}",
            f"those of {self._told_forms()} are" if self._graphs else "none is",
        )

    def form_for(self, chunks: Sequence[Chunk]) -> StepForm | None:
        """The recording that a step of these runs as; None where there is none."""
        num_rows, most = 0, 0
        for one in chunks:
            count = one.num_tokens
            if count != 1 + len(one.ahead) or not one.samples or one.adapter:
                return None
            num_rows += count
            most = max(most, count)
        return self.smallest(num_rows, most, draws=self._are_plain(chunks))

    def smallest(self, num_rows: int, most_queries: int, *, draws: bool) -> StepForm | None:
        """The recording for so many rows. most_queries: of a sequence."""
        if most_queries > self.buffers.most_queries:
            return None
        has_several = most_queries > 1
        size = smallest_that_holds(self._sizes.get((has_several, draws), ()), num_rows)
        found = None if size is None else StepForm(size, has_several, draws)
        if self._wanted:
            self._misses.look(self._wanted, found, StepForm(num_rows, has_several, draws))
        return found

    def replay(
        self,
        chunks: Sequence[Placed],
        form: StepForm,
        before: Tensor | None = None,
        sources: Mapping[int, int] = NO_SOURCES,
        params: list[SamplingParams] | None = None,
    ) -> None:
        """Put a step on the device's queue, without waiting for anything. On all ranks.

        before: tokens that the step before has sampled, int64, on the device; on other ranks than the first
            as many of any. sources: of rows that compute one of these, which one; the others know theirs.
        params: of each row, where this rank draws.
        """
        own = self.buffers.tokens
        if sources and before is not None and before is not self._latest:
            own[: len(before)].copy_(self._group.from_first(before))
        self.buffers.fill(chunks, form, sources, params)
        recorded = self._graphs[form]
        recorded.graph.replay()
        self._group.traffic.add(recorded.traffic)
        if form.draws:
            self._latest = own[: sum(one.num_tokens for one in chunks)].clone()

    @property
    def tokens(self) -> Tensor:
        """What the latest step that draws has drawn after each of its rows: a copy that is nobody else's."""
        assert self._latest is not None
        return self._latest

    def logits(self, num_rows: int) -> Tensor:
        """What the latest step that does not draw has left, until the next one."""
        assert self._logits is not None
        return self._logits[:num_rows]

    def samples(self, params: list[SamplingParams]) -> PendingSamples:
        """What the latest step draws, row by row."""
        tokens = self.tokens
        on_host, moment = transfers.brought(tokens), transfers.Moment(tokens.device)
        return PendingSamples(tokens, on_host, params, {}, (), None, moment)

    def _give_up(self) -> None:
        """Nothing more is recorded."""
        for form in self._wanted:
            self._misses.forget(form)
        self._wanted.clear()

    def _captured(self, form: StepForm) -> Exception | None:
        """What it failed for, without its frames, which hold memory."""
        work = partial(self._step, form)
        # Nobody's rows alone, so that warming up changes no sequence's KV.
        self.buffers.fill((), form, NO_SOURCES, [])
        try:
            self._capturer.warm(work)
        except RECORDING_ERRORS as error:
            if self._group.size > 1:
                raise  # the other ranks wait for this one's numbers, as in any step
            return error.with_traceback(None)
        used_before, exchanged_before = self._capturer.used_bytes(), self._group.traffic.snapshot()
        try:
            graph = self._capturer.capture(work)
        except RECORDING_ERRORS as error:
            return error.with_traceback(None)
        finally:
            exchanged = self._group.traffic.set_back(exchanged_before)
        self._graphs[form] = _Recorded(graph, exchanged)
        self._memory.recorded(used_before, self._capturer.used_bytes())
        return None

    def _step(self, form: StepForm) -> None:
        """The work of a step. All that it reads is at the same place each time."""
        own, size = self.buffers, form.num_rows
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
        hidden = self._model.forward(token_ids, own.of("positions", size), self._cache, own.attention(form))
        logits = self._model.logits(hidden)
        if form.draws:
            if self.is_first:
                draw(logits, own.draws(size), own.tokens, self._draw_block_size, reads_places=False)
            self._group.from_first(own.tokens[:size])
        elif self._logits is not None:
            self._logits[:size].copy_(logits)

    def _are_plain(self, chunks: Sequence[Chunk]) -> bool:
        """Whether all tokens are chosen by temperature and filters alone."""
        params = [one.sampling for one in chunks]
        if params == self._plain_params:
            return True
        if not all(map(_is_plain, chunks)):
            return False
        # Whether stop tokens are forbidden changes from step to step; all else is the request's for good.
        if not any(one.min_tokens for one in params):
            self._plain_params = params
        return True

    def _told_forms(self) -> str:
        return ", ".join(form.told for form in sorted(self._graphs, key=lambda form: -form.num_rows))


def _is_short_of_memory(error: Exception | None) -> bool:
    """Or nothing is wrong here: with whatever else it is, another try would end alike."""
    return error is None or isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _is_plain(chunk: Chunk) -> bool:
    if chunk.sampling.num_logprobs is not None:
        return False
    # Of a chunk with guesses, the first sample is the one of fewest generated tokens.
    earliest = replace(chunk, num_generated=chunk.num_generated - len(chunk.ahead)) if chunk.ahead else chunk
    return not needs_edits(earliest)
