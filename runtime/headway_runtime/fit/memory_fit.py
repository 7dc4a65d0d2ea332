"""The sum itself: weights, KV cache, the largest step and what a process needs, against a device's memory."""

from bisect import bisect_left
from collections.abc import Set
from dataclasses import dataclass, replace

from headway_runtime.config import KVCacheDtype
from headway_runtime.fit.adapter_bytes import adapter_bytes
from headway_runtime.fit.gpu_workspace import decode_workspace_bytes
from headway_runtime.fit.placement import Placement, one_rank
from headway_runtime.fit.step_bytes import Step, StepBytes, step_bytes
from headway_runtime.fit.weight_bytes import PartBytes, total_bytes, weight_bytes
from headway_runtime.memory import (
    CPU_FRACTION,
    CUDA_FRACTION,
    KV_BYTES,
    kept_as,
    kv_bytes_per_token,
    staging_bytes,
)
from headway_runtime.model_config import ModelConfig
from headway_runtime.quantization.choice import Quantization

# What a CUDA context with PyTorch's kernels, cuBLAS's workspaces and the allocator's rounding to blocks take
# on a GPU before and beside any tensor of ours. Not measured here: a round number above the half that such
# processes are commonly seen with.
CUDA_OVERHEAD_BYTES = 2**30
# What the two processes of a server have resident before a model is loaded: Python, PyTorch, the tokenizer,
# HTTP. Measured: 540 and 72 MiB, libraries included.
CPU_OVERHEAD_BYTES = 640 * 2**20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and how its weights are kept. plain_modules: those that files are seen to hold unquantized."""

    config: ModelConfig
    quantization: Quantization
    plain_modules: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Question:
    """What is to fit, and where.

    num_sequences: to be held at once, each of `context` tokens. max_num_seqs: the most that a step samples.
    num_adapters, adapter_rank: LoRA adapters that may be loaded, and their largest rank.
    draft: the model that guesses; all of it is on each rank. memory_bytes: of one device.
    overhead_bytes: that others of the process take of it. offload_bytes: of main memory, all ranks together,
    for what the KV cache has no room for.
    """

    model: LoadedModel
    placement: Placement
    kv_cache_dtype: KVCacheDtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context: int
    num_sequences: int
    memory_bytes: int
    overhead_bytes: int
    block_size: int = 16
    num_ranks: int = 1
    num_speculative_tokens: int = 0
    draft: LoadedModel | None = None
    num_adapters: int = 0
    adapter_rank: int = 0
    offload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer, for one device of `question.num_ranks`. model: its share; adapter_bytes: of all of them."""

    question: Question
    model: ModelConfig
    weights: tuple[PartBytes, ...]
    draft_weights: tuple[PartBytes, ...]
    kv_dtype: str
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    step: StepBytes
    adapter_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Weights, and what is kept for adapters."""
        return self.weight_bytes + self.adapter_bytes

    @property
    def weight_bytes(self) -> int:
        """The draft's too."""
        return total_bytes(self.weights) + total_bytes(self.draft_weights)

    @property
    def token_bytes(self) -> int:
        return self.kv_bytes_per_token + self.draft_kv_bytes_per_token

    def kv_bytes(self, num_sequences: int, tokens: int) -> int:
        """Whole blocks of so many sequences, and the null block."""
        size = self.question.block_size
        return (num_sequences * -(-tokens // size) + 1) * size * self.token_bytes

    @property
    def least_kv_bytes(self) -> int:
        """An engine starts with no less: one sequence of the longest length."""
        return self.kv_bytes(1, self.question.max_model_len)

    @property
    def wanted_kv_bytes(self) -> int:
        wanted = self.kv_bytes(self.question.num_sequences, self.question.context)
        return max(self.least_kv_bytes, wanted)

    @property
    def other_bytes(self) -> int:
        """All but the KV cache."""
        own = self.loaded_bytes + self.step.total + self.question.overhead_bytes
        return own + self.offload_bytes

    @property
    def offload_bytes(self) -> int:
        """Of the device, one rank's part: of a GPU, what blocks pass through on their way."""
        question = self.question
        if question.placement.is_cpu:
            return question.offload_bytes // question.num_ranks
        block_bytes = question.block_size * self.kv_bytes_per_token
        return staging_bytes(block_bytes) if question.offload_bytes else 0

    @property
    def offloaded_tokens(self) -> int:
        """Tokens whose KV main memory has room for, in whole blocks; a draft's is not kept."""
        size = self.question.block_size
        blocks = self.question.offload_bytes // self.question.num_ranks // (size * self.kv_bytes_per_token)
        return blocks * size

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + self.wanted_kv_bytes

    @property
    def left_bytes(self) -> int:
        """Negative where it does not fit."""
        return self.question.memory_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        return self.left_bytes >= 0

    @property
    def sequences_that_fit(self) -> int:
        """The most of `question.context` tokens each that fit with the steps of so many (`with_sequences`).

        None where an engine would not even start.
        """
        numbers = range(1, self.question.memory_bytes // self.kv_bytes(1, self.question.context) + 2)
        return bisect_left(numbers, True, key=lambda number: not self._with_sequences(number).fits)

    def _with_sequences(self, number: int) -> "Fit":
        question = with_sequences(self.question, number)
        return replace(self, question=question, step=_largest_step(question, self.model, self.kv_dtype))

    @property
    def default_kv_bytes(self) -> int:
        """What an engine gives its KV cache unless told: a fraction of what weights leave free.

        The largest step's memory is left to it in any case.
        """
        fraction = CPU_FRACTION if self.question.placement.is_cpu else CUDA_FRACTION
        question = self.question
        free = question.memory_bytes - question.overhead_bytes - self.loaded_bytes - self.offload_bytes
        full = self.kv_bytes(self.question.max_num_seqs, self.question.max_model_len)
        return max(0, min(int(free * fraction), full, free - self.step.total))


def with_sequences(question: Question, number: int) -> Question:
    """The same for so many at once. Steps are of more where there are more; of fewer where less than was
    asked for is there, as then `--max-num-seqs` is to be lowered to that."""
    is_fewer = number < question.num_sequences
    rows = number if is_fewer else max(number, question.max_num_seqs)
    return replace(question, num_sequences=number, max_num_seqs=rows)


def assess(question: Question) -> Fit:
    """ConfigError for a model that so many ranks cannot share."""
    model = one_rank(question.model.config, question.num_ranks)
    kv_dtype = kept_as(question.kv_cache_dtype, question.placement.dtype)
    draft = question.draft
    return Fit(
        question,
        model,
        _weights(replace(question.model, config=model), question),
        () if draft is None else _weights(draft, question),
        kv_dtype,
        kv_bytes_per_token(model, kv_dtype),
        0 if draft is None else kv_bytes_per_token(draft.config, kv_dtype),
        _largest_step(question, model, kv_dtype),
        question.num_adapters * adapter_bytes(model, question.adapter_rank, question.placement),
    )


def _largest_step(question: Question, model: ModelConfig, kv_dtype: str) -> StepBytes:
    """model: one rank's share."""
    step = Step(
        min(question.max_num_batched_tokens, question.max_num_seqs * question.max_model_len),
        max(question.context, question.max_model_len),
        min(
            question.max_num_seqs * (1 + question.num_speculative_tokens),
            question.max_num_batched_tokens,
        ),
        question.num_sequences * question.context,
        min(question.max_num_batched_tokens, question.max_model_len),
        has_codes=question.model.quantization.name != "none",
        kv_is_coded=KV_BYTES[kv_dtype][1] > 0,
        has_integer_inputs=question.model.quantization.has_integer_inputs,
        is_int4=question.model.quantization.is_int4,
    )
    found = step_bytes(model, question.placement, step, question.model.config.vocab_size)
    if question.draft is None:
        return found
    # A draft's attention keeps a workspace of its own.
    own = decode_workspace_bytes(question.draft.config, question.placement.num_multiprocessors)
    return replace(found, kept=found.kept + own)


def _weights(loaded: LoadedModel, question: Question) -> tuple[PartBytes, ...]:
    num_positions = min(question.max_model_len, loaded.config.longest_context)
    return weight_bytes(
        loaded.config, loaded.quantization, question.placement, num_positions, loaded.plain_modules
    )
