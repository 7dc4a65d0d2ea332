"""Runs one Batch through the model: tensors in, sampled tokens out. All of torch is below this line.

Owns the model, the KV cache and the step's buffers, and the number of threads. Knows no queue and no
request's state: which tokens to compute, and in which blocks they lie, comes with the Batch.

Of several ranks each has a runner with its share of the model. The first one's is the engine's, and samples
and guesses; methods marked `on_all_ranks` run on all of them.
"""

import logging
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway_runtime import cleared_memory, transfers
from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.adapters.adapter import AdapterFacts
from headway_runtime.adapters.adapter_rows import rows_of
from headway_runtime.adapters.loading import AdapterLoading
from headway_runtime.batch import Batch, Sample, StepResult, Verified
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.admission import refuse_what_cannot_fit
from headway_runtime.graphs.opening import graph_sizes, open_graphs
from headway_runtime.kv_budget import (
    KVBudget,
    adapters_bytes,
    cpu_budget,
    cuda_budget,
    free_bytes_for,
    measured_steps,
)
from headway_runtime.logprobs import prompt_logprobs
from headway_runtime.memory import free_memory_bytes, kept_as, kv_bytes_per_token
from headway_runtime.model_config import ModelConfig, StoredDtype, read_model_config
from headway_runtime.model_loading import (
    TORCH_DTYPES,
    check_lengths,
    load_model,
    make_cache,
    make_inputs,
    open_device,
    own_share,
)
from headway_runtime.offload.host_blocks import HostBlocks
from headway_runtime.parallel.open_ranks import open_ranks
from headway_runtime.parallel.ranks import Ranks, on_all_ranks
from headway_runtime.parallel.step_batch import StepBatch, step_batch
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.pending_step import AskedLogprobs, PendingSamples, PendingStep
from headway_runtime.quantization.choice import Quantization, choose_quantization
from headway_runtime.sampler import make_sampler
from headway_runtime.speculator import Speculator, load_draft
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.step_inputs import StepInputs
from headway_runtime.thread_governor import ThreadGovernor, can_tell_waiting
from headway_runtime.token_feed import TokenFeed
from headway_runtime.verification import sampled_rows, verified, with_drafts

if TYPE_CHECKING:
    from headway_runtime.graphs.decode_graphs import DecodeGraphs

logger = logging.getLogger(__name__)


def _compacted(runner: "Runner", batch: Batch) -> tuple[StepBatch]:
    return (step_batch(batch, runner._block_size, runner._feed.sources(batch.chunks)),)


class Runner:
    """The model on its device. ConfigError or ModelLoadError while starting."""

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
        self._model_config = read_model_config(folder)
        check_lengths(config, self._model_config)
        self._device = open_device(config, ranks)
        self._block_size = config.block_size
        self._group = ranks.open(self._device)
        own_config = own_share(self._model_config, ranks.size)
        dtype_name = self._model_config.dtype if config.dtype == "auto" else config.dtype
        dtype = TORCH_DTYPES[dtype_name]
        quantization = choose_quantization(config.quantization, folder)
        self._host_memory_bytes = _host_memory_bytes(config, ranks)
        self._refuse_what_cannot_fit(config, quantization, dtype_name)
        self._adapters, self._bank = self._adapters_of(config, dtype)
        self.start.ended("config")
        with torch.inference_mode():
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
            # The KV cache takes of what is free once all have loaded.
            ranks.agree(0)
            self.start.ended("ready")
            cleared_memory.give_back()  # before the KV cache takes its share of what is free
            models = [own_config] if draft is None else [own_config, draft.model_config]
            self.kv_dtype = kept_as(config.kv_cache_dtype, dtype_name)
            self.kept_as = {"dtype": dtype_name, "quantization": quantization.name, "kv_dtype": self.kv_dtype}
            if any(rope.goes_by_length for rope in self._model_config.ropes):
                self.kept_as["max_model_len"] = str(config.max_model_len)
            sizes = graph_sizes(config, self._device, ranks.size)
            bytes_per_token = sum(kv_bytes_per_token(one, self.kv_dtype) for one in models)
            budget = self._budget(config, own_config, dtype, bytes_per_token, sizes)
            self.num_blocks = ranks.agree(budget.num_blocks)
            self._cache = make_cache(self._model, own_config, config, self.num_blocks, dtype, self._device)
            self._inputs = make_inputs(self._model, config, self._cache, dtype, self._device)
            self.host_blocks: HostBlocks | None = None
            if config.offload is not None:
                self.host_blocks = HostBlocks(self._cache.data, self._host_memory_bytes)
            self._sampler = make_sampler(self.vocab_size, self._device)
            self._feed = TokenFeed()
            self._step_before: transfers.Moment | None = None
            self._speculator: Speculator | None = None
            if config.speculative is not None and is_first:
                self._speculator = Speculator(
                    config.speculative, draft, config, self.num_blocks, self.vocab_size, dtype, self._device
                )
            self.start.ended("profile")
            self._graphs = open_graphs(
                self._model, self._cache, config, sizes, self.vocab_size, budget.graph_bytes, self._device
            )
            self.start.ended("graphs")
        self._governor: ThreadGovernor | None = None
        if self._device.type == "cpu" and config.num_threads > 1 and can_tell_waiting():
            self._governor = ThreadGovernor(config.num_threads, torch.set_num_threads)
        ranks.ready()
        logger.info(
            "model %s%s on %s in %s, quantization %s, %d KV blocks of %d tokens in %s",
            folder.name,
            f" (rank {ranks.rank} of {ranks.size})" if ranks.size > 1 else "",
            self._device,
            dtype_name,
            quantization.name,
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
    def vocab_size(self) -> int:
        return self._model_config.vocab_size

    @property
    def graphs(self) -> "DecodeGraphs | None":
        """Recorded decode steps; None where steps run kernel by kernel."""
        return self._graphs

    def record_next(self) -> None:
        """Record one more size of decode steps. No step may be under way."""
        assert self._graphs is not None
        if self._bank is not None:
            self._bank.rows = None  # recorded steps are without adapters
        self._graphs.capture_next()

    @property
    def traffic(self) -> Traffic:
        """What the ranks exchange, as this one counts it."""
        return self._group.traffic

    def execute(self, batch: Batch) -> StepResult:
        """Compute all chunks, and a sample after each one that reaches its last known token."""
        return self.read(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Begin to; on a GPU without waiting for anything, but for guesses.

        One step before it may still be unread: chunks may end in its samples, which are UNREAD.
        """
        started_at = time.monotonic()
        if self._speculator is not None:
            batch = with_drafts(batch, self._speculator.propose(batch))
        if self._graphs is not None and self._graphs.takes(batch.chunks):
            return self._launch_recorded(self._graphs, batch, started_at)
        inputs, logits = self._compute(batch)
        samples: PendingSamples | None = None
        moment: transfers.Moment | None = None
        if logits is not None:
            chunks = [batch.chunks[index] for index in inputs.sampled]
            if any(chunk.ahead for chunk in chunks):
                own = dict.fromkeys(inputs.sampled)
                chunks = [row for index in own for row in sampled_rows(batch.chunks[index])]
            samples = self._sampler.launch(logits, chunks)
            self._feed.keep(chunks, samples.tokens)
        else:
            self._feed.keep((), None)
            moment = transfers.Moment(self._device)
        if self._speculator is not None:
            self._speculator.computed(batch)
        asked = _asked_logprobs(batch, inputs.order)
        return PendingStep(batch, inputs.sampled, samples, moment, asked, time.monotonic() - started_at)

    def _launch_recorded(self, graphs: "DecodeGraphs", batch: Batch, started_at: float) -> PendingStep:
        """The same of a step that `graphs` takes: one token of each sequence, and a sample after it."""
        chunks = batch.chunks
        samples = graphs.launch(chunks, self._feed.tokens, self._feed.sources(chunks))
        self._feed.keep(chunks, samples.tokens)
        if self._speculator is not None:
            self._speculator.computed(batch)
        return PendingStep(batch, range(len(chunks)), samples, None, (), time.monotonic() - started_at)

    @torch.inference_mode()
    def read(self, pending: PendingStep) -> StepResult:
        """Wait for a step, the first of those that were launched. One with prompts' log-probabilities must be
        read before the next is launched."""
        began_at = time.monotonic()
        batch = pending.batch
        samples: list[Sample | None] = [None] * len(batch.chunks)
        checked: dict[int, Verified] = {}
        if pending.samples is not None:
            after: dict[int, list[Sample]] = {}
            for index, sample in zip(pending.sampled, pending.samples.read(), strict=True):
                if batch.chunks[index].ahead:
                    after.setdefault(index, []).append(sample)
                else:
                    samples[index] = sample
            for index, own in after.items():
                samples[index] = own[0]
                checked[index] = verified(batch.chunks[index].ahead, own)
        elif pending.moment is not None:
            # Without samples, too: the step after the next one writes into the memory that this one is sent
            # from.
            pending.moment.wait()
        of_prompts = {
            one.index: prompt_logprobs(
                one.row, self._logits_of_rows, self.vocab_size, list(one.token_ids), one.num_top
            )
            for one in pending.asked
        }
        speculator = self._speculator
        if speculator is None:
            result = StepResult(tuple(samples), of_prompts)
        else:
            speculator.accepted(batch, checked)
            result = StepResult(
                tuple(samples),
                of_prompts,
                checked,
                speculator.seconds,
                speculator.num_passes,
                speculator.pass_seconds,
            )
        if self._governor is not None:
            self._governor.after_step(pending.seconds + time.monotonic() - began_at)
        return result

    @on_all_ranks(told=_compacted)
    @torch.inference_mode()
    def _compute(self, batch: Batch | StepBatch) -> tuple[StepInputs, torch.Tensor | None]:
        """Compute all chunks; logits where tokens are to be sampled, if they are anywhere."""
        began_at = time.monotonic()
        sources = batch.sources if isinstance(batch, StepBatch) else self._feed.sources(batch.chunks)
        inputs = self._inputs.build(batch, sources)
        self._feed.fill(inputs.token_ids, inputs.fed, self._group)
        hidden = self._forward(batch, inputs)
        self._hidden = hidden
        logits: torch.Tensor | None = None
        if inputs.sampled:
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))[: len(inputs.sampled)]
        if self.ranks.rank > 0:
            # The first rank samples.
            self._feed.expect(len(inputs.sampled), self._device)
            self._end_step(began_at)
        return inputs, logits

    @on_all_ranks
    @torch.inference_mode()
    def _logits_of_rows(self, first: int, last: int) -> torch.Tensor:
        """Logits after some rows of what was computed last."""
        return self._model.logits(self._hidden[first:last])

    @on_all_ranks(told=_compacted)
    @torch.inference_mode()
    def all_logits(self, batch: Batch | StepBatch) -> torch.Tensor:
        """Logits [tokens, vocab_size] after each token of a batch's only chunk; no token is sampled."""
        began_at = time.monotonic()
        (chunk,) = batch.chunks
        inputs = self._inputs.build(batch)
        hidden = self._forward(batch, inputs)
        logits = self._model.logits(hidden[: chunk.num_tokens])
        if self.ranks.rank > 0:
            self._end_step(began_at)
        return logits

    def _end_step(self, began_at: float) -> None:
        """On ranks that sample nothing, so read no step: the next one reuses memory of the last but one."""
        moment = transfers.Moment(self._device)
        if self._step_before is not None:
            self._step_before.wait()
        self._step_before = moment
        if self._governor is not None:
            self._governor.after_step(time.monotonic() - began_at)

    @on_all_ranks
    def begin_adapter(self, slot: int, folder: str) -> None:
        """Begin to read an adapter's files, beside the steps."""
        self._loading.begin(slot, folder)

    def is_adapter_read(self, slot: int) -> bool:
        """Whether this rank has read it, or failed to."""
        return self._loading.is_read(slot)

    @on_all_ranks(confirmed=True)
    def finish_adapter(self, slot: int) -> AdapterFacts:
        """Use the adapter in the next step's chunks of that slot. ModelLoadError if it does not fit."""
        return self._loading.finish(slot)

    @on_all_ranks
    def drop_adapter(self, slot: int) -> None:
        """Forget an adapter that no chunk names any more."""
        self._loading.drop(slot)

    @property
    def _loading(self) -> AdapterLoading:
        assert self._adapters is not None, "an engine without adapters is never asked for one"
        return self._adapters

    def _forward(self, batch: Batch | StepBatch, inputs: StepInputs) -> torch.Tensor:
        if self._bank is not None:
            all_chunks = batch.chunks  # which a StepBatch makes each time
            chunks = [all_chunks[index] for index in inputs.order]
            self._bank.rows = rows_of(
                [(one.adapter, one.num_tokens) for one in chunks], len(inputs.token_ids), self._device
            )
        return self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)

    def _adapters_of(
        self, config: EngineConfig, dtype: torch.dtype
    ) -> tuple[AdapterLoading | None, AdapterBank | None]:
        if config.lora is None:
            return None, None
        bank = AdapterBank(config.lora.num_slots, dtype, self._device)
        prefixes = self._model_config.tensor_prefixes
        return AdapterLoading(bank, prefixes, config.lora.max_lora_rank), bank

    def close(self) -> None:
        """End the other ranks, if this is the first of several. Nothing may be computed afterwards."""
        self.ranks.close()

    @on_all_ranks
    @torch.inference_mode()
    def clear_blocks(self, blocks: "array[int]") -> None:
        """Zero blocks whose contents must not be met again, not even behind a mask."""
        index = transfers.sent_integers(blocks, self._device)
        self._cache.clear(index)
        if self._speculator is not None:
            self._speculator.clear_blocks(index)

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

    def _refuse_what_cannot_fit(
        self, config: EngineConfig, quantization: Quantization, dtype: StoredDtype
    ) -> None:
        """Before minutes are spent on loading it."""
        try:
            free_bytes = self._free_bytes() + cleared_memory.num_cleared()
        except ConfigError:
            return  # what a machine does not tell is asked for once it is needed
        refuse_what_cannot_fit(config, self._model_config, quantization, dtype, free_bytes)

    def _free_bytes(self) -> int:
        """ConfigError on a machine that does not tell."""
        return free_bytes_for(self._device, self.ranks, self._host_memory_bytes)

    def _budget(
        self,
        config: EngineConfig,
        own_config: ModelConfig,
        dtype: torch.dtype,
        bytes_per_token: int,
        sizes: tuple[int, ...],
    ) -> KVBudget:
        """Of what is free now that all weights are loaded. sizes: of decode steps to be recorded."""
        adapters = adapters_bytes(config, self._bank)
        if self._device.type == "cuda":
            step = measured_steps(
                self._model,
                own_config,
                config,
                self.vocab_size,
                dtype,
                self._device,
                samples=self.ranks.rank == 0,
                num_recorded_rows=max(sizes, default=0),
            )
            return cuda_budget(config, bytes_per_token, step, sizes, adapters, self._device)
        free_bytes: int | None = None
        try:
            free_bytes = self._free_bytes()
        except ConfigError:
            if config.kv_cache_memory_bytes is None:
                raise
        return cpu_budget(config, bytes_per_token, free_bytes, adapters)


def _asked_logprobs(batch: Batch, order: list[int]) -> list[AskedLogprobs]:
    """Of the prompt tokens that follow computed ones, where they are asked for and not yet delivered."""
    if all(chunk.sampling.num_prompt_logprobs is None for chunk in batch.chunks):
        return []
    found, row = [], 0
    for index in order:
        chunk = batch.chunks[index]
        # Without a generated token, all that is known is the prompt; nothing known follows its last one.
        count = min(chunk.num_tokens, len(chunk.token_ids) - 1 - chunk.start)
        num_top = chunk.sampling.num_prompt_logprobs
        if num_top is not None and chunk.num_generated == 0 and count > 0:
            following = chunk.token_ids[chunk.start + 1 : chunk.start + 1 + count]
            found.append(AskedLogprobs(index, row, following, num_top))
        row += chunk.num_tokens
    return found


def _host_memory_bytes(config: EngineConfig, ranks: Ranks) -> int:
    """This rank's part of what is set aside for blocks that the KV cache has no room for.

    ConfigError for more than there is.
    """
    if config.offload is None:
        return 0
    wanted = config.offload.host_memory_bytes // ranks.size
    try:
        free_bytes = free_memory_bytes() // ranks.num_local
    except ConfigError:
        return wanted  # a machine that does not tell
    if wanted > free_bytes:
        whose = f" for each of {ranks.size} ranks" if ranks.size > 1 else ""
        raise ConfigError(
            f"--kv-offloading-size={config.offload.host_memory_bytes / 2**30:g}: {wanted} bytes{whose} "
            f"are more than the {free_bytes} of main memory that are free{whose}; lower it"
        )
    return wanted
