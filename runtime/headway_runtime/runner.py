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
from headway_runtime.batch import Batch, Sample, StepResult
from headway_runtime.config import EngineConfig
from headway_runtime.errors import ConfigError
from headway_runtime.layers.attention import KVCache, KVShape
from headway_runtime.layers.linear import PackedLinear
from headway_runtime.logprobs import prompt_logprobs
from headway_runtime.memory import (
    CPU_FRACTION,
    CUDA_FRACTION,
    check_free,
    default_kv_cache_memory_bytes,
    free_memory_bytes,
    kv_bytes_per_token,
    num_kv_blocks,
)
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.models import MODELS
from headway_runtime.models.loader import CheckpointWeights, DummyWeights, Weights
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.request import TokenLogprobs
from headway_runtime.sampler import Sampler
from headway_runtime.step_inputs import StepInputBuilder
from headway_runtime.thread_governor import ThreadGovernor, can_tell_waiting

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
        with torch.inference_mode():
            weights: Weights
            if config.load_format == "dummy":
                weights = DummyWeights(config.seed, dtype, self._device, quantization)
            else:
                weights = CheckpointWeights(folder, dtype, self._device, quantization)
            self._model = MODELS[self._model_config.architecture](
                self._model_config, weights, config.max_model_len, dtype, self._device
            )
            cleared_memory.give_back()  # before the KV cache takes its share of what is free
            self.num_blocks = self._choose_num_blocks(config, dtype_name)
            shape = KVShape(
                self._model_config.num_layers,
                self.num_blocks + 1,
                config.block_size,
                self._model_config.num_kv_heads,
                self._model_config.head_dim,
            )
            num_groups = self._model_config.num_attention_heads // shape.num_kv_heads
            self._cache = KVCache(shape, num_groups, dtype, self._device)
            self._inputs = StepInputBuilder(
                config,
                self._cache,
                dtype,
                self._device,
                rounds=any(isinstance(linear, PackedLinear) for linear in self._model.linears),
            )
            self._sampler = Sampler(self.vocab_size, self._device)
        self._governor: ThreadGovernor | None = None
        if self._device.type == "cpu" and config.num_threads > 1 and can_tell_waiting():
            self._governor = ThreadGovernor(config.num_threads, torch.set_num_threads)
        logger.info(
            "model %s on %s in %s, quantization %s, %d KV blocks of %d tokens",
            folder.name,
            self._device,
            dtype_name,
            quantization.name,
            self.num_blocks,
            config.block_size,
        )

    @property
    def vocab_size(self) -> int:
        return self._model_config.vocab_size

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Compute all chunks, and a sample after each one that reaches its last known token."""
        started_at = time.monotonic()
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        samples: list[Sample | None] = [None] * len(batch.chunks)
        if inputs.sampled:
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))[: len(inputs.sampled)]
            chunks = [batch.chunks[index] for index in inputs.sampled]
            for index, sample in zip(inputs.sampled, self._sampler(logits, chunks), strict=True):
                samples[index] = sample
        elif self._device.type == "cuda":
            # Reading samples waits for the device; without any, wait here: a step's time is its own, and the
            # next one writes into the buffers that this one is copied from.
            torch.cuda.synchronize(self._device)
        result = StepResult(tuple(samples), self._prompt_logprobs(batch, inputs.order, hidden))
        if self._governor is not None:
            self._governor.after_step(time.monotonic() - started_at)
        return result

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
        self._cache.clear(torch.tensor(blocks, dtype=torch.int64, device=self._device))

    def is_usable(self) -> bool:
        """Whether the device still computes after an error."""
        try:
            return bool((torch.ones(2, device=self._device).sum() == 2).item())
        except RuntimeError:
            return False

    def _choose_num_blocks(self, config: EngineConfig, dtype_name: str) -> int:
        bytes_per_token = kv_bytes_per_token(self._model_config, dtype_name)
        memory_bytes = config.kv_cache_memory_bytes
        is_cuda = self._device.type == "cuda"
        try:
            free_bytes = torch.cuda.mem_get_info(self._device)[0] if is_cuda else free_memory_bytes()
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
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len!r} is more than the model's max_position_embeddings, "
            f"{model.max_position_embeddings}; ask for at most that"
        )
