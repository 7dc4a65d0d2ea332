"""Runs one Batch through the model: tensors in, sampled tokens out. All of torch is below this line.

Owns the model, the KV cache and the step's buffers, and the number of threads. Knows no queue and no
request's state: which tokens to compute, and in which blocks they lie, comes with the Batch.

Of several ranks each has a runner with its share of the model. The first one's is the engine's, and samples
and guesses; methods marked `on_all_ranks` run on all of them.
"""

import logging
from array import array
from dataclasses import replace
from pathlib import Path

import torch

from headway_runtime import cleared_memory, transfers
from headway_runtime.adapters.on_ranks import AdaptersOnRanks, open_adapters
from headway_runtime.compiling.ahead import kernels_ahead
from headway_runtime.config import EngineConfig
from headway_runtime.memory import kept_as, kv_bytes_per_token
from headway_runtime.model_config import read_model_config
from headway_runtime.model_loading import (
    TORCH_DTYPES,
    check_lengths,
    compression_of,
    load_model,
    make_cache,
    make_inputs,
    open_device,
    own_share,
    use_in_this_thread,
)
from headway_runtime.offload.host_blocks import HostBlocks
from headway_runtime.parallel.open_ranks import open_ranks
from headway_runtime.parallel.ranks import Ranks, on_all_ranks
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.quantization.kv_scheme import chosen_kv_cache_dtype
from headway_runtime.runner_steps import StepsOnRanks
from headway_runtime.sampler import make_sampler
from headway_runtime.served_dtype import log_choice, served_dtype
from headway_runtime.speculator import Speculator, load_draft
from headway_runtime.start_memory import StartMemory
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.step_errors import ends_its_step_alone
from headway_runtime.thread_governor import ThreadGovernor, can_tell_waiting
from headway_runtime.token_feed import TokenFeed

logger = logging.getLogger(__name__)


class Runner(AdaptersOnRanks, StepsOnRanks):
    """The model on its device. ConfigError or ModelLoadError while starting."""

    host_blocks: HostBlocks | None = None

    def __init__(self, config: EngineConfig, ranks: Ranks | None = None) -> None:
        """ranks: that share the model; None starts the others, if there are any."""
        self.ranks = open_ranks(config) if ranks is None else ranks
        try:
            self._load(config)
        except BaseException:
            self.close()
            raise

    def _load(self, config: EngineConfig) -> None:
        self.start = StartTimeline()
        folder, ranks = Path(config.model_path), self.ranks
        config = replace(config, kv_cache_dtype=chosen_kv_cache_dtype(config.kv_cache_dtype, folder))
        self._model_config = read_model_config(folder)
        check_lengths(config, self._model_config)
        if ranks.rank == 0 and self._model_config.unknown_fields:
            names = ", ".join(self._model_config.unknown_fields)
            logger.info("config.json has fields that are not known here and were passed over: %s", names)
        self._device = open_device(config, ranks)
        self._block_size = config.block_size
        self._group = ranks.open(self._device)
        own_config = own_share(self._model_config, ranks.size)
        quantization = choose_quantization(config.quantization, folder)
        stored, is_cpu = self._model_config.dtype, config.device == "cpu"
        dtype_name = served_dtype(config.dtype, stored, quantization, is_cpu=is_cpu)
        if ranks.rank == 0:
            log_choice(config.dtype, stored, quantization, is_cpu=is_cpu)
        dtype = TORCH_DTYPES[dtype_name]
        memory = StartMemory(config, self._model_config, self._device, ranks)
        memory.refuse_what_cannot_fit(quantization, dtype_name)
        prefixes = self._model_config.tensor_prefixes
        self._adapters, self._bank = open_adapters(config.lora, prefixes, dtype, self._device)
        self.start.ended("config")
        with kernels_ahead(config, self._device, ranks) as ahead, torch.inference_mode():
            self._model = load_model(
                folder,
                self._model_config,
                config,
                quantization,
                dtype,
                self._device,
                self._group,
                self._bank,
                self.start,
            )
            is_first = ranks.rank == 0
            draft = load_draft(config, dtype, self._device) if is_first else None
            if ahead is not None:
                self.start.ended("ready")
                ahead.wait(self.start)
            # The KV cache takes of what is free once all have loaded.
            ranks.agree(0)
            self.start.ended("ready")
            cleared_memory.give_back()  # before the KV cache takes its share of what is free
            models = [own_config] if draft is None else [own_config, draft.model_config]
            self.kv_dtype = kept_as(config.kv_cache_dtype, dtype_name)
            self.weight_compression = compression_of(self._model)
            self.kept_as = {"dtype": dtype_name, "quantization": quantization.name, "kv_dtype": self.kv_dtype}
            if any(rope.goes_by_length for rope in self._model_config.ropes):
                self.kept_as["max_model_len"] = str(config.max_model_len)
            plan = self._graph_plan(config)
            per_token = [kv_bytes_per_token(one, self.kv_dtype) for one in models]
            budget = memory.budget(
                self._model, own_config, dtype, sum(per_token), per_token[0], plan, self._bank, draft
            )
            self.num_blocks = ranks.agree(budget.num_blocks)
            self._cache = make_cache(self._model, own_config, config, self.num_blocks, dtype, self._device)
            self._inputs = make_inputs(self._model, config, self._cache, dtype, self._device)
            self.host_blocks = None
            if config.offload is not None:
                self.host_blocks = HostBlocks(self._cache.data, memory.host_memory_bytes)
            self._sampler = make_sampler(self.vocab_size, self._device)
            self._feed = TokenFeed()
            self._step_before = None
            self._speculator = None
            if config.speculative is not None and is_first:
                self._speculator = Speculator(
                    config.speculative, draft, config, self.num_blocks, self.vocab_size, dtype, self._device
                )
            self.start.ended("profile")
            self._open_graphs(config, plan, budget.graph_bytes, self.vocab_size, dtype)
            self.start.ended("graphs")
        self._governor = None
        if self._device.type == "cpu" and config.num_threads > 1 and can_tell_waiting():
            self._governor = ThreadGovernor(config.num_threads, torch.set_num_threads)
        ranks.ready()
        logger.info(
            "model %s%s on %s in %s, quantization %s, weight compression %s, %d KV blocks of %d tokens in %s",
            folder.name,
            f" (rank {ranks.rank} of {ranks.size})" if ranks.size > 1 else "",
            self._device,
            dtype_name,
            quantization.name,
            self.weight_compression,
            self.num_blocks,
            config.block_size,
            self.kv_dtype,
        )

    @property
    def proof_reach(self) -> int | None:
        """How many tokens before a sample are sure to have gone into it: those of the least window."""
        windows = [layer.window for layer in self._model.attention_layers if layer.window is not None]
        return min(windows, default=None)

    @property
    def traffic(self) -> Traffic:
        """What the ranks exchange, as this one counts it."""
        return self._group.traffic

    def enter_thread(self) -> None:
        """Be used by the calling thread from here on, which need not be the one that made this."""
        use_in_this_thread(self._device)

    def close(self) -> None:
        """End the other ranks, if this is the first of several. Nothing may be computed afterwards."""
        if self.host_blocks is not None:
            self.host_blocks.close(can_wait=self.ranks.is_usable)
        self.ranks.close()

    @ends_its_step_alone
    @on_all_ranks
    @torch.inference_mode()
    def clear_blocks(self, blocks: "array[int]") -> None:
        """Zero blocks whose contents must not be met again, not even behind a mask."""
        index = transfers.sent_integers(blocks, self._device)
        self._cache.clear(index)
        if self._speculator is not None:
            self._speculator.clear_blocks(index)

    @ends_its_step_alone
    @on_all_ranks
    @torch.inference_mode()
    def copy_blocks(self, stores: list[tuple[int, int]], loads: list[tuple[int, int]]) -> tuple[float, float]:
        """Copy blocks to slots of host memory, pairs of both, and then slots to blocks; seconds that took."""
        assert self.host_blocks is not None, "no memory was set aside"
        if self._speculator is not None and loads:
            self._speculator.loaded([block for _, block in loads])
        return self.host_blocks.copy(stores, loads)

    def is_usable(self) -> bool:
        """Whether the device still computes after an error, and other ranks do what this one does."""
        if not self.ranks.is_usable:
            return False
        try:
            return bool((torch.ones(2, device=self._device).sum() == 2).item())
        except RuntimeError:
            return False
