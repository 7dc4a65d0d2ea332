"""What a runner does with recorded steps but for running them: makes them, on all ranks alike."""

from typing import TYPE_CHECKING

import torch

from headway_runtime import transfers
from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.config import EngineConfig
from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.opening import GraphOpener, GraphPlan, graph_plan, make_opener
from headway_runtime.layers.attention import KVCache
from headway_runtime.models.model import Model
from headway_runtime.parallel.ranks import Ranks, on_all_ranks
from headway_runtime.parallel.tensor_group import TensorGroup
from headway_runtime.speculator import Speculator

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs


class GraphsOnRanks:
    """The part of a runner that has `_graphs`, of its own model, and those of its draft model."""

    ranks: Ranks
    _graphs: "DecodeGraphs | None"
    _opener: GraphOpener | None
    _model: Model
    _cache: KVCache
    _group: TensorGroup
    _bank: AdapterBank | None
    _speculator: Speculator | None
    _device: torch.device

    @property
    def graphs(self) -> "DecodeGraphs | None":
        """Recorded steps; None where steps run kernel by kernel."""
        return self._graphs

    @property
    def graph_bytes(self) -> int:
        """Memory of all recorded steps."""
        return 0 if self._opener is None else self._opener.memory.num_bytes

    @property
    def has_more_to_record(self) -> bool:
        """Whether `record_next` would do something."""
        return any(one is not None and not one.is_complete for one in (self._graphs, self._draft_graphs))

    def record_next(self) -> None:
        """Record one more form of steps, while there is nothing else to do."""
        graphs, draft = self._graphs, self._draft_graphs
        if graphs is not None and not graphs.is_complete:
            self._record(graphs.next_form)
        elif draft is not None and not draft.is_complete:
            draft.capture(draft.next_form)

    @property
    def lacks_a_form(self) -> bool:
        """Whether many steps have lacked one that is not recorded yet."""
        return any(
            one is not None and one.missed_form is not None for one in (self._graphs, self._draft_graphs)
        )

    def record_missed(self) -> None:
        """Record that one, between two steps; the one before may be unread, and is waited for."""
        graphs, draft = self._graphs, self._draft_graphs
        if graphs is not None and graphs.missed_form is not None:
            self._record(graphs.missed_form)
        elif draft is not None and draft.missed_form is not None:
            with self.ranks.waiting():
                transfers.Moment(self._device).wait()
            draft.capture(draft.missed_form)

    @on_all_ranks
    def _record(self, form: StepForm) -> None:
        assert self._graphs is not None, "ranks agree on what is recorded"
        transfers.Moment(self._device).wait()
        if self._bank is not None:
            self._bank.rows = None  # recorded steps are without adapters
        self._graphs.capture(form)

    @property
    def _draft_graphs(self) -> "DecodeGraphs | None":
        return None if self._speculator is None else self._speculator.graphs

    def _graph_plan(self, config: EngineConfig) -> GraphPlan:
        """Of all ranks, or of none: one of another node may have been told otherwise."""
        plan = graph_plan(config, self._device)
        return plan if self._all_agree(bool(plan.model.forms)) else GraphPlan()

    def _open_graphs(
        self,
        config: EngineConfig,
        plan: GraphPlan,
        limit_bytes: int | None,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._graphs = None
        opener = self._opener = make_opener(plan, config, limit_bytes, vocab_size, dtype, self._device)
        if opener is None:
            return
        self._graphs = opener.open(
            self._model, self._cache, plan.model, group=self._group, all_agree=self._all_agree
        )
        if self._speculator is not None:
            # Its passes for all guesses of a step are launched before the first is waited for.
            num_passes = max(2, config.envelope.num_speculative_tokens)
            self._speculator.open_graphs(
                lambda model, cache: opener.open(model, cache, plan.draft, most_unread=num_passes)
            )

    def _all_agree(self, own: bool) -> bool:  # noqa: FBT001 - a word of this rank
        return bool(self.ranks.agree(int(own)))
