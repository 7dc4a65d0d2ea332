"""The steps of a start, on memory that is not there: only so that their kernels are launched, and noted.

All tensors are PyTorch's "meta" ones, which have shapes, types and addresses, and hold nothing. The model is
the engine's own, of weights that nobody made up; its layers choose their kernels as they would on the GPU,
and are run through the same steps: the largest ones, as they are measured (`profile_step`), and those that
are recorded before the first request (`graphs`). A model that guesses is run as well.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.config import EngineConfig
from headway_runtime.graphs.opening import GraphOpener, graph_plan
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

    def used_bytes(self) -> int:
        return 0


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
    dtype = TORCH_DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
    group = ALONE if share.size == 1 else TensorGroup(share, ImaginedRanks())
    bank = None if config.lora is None else AdapterBank(config.lora.num_slots, dtype, NOWHERE)
    quantization = choose_quantization(config.quantization, folder)
    model = load_model(folder, model_config, config, quantization, dtype, NOWHERE, group, bank)
    own_config = own_share(model_config, share.size)
    cache = make_cache(model, own_config, config, 1, dtype, NOWHERE)
    inputs = make_inputs(model, config, cache, dtype, NOWHERE)
    is_first = share.rank == 0
    plan = graph_plan(config, NOWHERE)
    profile = StepProfile(model, cache, inputs, config, model_config.vocab_size, NOWHERE, samples=is_first)
    # Where nothing is recorded the first decode would compile what it needs.
    profile.launch(min(plan.model.most_rows, config.envelope.max_num_seqs) or config.envelope.max_num_seqs)
    if is_first and (draft := load_draft(config, dtype, NOWHERE)) is not None:
        draft_profile(draft, config, model_config.vocab_size, dtype, NOWHERE).launch(0)
    opener = GraphOpener(ImaginedCapturer(), config, None, model_config.vocab_size, dtype, NOWHERE)
    opener.open(model, cache, plan.model, group=group)
