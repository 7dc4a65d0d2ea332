"""An engine's memory while it starts: what cannot fit is refused, what is left becomes its KV cache."""

import torch

from headway_runtime import cleared_memory
from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.admission import refuse_what_cannot_fit
from headway_runtime.graphs.opening import GraphPlan
from headway_runtime.kv_budget import (
    KVBudget,
    adapters_bytes,
    cpu_budget,
    cuda_budget,
    free_bytes_for,
    host_memory_bytes,
    measured_steps,
)
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.memory import staging_bytes
from headway_runtime.model_config import ModelConfig, StoredDtype
from headway_runtime.models.model import Model
from headway_runtime.parallel.ranks import Ranks
from headway_runtime.quantization.choice import Quantization
from headway_runtime.speculator import LoadedDraft


class StartMemory:
    """Of one rank. ConfigError for more host memory than there is.

    host_memory_bytes: set aside for blocks that the KV cache has no room for.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, device: torch.device, ranks: Ranks
    ) -> None:
        """model_config: of the whole model."""
        self._config, self._model_config, self._device, self._ranks = config, model_config, device, ranks
        self.host_memory_bytes = host_memory_bytes(config, ranks)
        # What the largest step needs, by the arithmetic.
        self._step_bytes = 0

    def refuse_what_cannot_fit(self, quantization: Quantization, dtype: StoredDtype) -> None:
        """Before minutes are spent on loading it."""
        try:
            free_bytes = self._free_bytes() + cleared_memory.num_cleared()
        except ConfigError:
            return  # what a machine does not tell is asked for once it is needed
        fit = refuse_what_cannot_fit(
            self._config,
            self._model_config,
            quantization,
            dtype,
            free_bytes,
            num_multiprocessors=_num_multiprocessors(self._device),
        )
        self._step_bytes = fit.step.total

    def budget(
        self,
        model: Model,
        own_config: ModelConfig,
        dtype: torch.dtype,
        bytes_per_token: int,
        own_bytes_per_token: int,
        plan: GraphPlan,
        bank: AdapterBank | None,
        draft: LoadedDraft | None,
    ) -> KVBudget:
        """Of what is free now that all weights are loaded. own_config: of this rank's share.

        bytes_per_token: of its KV, the draft's included. own_bytes_per_token: without, as is offloaded.
        plan: of steps to be recorded. draft: the model that guesses, if there is one.
        """
        config, device = self._config, self._device
        adapters = adapters_bytes(config, bank)
        if device.type == "cuda":
            vocab_size = self._model_config.vocab_size
            num_recorded_rows = min(plan.model.most_rows, config.envelope.max_num_seqs)
            step = measured_steps(
                model,
                own_config,
                config,
                vocab_size,
                dtype,
                device,
                samples=self._ranks.rank == 0,
                num_recorded_rows=num_recorded_rows,
                draft=draft,
            )
            graphs = plan.reserved_bytes(step.decodes, num_recorded_rows, vocab_size * dtype.itemsize)
            staging = 0 if config.offload is None else staging_bytes(config.block_size * own_bytes_per_token)
            return cuda_budget(config, bytes_per_token, step, graphs, adapters, staging, device)
        free_bytes: int | None = None
        try:
            free_bytes = self._free_bytes()
        except ConfigError:
            if config.kv_cache_memory_bytes is None:
                raise
        return cpu_budget(config, bytes_per_token, free_bytes, adapters, self._step_bytes)

    def _free_bytes(self) -> int:
        """ConfigError on a machine that does not tell."""
        return free_bytes_for(self._device, self._ranks, self.host_memory_bytes)


def _num_multiprocessors(device: torch.device) -> int:
    """Of a GPU on which Triton's kernels run, which decides what attention takes; else 0."""
    if device.type != "cuda" or not uses_triton(device):
        return 0
    from headway_runtime.kernels.triton.launch import gpu_of

    return gpu_of(device).num_multiprocessors
