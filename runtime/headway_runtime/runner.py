"""Runs one Batch through the model: tensors in, sampled tokens out. All of torch is below this line.

Owns the model, the KV cache and the step's buffers, and the number of threads. Knows no queue and no
request's state: which tokens to compute, and in which blocks they lie, comes with the Batch.
"""

import logging
import time
from array import array
from pathlib import Path

import torch

from headway_runtime import cleared_memory
from headway_runtime.batch import Batch, Sample, StepResult, Verified
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.admission import refuse_what_cannot_fit
from headway_runtime.logprobs import prompt_logprobs
from headway_runtime.memory import (
    CPU_FRACTION,
    CUDA_FRACTION,
    check_free,
    default_kv_cache_memory_bytes,
    free_memory_bytes,
    kept_as,
    kv_bytes_per_token,
    num_kv_blocks,
)
from headway_runtime.model_config import ModelConfig, StoredDtype, read_model_config
from headway_runtime.model_loading import TORCH_DTYPES, load_model, make_cache, make_inputs
from headway_runtime.quantization.choice import Quantization, choose_quantization
from headway_runtime.request import TokenLogprobs
from headway_runtime.sampler import make_sampler
from headway_runtime.speculator import Speculator, load_draft
from headway_runtime.thread_governor import ThreadGovernor, can_tell_waiting
from headway_runtime.verification import sampled_rows, verified, with_drafts

logger = logging.getLogger(__name__)


class Runner:
    """The model on its device. ConfigError or ModelLoadError while starting."""

    def __init__(self, config: EngineConfig) -> None:
        folder = Path(config.model_path)
        self._model_config = read_model_config(folder)
        _check_lengths(config, self._model_config)
        self._device = _open_device(config)
        dtype_name = self._model_config.dtype if config.dtype == "auto" else config.dtype
        dtype = TORCH_DTYPES[dtype_name]
        quantization = choose_quantization(config.quantization, folder)
        self._refuse_what_cannot_fit(config, quantization, dtype_name)
        with torch.inference_mode():
            self._model = load_model(folder, self._model_config, config, quantization, dtype, self._device)
            draft = load_draft(config, dtype, self._device)
            cleared_memory.give_back()  # before the KV cache takes its share of what is free
            models = [self._model_config] if draft is None else [self._model_config, draft.model_config]
            self.kv_dtype = kept_as(config.kv_cache_dtype, dtype_name)
            self.num_blocks = self._choose_num_blocks(
                config, sum(kv_bytes_per_token(one, self.kv_dtype) for one in models)
            )
            self._cache = make_cache(
                self._model, self._model_config, config, self.num_blocks, dtype, self._device
            )
            self._inputs = make_inputs(self._model, config, self._cache, dtype, self._device)
            self._sampler = make_sampler(self.vocab_size, self._device)
            self._speculator: Speculator | None = None
            if config.speculative is not None:
                self._speculator = Speculator(
                    config.speculative, draft, config, self.num_blocks, self.vocab_size, dtype, self._device
                )
        self._governor: ThreadGovernor | None = None
        if self._device.type == "cpu" and config.num_threads > 1 and can_tell_waiting():
            self._governor = ThreadGovernor(config.num_threads, torch.set_num_threads)
        logger.info(
            "model %s on %s in %s, quantization %s, %d KV blocks of %d tokens in %s",
            folder.name,
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

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Compute all chunks, and a sample after each one that reaches its last known token."""
        started_at = time.monotonic()
        speculator = self._speculator
        drafts = {} if speculator is None else speculator.propose(batch)
        batch = with_drafts(batch, drafts)
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        samples: list[Sample | None] = [None] * len(batch.chunks)
        checked: dict[int, Verified] = {}
        if inputs.sampled:
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))[: len(inputs.sampled)]
            if drafts:
                checked = self._sample_after_drafts(batch, inputs.sampled, logits, samples)
            else:
                chunks = [batch.chunks[index] for index in inputs.sampled]
                for index, sample in zip(inputs.sampled, self._sampler(logits, chunks), strict=True):
                    samples[index] = sample
        elif self._device.type == "cuda":
            # Reading samples waits for the device; without any, wait here: a step's time is its own, and the
            # next one writes into the buffers that this one is copied from.
            torch.cuda.synchronize(self._device)
        prompt_logprobs = self._prompt_logprobs(batch, inputs.order, hidden)
        if speculator is None:
            result = StepResult(tuple(samples), prompt_logprobs)
        else:
            speculator.computed(batch, checked)
            result = StepResult(
                tuple(samples),
                prompt_logprobs,
                checked,
                speculator.seconds,
                speculator.num_passes,
                speculator.pass_seconds,
            )
        if self._governor is not None:
            self._governor.after_step(time.monotonic() - started_at)
        return result

    @torch.inference_mode()
    def all_logits(self, batch: Batch) -> torch.Tensor:
        """Logits [tokens, vocab_size] after each token of a batch's only chunk; no token is sampled."""
        (chunk,) = batch.chunks
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        return self._model.logits(hidden[: chunk.num_tokens])

    def _sample_after_drafts(
        self, batch: Batch, sampled: list[int], logits: torch.Tensor, samples: list[Sample | None]
    ) -> dict[int, Verified]:
        """Sample after each chunk, into `samples`, and after each guess; says which guesses came true."""
        indices = list(dict.fromkeys(sampled))
        rows = [sampled_rows(batch.chunks[index]) for index in indices]
        found = iter(self._sampler(logits, [row for own in rows for row in own]))
        checked = {}
        for index, own in zip(indices, rows, strict=True):
            after = [next(found) for _ in own]
            samples[index] = after[0]
            if drafts := batch.chunks[index].ahead:
                checked[index] = verified(drafts, after)
        return checked

    def _prompt_logprobs(
        self, batch: Batch, order: list[int], hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Of the prompt tokens that follow computed ones, where they are asked for and not yet delivered."""
        found: dict[int, list[TokenLogprobs]] = {}
        if all(chunk.sampling.num_prompt_logprobs is None for chunk in batch.chunks):
            return found
        row = 0
        for index in order:
            chunk = batch.chunks[index]
            # Without a generated token, all that is known is the prompt; nothing known follows its last one.
            count = min(chunk.num_tokens, len(chunk.token_ids) - 1 - chunk.start)
            num_top = chunk.sampling.num_prompt_logprobs
            if num_top is not None and chunk.num_generated == 0 and count > 0:
                following = chunk.token_ids[chunk.start + 1 : chunk.start + 1 + count]
                own = hidden[row : row + count]
                found[index] = prompt_logprobs(own, self._model.logits, self.vocab_size, following, num_top)
            row += chunk.num_tokens
        return found

    @torch.inference_mode()
    def clear_blocks(self, blocks: "array[int]") -> None:
        """Zero blocks whose contents must not be met again, not even behind a mask."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        self._cache.clear(index)
        if self._speculator is not None:
            self._speculator.clear_blocks(index)

    def is_usable(self) -> bool:
        """Whether the device still computes after an error."""
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
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return free_memory_bytes()

    def _choose_num_blocks(self, config: EngineConfig, bytes_per_token: int) -> int:
        memory_bytes = config.kv_cache_memory_bytes
        is_cuda = self._device.type == "cuda"
        try:
            free_bytes = self._free_bytes()
        except ConfigError:
            # A machine that does not tell; then what the user says is all there is to go by.
            if memory_bytes is None:
                raise
            free_bytes = memory_bytes
        if memory_bytes is None:
            memory_bytes = default_kv_cache_memory_bytes(
                bytes_per_token=bytes_per_token,
                max_num_seqs=config.envelope.max_num_seqs,
                max_model_len=config.max_model_len,
                block_size=config.block_size,
                free_bytes=free_bytes,
                fraction=CUDA_FRACTION if is_cuda else CPU_FRACTION,
            )
        check_free(memory_bytes, free_bytes)
        return num_kv_blocks(
            kv_cache_memory_bytes=memory_bytes,
            bytes_per_token=bytes_per_token,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )


def _open_device(config: EngineConfig) -> torch.device:
    torch.set_num_threads(config.num_threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': PyTorch finds no CUDA device; use --device cpu")
    # With an index, as tensors report it.
    return (
        torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    )


def _check_lengths(config: EngineConfig, model: ModelConfig) -> None:
    if config.max_model_len > model.longest_context:
        raise ConfigError(
            f"max_model_len={config.max_model_len!r} is more than the model's "
            f"{model.told_longest_context}; ask for at most that"
        )
