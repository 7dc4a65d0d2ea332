"""What a user may say of an engine: the flags that `headway serve` and the in-process engine share.

The flags are declared once, here; `headway serve` parses them from its command line and `keyword_options`
from keyword arguments of the same names, so that names, defaults and checks cannot differ. Reads the model's
config.json, generation_config.json and nothing else: no torch, no device. What only the engine can know stays
"auto".
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from headway.argument_types import integer, not_negative, positive, share, size, sizes, tokens
from headway_runtime.adapters.options import add_lora_arguments, lora_config
from headway_runtime.batch_options import CPU_NUM_SEQS, GPU_NUM_SEQS, add_batch_arguments, batch_limits
from headway_runtime.config import (
    Envelope,
    KVCacheDtype,
    Limits,
    LoraConfig,
    MemoryCheck,
    OffloadConfig,
    ParallelConfig,
    SpeculativeConfig,
    Targets,
    WeightCompression,
)
from headway_runtime.cpus import usable_cpus
from headway_runtime.doubling_context import estimated_doubling_context
from headway_runtime.errors import ConfigError
from headway_runtime.generation_defaults import CHOICES, GenerationDefaults, generation_defaults
from headway_runtime.memory import num_active_weights
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.offload_options import add_offload_arguments, offload_config
from headway_runtime.parallel.options import add_parallel_arguments, parallel_config
from headway_runtime.quantization.choice import QUANTIZATIONS, choose_quantization
from headway_runtime.sampling_params import ALL_LOGPROBS, DEFAULT_MAX_LOGPROBS
from headway_runtime.sources.flags import add_source_arguments
from headway_runtime.speculative_options import MOST_SPECULATIVE_TOKENS, speculative_options

# Operators of smaller models end before a second thread has begun.
FEWEST_WEIGHTS_TO_SHARE = 32_000_000


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine process is told. None: it chooses by the device that it finds.

    quantization: what is in force, never "auto". envelope, limits: on a CPU; gpu_envelope, gpu_limits: on a
    GPU, which differ where nothing says how many sequences.
    """

    model_path: str
    device: str
    dtype: str
    load_format: str
    quantization: str
    max_model_len: int
    block_size: int
    kv_cache_memory_bytes: int | None
    envelope: Envelope
    limits: Limits
    gpu_envelope: Envelope
    gpu_limits: Limits
    targets: Targets
    max_waiting: int
    max_logprobs: int
    num_threads: int
    seed: int
    long_prefill_share: float
    prefill_doubling_context: int
    priority_ageing_seconds: float
    late_yield_seconds: float
    weight_compression: str
    memory_check: str
    kv_cache_dtype: str
    enable_prefix_caching: bool
    structured_output_timeout_seconds: float
    defaults: GenerationDefaults
    speculative: SpeculativeConfig | None
    lora: LoraConfig | None
    offload: OffloadConfig | None
    parallel: ParallelConfig
    enforce_eager: bool
    cuda_graph_sizes: tuple[int, ...] | None
    overlap: bool | None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what the engine is and what it may take."""
    add = parser.add_argument
    add_source_arguments(parser)
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="auto: as the checkpoint says; on a CPU bfloat16 for quantized weights of a float16 one, where "
        "products of codes take that alone",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add(
        "--quantization",
        "-q",
        choices=QUANTIZATIONS,
        default="auto",
        help="auto: what the checkpoint says; fp8, int8 or int4: quantize an unquantized one at load; "
        "other names, none too: the checkpoint must be so (default %(default)s)",
    )
    add(
        "--weight-compression",
        choices=get_args(WeightCompression),
        default="auto",
        help="auto: on a CPU whose products can read them so, bfloat16 weights are kept in 12 bits each, "
        "without any loss; none: in 16 (default %(default)s)",
    )
    add(
        "--memory-check",
        choices=get_args(MemoryCheck),
        default="enforce",
        help="of a model that the free memory cannot hold, by the arithmetic of `headway plan`: enforce ends "
        "before it is loaded, with exit status 4; warn tries (default %(default)s)",
    )
    add(
        "--generation-config",
        choices=CHOICES,
        default="auto",
        help="auto: requests that leave sampling fields out get what the model's generation_config.json "
        "says; none or vllm: OpenAI's defaults (default %(default)s)",
    )
    add(
        "--max-model-len",
        type=tokens(2),
        metavar="N",
        help="tokens of prompt plus answer, such as 8192, 8k (8000) or 8K (8192) (default: the model's own)",
    )
    add_batch_arguments(parser)
    add("--block-size", type=integer(1, 256), default=16, help="tokens per KV block")
    add(
        "--kv-cache-memory-bytes",
        type=size,
        metavar="SIZE",
        help="e.g. 512Mi, 4G (default: what a full batch can fill, at most 0.4 of the free memory, of a "
        "GPU's what weights and the largest step leave; to be given where servers share a machine, as a "
        "CPU's is taken only as it fills)",
    )
    add(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default="auto",
        help="how keys and values are kept; auto: as the checkpoint says, else as the model computes; plain: "
        "as the model computes, whatever the checkpoint says; fp8 (fp8_e4m3) and int8: one byte each, with a "
        "scale per token and head, so that the same memory holds nearly twice the tokens (default "
        "%(default)s)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use again what was computed for the same beginning (default: on)",
    )
    add_offload_arguments(parser)
    add(
        "--long-prefill-share",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="of a step's tokens, for prompts that want more, while others want some (default %(default)s)",
    )
    add(
        "--prefill-doubling-context",
        type=integer(0),
        metavar="TOKENS",
        help="where others decode, a prompt's token that attends to so many counts as two of a step's, so "
        "that steps take as long at a long prompt's end as at its beginning; 0: all count the same (default: "
        "estimated from the model's shape)",
    )
    add(
        "--priority-ageing-seconds",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="head start that each unit of better priority gives (default %(default)s)",
    )
    add(
        "--late-yield-seconds",
        type=not_negative,
        default=120.0,
        metavar="SECONDS",
        help="how far a waiting request is put back once it can no longer meet --ttft-target-milliseconds, "
        "so that others still can; 0: never (default %(default)s)",
    )
    add(
        "--structured-output-timeout-seconds",
        type=positive,
        default=10.0,
        metavar="SECONDS",
        help="for compiling one grammar or JSON schema; longer ones get 400 (default %(default)s)",
    )
    add("--max-waiting", type=integer(1), default=1024, help="requests that may wait; more get 503")
    add(
        "--max-logprobs",
        type=integer(ALL_LOGPROBS),
        default=DEFAULT_MAX_LOGPROBS,
        metavar="N",
        help="best log-probabilities that a request may have of each token; -1: as many as the vocabulary "
        "has (default %(default)s)",
    )
    add(
        "--ttft-target-milliseconds",
        type=positive,
        metavar="MS",
        help="count requests within it, and let late ones yield",
    )
    add("--tpot-target-milliseconds", type=positive, metavar="MS", help="likewise")
    add("--e2e-target-milliseconds", type=positive, metavar="MS", help="likewise, of whole answers")
    add(
        "--speculative-config",
        metavar="JSON",
        help='guess tokens ahead: {"model": DRAFT, "num_speculative_tokens": N}, or {"method": "ngram", ...} '
        "to look them up in prompt and answer (default: off)",
    )
    add(
        "--initial-num-speculative-tokens",
        type=integer(0, MOST_SPECULATIVE_TOKENS),
        help="live limit at start (default: what --speculative-config says)",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run all steps kernel by kernel: no CUDA graphs on a GPU, no tapes on a CPU (default: both)",
    )
    add(
        "--cuda-graph-sizes",
        type=sizes,
        metavar="N,N,...",
        help="sequences of the steps that are recorded as CUDA graphs (default: 1, 2, 4, multiples of 8 up "
        "to 256 and of 16 up to 512, as far as --max-num-seqs goes, and that itself up to 512)",
    )
    add(
        "--overlap",
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="launch each step while the one before it runs, and notice one step late that an answer has "
        "ended (default: on a GPU)",
    )
    add_lora_arguments(parser)
    add_parallel_arguments(parser)
    add("--seed", type=integer(0), default=0, help="of dummy weights")
    add(
        "--num-threads",
        type=integer(1),
        help="compute threads of each process that computes (default: the CPUs that they may use, shared "
        "out among this node's; 1 for models of few weights)",
    )


def engine_options(arguments: argparse.Namespace, model_path: Path, model: ModelConfig) -> EngineOptions:
    """Apply the model's own defaults and check what must agree. ConfigError names the flag at fault."""
    speculative = speculative_options(
        arguments.speculative_config,
        model_path,
        arguments.download_dir,
        getattr(arguments, "lifeline_fd", None),  # of a server alone
    )
    num_speculative_tokens = 0 if speculative is None else speculative.num_speculative_tokens
    envelope, limits = batch_limits(arguments, CPU_NUM_SEQS, num_speculative_tokens)
    gpu_envelope, gpu_limits = batch_limits(arguments, GPU_NUM_SEQS, num_speculative_tokens)
    parallel = parallel_config(arguments, model)
    longest = model.longest_context
    if arguments.max_model_len is not None and arguments.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len={arguments.max_model_len} is more than the model's "
            f"{model.told_longest_context}; ask for at most that"
        )
    return EngineOptions(
        model_path=str(model_path),
        device=arguments.device,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        quantization=choose_quantization(arguments.quantization, model_path).name,
        max_model_len=arguments.max_model_len or model.max_position_embeddings,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        envelope=envelope,
        limits=limits,
        gpu_envelope=gpu_envelope,
        gpu_limits=gpu_limits,
        targets=Targets(
            arguments.ttft_target_milliseconds,
            arguments.tpot_target_milliseconds,
            arguments.e2e_target_milliseconds,
        ),
        max_waiting=arguments.max_waiting,
        max_logprobs=arguments.max_logprobs,
        num_threads=arguments.num_threads or _default_threads(model, parallel),
        seed=arguments.seed,
        long_prefill_share=arguments.long_prefill_share,
        prefill_doubling_context=_doubling_context(arguments, model),
        priority_ageing_seconds=arguments.priority_ageing_seconds,
        late_yield_seconds=arguments.late_yield_seconds,
        weight_compression=arguments.weight_compression,
        memory_check=arguments.memory_check,
        kv_cache_dtype=arguments.kv_cache_dtype,
        enable_prefix_caching=arguments.enable_prefix_caching,
        structured_output_timeout_seconds=arguments.structured_output_timeout_seconds,
        defaults=generation_defaults(model_path, arguments.generation_config),
        speculative=None if speculative is None else speculative.config,
        lora=lora_config(arguments, getattr(arguments, "lifeline_fd", None)),
        offload=offload_config(arguments, parallel.size),
        parallel=parallel,
        enforce_eager=arguments.enforce_eager,
        cuda_graph_sizes=arguments.cuda_graph_sizes,
        overlap=arguments.overlap,
    )


def _doubling_context(arguments: argparse.Namespace, model: ModelConfig) -> int:
    wanted: int | None = arguments.prefill_doubling_context
    return estimated_doubling_context(model, arguments.kv_cache_dtype) if wanted is None else wanted


def keyword_options(model_path: Path, keywords: Mapping[str, object]) -> EngineOptions:
    """The same from keyword arguments: `max_model_len=512` for `--max-model-len=512`; None is the default.

    ConfigError for an unknown name, or a value that the flag would not take.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_engine_arguments(parser)
    # The only list of a parser's flags that argparse keeps.
    actions = {action.dest: action for action in parser._actions}
    arguments = parser.parse_args([])
    for name, value in keywords.items():
        action = actions.get(name)
        if action is None:
            near = get_close_matches(name, actions, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(actions))}"
            raise ConfigError(f"{name}={value!r} is no option of an engine; {remedy}")
        if value is not None:
            setattr(arguments, name, _keyword_value(action, name, value))
    return engine_options(arguments, model_path, read_model_config(model_path))


def _keyword_value(action: argparse.Action, name: str, value: object) -> object:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: want True or False")
        return value
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{name}={value!r}: want one of {', '.join(map(repr, action.choices))}")
    if not callable(action.type):
        return value
    try:
        return action.type(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from error


def _default_threads(model: ModelConfig, parallel: ParallelConfig) -> int:
    """All processors of this node's ranks together, but one each where operators are too short to share."""
    if num_active_weights(model) < FEWEST_WEIGHTS_TO_SHARE * parallel.size:
        return 1
    return max(1, usable_cpus() // parallel.ranks_per_node)
