"""What is fixed when an engine starts (`EngineConfig`) and what may move while it runs (`Limits`).

Imports no torch: the HTTP process and the simulator read it too. Nothing here is ever mutated; a
change of limits makes a new `Limits`, checked against the `Envelope` that was allocated at start.
"""

from dataclasses import dataclass, field
from typing import Literal

from headway_runtime.errors import LimitRangeError

Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]
# As they are asked for, in vLLM's words: fp8 is fp8_e4m3; auto follows the checkpoint, else the model.
KVCacheDtype = Literal["auto", "plain", "bfloat16", "fp8", "fp8_e4m3", "int8"]
# auto: bfloat16 weights in 12 bits each, without loss, where products read them so.
WeightCompression = Literal["auto", "none"]
MemoryCheck = Literal["enforce", "warn"]
SpeculativeMethod = Literal["draft_model", "ngram"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The live batch limits. Lowering one drains; it never preempts.

    max_num_seqs: sequences that may run at once.
    max_num_batched_tokens: tokens (prefill plus decode, guesses included) that one step may compute; those of
        prompts are counted by what they cost where others decode (`prompt_cost`).
    num_speculative_tokens: tokens that may be guessed ahead for each sequence in a step; 0 turns speculation
        off.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The ranges inside which `Limits` may move; buffers and KV blocks are sized for the upper ends."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0

    def check(self, limits: Limits) -> None:
        """Raise LimitRangeError unless `limits` lies inside; tokens must also cover one per sequence."""
        if not 1 <= limits.max_num_seqs <= self.max_num_seqs:
            raise LimitRangeError("max_num_seqs", limits.max_num_seqs, 1, self.max_num_seqs)
        if not limits.max_num_seqs <= limits.max_num_batched_tokens <= self.max_num_batched_tokens:
            raise LimitRangeError(
                "max_num_batched_tokens",
                limits.max_num_batched_tokens,
                limits.max_num_seqs,
                self.max_num_batched_tokens,
            )
        if not 0 <= limits.num_speculative_tokens <= self.num_speculative_tokens:
            raise LimitRangeError(
                "num_speculative_tokens", limits.num_speculative_tokens, 0, self.num_speculative_tokens
            )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who guesses tokens ahead. How many is in `Limits`.

    method: "draft_model", a smaller model, in the folder `model_path`; or "ngram", what followed the last
        tokens where they occurred before.
    prompt_lookup_min, prompt_lookup_max: of how many last tokens, for "ngram"; the most that are found count.
    adaptive: whether fewer tokens than the limit, or none, are guessed where that is faster.
    """

    method: SpeculativeMethod
    model_path: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    adaptive: bool = True


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load. source: as the user named it; folder: where it lies on this machine.

    parent: the name of the model that it changes; "" for the first one that is served.
    """

    name: str
    source: str
    folder: str
    parent: str = ""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Which LoRA adapters an engine can have.

    max_loras: different ones in one step. max_cpu_loras: loaded at once, those included that were unloaded
    and are still in use. max_lora_rank: the largest rank. modules: those to load at the start.
    base: the served model as the user named it, which adapters are compared with for the log; "" if unknown.
    """

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    modules: tuple[LoraModule, ...] = ()
    base: str = field(default="", compare=False)

    @property
    def num_slots(self) -> int:
        return self.max_cpu_loras


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes (ranks) share each layer of one model, and on how many nodes.

    Rank 0 is the engine; ranks are numbered node by node, equally many on each.
    master_addr, master_port: where rank 0 listens for ranks of other nodes. One node takes any free port of
        this machine.
    timeout_seconds: for all ranks to come and to load their share, and for one exchange of tensors.
    """

    size: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    timeout_seconds: float = 600.0

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.num_nodes

    @property
    def own_ranks(self) -> range:
        """Those of this node."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node_rank: int) -> range:
        first = node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Targets:
    """The SLO targets against which the engine keeps exact counters; None means no target."""

    ttft_milliseconds: float | None = None
    tpot_milliseconds: float | None = None
    e2e_milliseconds: float | None = None


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where prefix blocks go that the KV cache has no room for.

    host_memory_bytes: of main memory, all ranks together. disk_path: a folder for what is to outlive that
    and the process; None: there is none. disk_bytes: what files there may take.
    """

    host_memory_bytes: int
    disk_path: str | None = None
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs, resolved once (defaults applied, sources turned into folders).

    model_path: folder with config.json, *.safetensors and tokenizer.json.
    quantization: one of quantization.choice.QUANTIZATIONS; "auto" is what the checkpoint says.
    kv_cache_memory_bytes: memory for KV blocks, all layers together; None lets the engine choose once the
        weights are loaded (see `memory.py`).
    max_waiting: bound on requests that wait; one more is refused with QueueFullError.
    long_prefill_share: the share of a step's token budget that prompts wanting more than that may take
        together while others want some of it; above 0, at most 1.
    prefill_doubling_context: where others decode in its step, a prompt's token that attends to so many counts
        as two of the step's; 0: all count the same.
    priority_ageing_seconds: how much later a request may come and still be served first, for each unit that
        its priority is better; at least 0.
    late_yield_seconds: how far a waiting request is put back once it can no longer meet the TTFT target; at
        least 0, which is never.
    kv_cache_dtype: how keys and values are kept; "auto": as the checkpoint says, else as the model computes;
        "plain": as the model computes, whatever the checkpoint says.
    weight_compression: "none" keeps bfloat16 weights in 16 bits, also where products could read 12.
    memory_check: what is done with a model that will not fit, by the arithmetic.
    enable_prefix_caching: whether requests use KV that others computed for the same beginning.
    structured_output_timeout_seconds: how long compiling one request's grammar may take.
    speculative: None for an engine that guesses no tokens.
    lora: None for an engine that has no adapters.
    offload: None where what the KV cache has no room for is lost.
    parallel: the processes that share the model.
    enforce_eager: whether steps run kernel by kernel also where a GPU, or a CPU, could run them as one.
    cuda_graph_sizes: numbers of sequences of those that it can; None lets the engine choose.
    overlap: whether a step is launched while the one before it runs; None: on a GPU.
    seed: for weights of the dummy load format only; a request brings its own.
    """

    model_path: str
    device: Device
    dtype: Dtype
    load_format: LoadFormat
    max_model_len: int
    block_size: int
    kv_cache_memory_bytes: int | None
    envelope: Envelope
    limits: Limits
    max_waiting: int
    num_threads: int
    long_prefill_share: float = 0.5
    prefill_doubling_context: int = 0
    priority_ageing_seconds: float = 60.0
    late_yield_seconds: float = 120.0
    kv_cache_dtype: KVCacheDtype = "auto"
    enable_prefix_caching: bool = True
    structured_output_timeout_seconds: float = 10.0
    speculative: SpeculativeConfig | None = None
    lora: LoraConfig | None = None
    offload: OffloadConfig | None = None
    seed: int = 0
    quantization: str = "auto"
    weight_compression: WeightCompression = "auto"
    memory_check: MemoryCheck = "enforce"
    parallel: ParallelConfig = ParallelConfig()
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] | None = None
    overlap: bool | None = None

    @property
    def gpu_envelope(self) -> Envelope:
        """The device is known by now, and so is its envelope."""
        return self.envelope

    @property
    def overlaps_steps(self) -> bool:
        """Whether a step is launched while the one before it runs."""
        return self.device == "cuda" if self.overlap is None else self.overlap
