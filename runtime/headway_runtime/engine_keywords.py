"""What the engine in the user's own process may be made with, as type checkers and editors see it.

`engine_options` reads and checks the values; a test holds both to the flags of `headway serve`.
"""

from typing import Literal, TypedDict


class EngineKeywords(TypedDict, total=False):
    """The flags of `headway serve` that are about the engine, with the same defaults; None is the default."""

    revision: str | None
    download_dir: str | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    device: Literal["auto", "cpu", "cuda"]
    load_format: Literal["auto", "dummy"]
    quantization: Literal["auto", "none", "fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"]
    weight_compression: Literal["auto", "none"]
    memory_check: Literal["enforce", "warn"]
    generation_config: Literal["auto", "none", "vllm"]
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int
    initial_max_num_seqs: int | None
    initial_max_num_batched_tokens: int | None
    block_size: int
    kv_cache_memory_bytes: int | str | None
    kv_cache_dtype: Literal["auto", "plain", "bfloat16", "fp8", "fp8_e4m3", "int8"]
    enable_prefix_caching: bool
    kv_offloading_size: float | None
    kv_offloading_disk_path: str | None
    kv_offloading_disk_size: float | None
    long_prefill_share: float
    prefill_doubling_context: int | None
    priority_ageing_seconds: float
    late_yield_seconds: float
    structured_output_timeout_seconds: float
    max_waiting: int
    max_logprobs: int
    ttft_target_milliseconds: float | None
    tpot_target_milliseconds: float | None
    e2e_target_milliseconds: float | None
    speculative_config: dict[str, object] | str | None
    initial_num_speculative_tokens: int | None
    overlap: bool | None
    enable_lora: bool
    lora_modules: list[str | dict[str, str]] | None
    max_loras: int
    max_cpu_loras: int | None
    max_lora_rank: int
    seed: int
    enforce_eager: bool
    cuda_graph_sizes: list[int] | str | None
    num_threads: int | None
    tensor_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    distributed_timeout_seconds: float
