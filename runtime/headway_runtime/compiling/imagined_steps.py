"""The steps of a start, on memory that is not there: only so that their kernels are launched, and noted.

All tensors are PyTorch's "meta" ones, which have shapes, types and addresses, and hold nothing. The model is
the engine's own, of weights that nobody made up; its layers choose their kernels as they would on the GPU,
and are run through the same steps: the largest ones, as they are measured (`profile_step`), and those that
are recorded before the first request (`graphs`). A model that guesses is run as well. Then come steps of
other shapes, which a start on the GPU does not run: whatever requests will ask for is compiled by then.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.compiling.step_shapes import StepLimits, step_shapes
from headway_runtime.config import EngineConfig
from headway_runtime.draws import block_size_of
from headway_runtime.fitted_draft import FittedDraft
from headway_runtime.graphs.graph_memory import UsedBytes
from headway_runtime.graphs.opening import GraphOpener, graph_plan
from headway_runtime.kernels.triton.coded_plain import all_most_product_rows
from headway_runtime.kernels.triton.launch import gpu_of
from headway_runtime.kernels.triton.top_logprobs import top_logprobs
from headway_runtime.model_config import read_model_config
from headway_runtime.model_loading import TORCH_DTYPES, load_model, make_cache, make_inputs, own_share
from headway_runtime.parallel.share import Share
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup
from headway_runtime.profile_step import StepProfile, draft_profile
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.speculator import load_draft

NOWHERE = torch.device("meta")


class ImaginedGraph:
    def replay(self) -> None:
        """Nothing was recorded."""


class ImaginedCapturer:
    """Runs what is to be recorded."""

    def warm(self, work: Any) -> None:
        work()

    def capture(self, work: Any) -> ImaginedGraph:
        return ImaginedGraph()

    def give_back(self) -> None:
        """There is none."""

    def used_bytes(self) -> UsedBytes:
        return UsedBytes(0)


class ImaginedRanks:
    """Other ranks, with whom tensors are exchanged that hold nothing."""

    def allreduce(self, *arguments: Any) -> "ImaginedRanks":
        return self

    allgather = gather = broadcast = allreduce

    def wait(self) -> None:
        """All is there."""

    def abort(self) -> None:
        """Nobody waits."""


@torch.inference_mode()
def launch_steps(config: EngineConfig, share: Share) -> None:
    """share: this rank's of the model. ConfigError or ModelLoadError for what cannot be started either."""
    config = replace(config, load_format="dummy")
    folder = Path(config.model_path)
    model_config = read_model_config(folder)
    vocab_size = model_config.vocab_size
    dtype = TORCH_DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
    group = ALONE if share.size == 1 else TensorGroup(share, ImaginedRanks())
    is_first = share.rank == 0
    plan = graph_plan(config, NOWHERE)
    opener = GraphOpener(ImaginedCapturer(), config, None, vocab_size, dtype, NOWHERE)
    profile = imagined_profile(config, share, group)
    # Where nothing is recorded the first decode would compile what it needs.
    profile.launch(min(plan.model.most_rows, config.envelope.max_num_seqs) or config.envelope.max_num_seqs)
    _launch_others(profile)
    if is_first:
        _launch_logprobs(vocab_size, dtype)
    if is_first and (draft := load_draft(config, dtype, NOWHERE)) is not None:
        guessing = draft_profile(draft, config, vocab_size, dtype, NOWHERE)
        guessing.launch(0)
        _launch_others(guessing)
        fitted = FittedDraft(draft.model, draft.model_config.vocab_size, vocab_size)
        opener.open(fitted, guessing.cache, plan.draft)
    opener.open(profile.model, profile.cache, plan.model, group=group)


def imagined_profile(config: EngineConfig, share: Share, group: TensorGroup = ALONE) -> StepProfile:
    """Of the model that answers. group: of the ranks that share it."""
    config = replace(config, load_format="dummy")
    folder = Path(config.model_path)
    model_config = read_model_config(folder)
    dtype = TORCH_DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
    bank = None if config.lora is None else AdapterBank(config.lora.num_slots, dtype, NOWHERE)
    quantization = choose_quantization(config.quantization, folder)
    model = load_model(folder, model_config, config, quantization, dtype, NOWHERE, group, bank)
    cache = make_cache(model, own_share(model_config, share.size), config, 1, dtype, NOWHERE)
    inputs = make_inputs(model, config, cache, dtype, NOWHERE)
    samples = share.rank == 0
    return StepProfile(model, cache, inputs, config, model_config.vocab_size, NOWHERE, samples=samples)


def _launch_others(profile: StepProfile) -> None:
    """Steps that need other kernels than the largest one."""
    envelope = profile.config.envelope
    limits = StepLimits(
        envelope.max_num_seqs, envelope.max_num_batched_tokens, profile.config.max_model_len - 1
    )
    last_rows = all_most_product_rows(gpu_of(NOWHERE))
    for counts in step_shapes(limits, profile.cache.num_groups, last_rows):
        profile.launch_shape(counts)


def _launch_logprobs(vocab_size: int, dtype: torch.dtype) -> None:
    """Those of some rows of a step, and those of a prompt, which have ranks."""
    logits = torch.empty((2, vocab_size), dtype=dtype, device=NOWHERE)
    tokens = torch.empty(2, dtype=torch.int64, device=NOWHERE)
    rows = torch.empty(1, dtype=torch.int32, device=NOWHERE)
    top_logprobs(logits, rows, tokens, 1, block_size_of(vocab_size))
    top_logprobs(logits, None, tokens, 1, block_size_of(vocab_size), with_ranks=True)
