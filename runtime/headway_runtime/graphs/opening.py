"""Whether an engine's steps are recorded, in which forms, by what, and what memory is set aside for that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headway_runtime.config import EngineConfig
from headway_runtime.graphs.capture import Capturer, CudaCapturer
from headway_runtime.graphs.forms import NOTHING, FormPlan, draft_forms, model_forms
from headway_runtime.graphs.graph_memory import GraphMemory
from headway_runtime.layers.attention import KVCache
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.models.model import Model
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs

# Of each recording, beside the memory that all share: what the driver keeps of its kernels' launches.
BYTES_PER_GRAPH = 8 << 20
# Of all together: what cuBLAS takes for the stream that is recorded (32 MiB on Hopper), and what PyTorch
# rounds up in pieces of 20 MiB.
BYTES_OF_POOL = 128 << 20


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """model: of the model that answers. draft: of the one that guesses."""

    model: FormPlan = NOTHING
    draft: FormPlan = NOTHING

    def reserved_bytes(self, step_bytes: int, num_rows: int, bytes_per_logits: int) -> int:
        """Memory set aside for all recordings. step_bytes: what a step of `num_rows` takes at most; larger
        ones take more in proportion.

        bytes_per_logits: of one row. Those that are left for sampling lie outside of what recordings share.
        """
        num_graphs = len(self.model.forms) + len(self.draft.forms)
        if not num_graphs:
            return 0
        step_bytes = -(-step_bytes * max(num_rows, self.model.most_rows) // num_rows)
        logits_bytes = self.model.most_logit_rows * bytes_per_logits
        return BYTES_OF_POOL + step_bytes + num_graphs * BYTES_PER_GRAPH + logits_bytes


def make_capturer(device: torch.device) -> Capturer | None:
    """None for a device that records nothing."""
    return CudaCapturer(device) if device.type == "cuda" else None


def graph_plan(config: EngineConfig, device: torch.device) -> GraphPlan:
    """Empty where steps run kernel by kernel."""
    if config.enforce_eager or not uses_triton(device):
        return GraphPlan()
    has_draft = config.speculative is not None and config.speculative.model_path is not None
    return GraphPlan(model_forms(config), draft_forms(config) if has_draft else NOTHING)


class GraphOpener:
    """Makes the recordings of one engine's models, which share their memory, and its limit."""

    def __init__(
        self,
        capturer: Capturer,
        config: EngineConfig,
        limit_bytes: int | None,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.memory = GraphMemory(limit_bytes)
        self._capturer, self._config = capturer, config
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device

    def open(
        self,
        model: Model,
        cache: KVCache,
        plan: FormPlan,
        *,
        most_unread: int = 2,
        group: TensorGroup = ALONE,
        all_agree: Callable[[bool], bool] = bool,
    ) -> "DecodeGraphs | None":
        """With the first forms recorded; None for an empty plan. All ranks of the group do the same.

        most_unread, group, all_agree: see `DecodeGraphs`.
        """
        if not plan.forms:
            return None
        from headway_runtime.graphs.decode_graphs import DecodeGraphs  # imports Triton

        envelope = self._config.envelope
        graphs = DecodeGraphs(
            model,
            cache,
            self._capturer,
            plan,
            self.memory,
            most_sampled=envelope.max_num_seqs * (1 + envelope.num_speculative_tokens),
            max_model_len=self._config.max_model_len,
            vocab_size=self._vocab_size,
            dtype=self._dtype,
            device=self._device,
            most_unread=most_unread,
            group=group,
            all_agree=all_agree,
        )
        graphs.capture_first()
        return graphs


def make_opener(
    plan: GraphPlan,
    config: EngineConfig,
    limit_bytes: int | None,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> GraphOpener | None:
    """None where nothing is recorded."""
    capturer = make_capturer(device) if plan.model.forms or plan.draft.forms else None
    return None if capturer is None else GraphOpener(capturer, config, limit_bytes, vocab_size, dtype, device)
