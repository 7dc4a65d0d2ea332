"""`headway plan MODEL`: show whether a model fits a GPU's or machine's memory, and what would make it fit.

Reads the model's config.json, and the headers of its weights where they are there; loads nothing. Exit status
0: it fits, 1: it does not, 2: what was asked makes no sense.
"""

import argparse
import json
import logging
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

from headway.argument_types import gibibytes, integer, not_negative, share, size
from headway.command_parser import CommandParser
from headway_runtime.adapters.options import MOST_LORAS, lora_bounds
from headway_runtime.adapters.peft_config import MAX_RANK
from headway_runtime.batch_options import CPU_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS, GPU_NUM_SEQS
from headway_runtime.config import KVCacheDtype, WeightCompression
from headway_runtime.cpus import usable_cpus
from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.fit.bounds import DEFAULT_EFFICIENCY, bounds
from headway_runtime.fit.changes import Change, nearest_changes
from headway_runtime.fit.gpu_kinds import (
    GPU_KINDS,
    LEAST_CAPABILITY,
    MULTIPROCESSORS_UNTOLD,
    GpuKind,
    gpu_placement,
)
from headway_runtime.fit.headers import Headers, read_headers
from headway_runtime.fit.memory_fit import (
    CPU_OVERHEAD_BYTES,
    CUDA_OVERHEAD_BYTES,
    Fit,
    LoadedModel,
    Question,
    assess,
)
from headway_runtime.fit.placement import this_processor
from headway_runtime.fit.plan_checks import check_flags
from headway_runtime.fit.report import Answer, Speed, as_json, text
from headway_runtime.memory import free_memory_bytes
from headway_runtime.model_config import STORED_DTYPES, read_model_config
from headway_runtime.offload_options import GIB
from headway_runtime.quantization.choice import QUANTIZATIONS, choose_quantization
from headway_runtime.quantization.kv_scheme import chosen_kv_cache_dtype
from headway_runtime.served_dtype import served_dtype
from headway_runtime.sources import resolve
from headway_runtime.sources.flags import MODEL_HELP, add_source_arguments
from headway_runtime.speculative_options import SpeculativeOptions, speculative_options

logger = logging.getLogger(__name__)

EXIT_STATUS_FITS, EXIT_STATUS_TOO_LARGE, EXIT_STATUS_BAD_INPUT = 0, 1, 2
# Who simulates a plan over a load: one of these flags -> function(argv: list[str]) -> int.
LOAD_GROUP = "headway.plan"
LOAD_FLAGS = ("--trace", "--generate")


def main(argv: list[str]) -> int:
    """Answer for the arguments after `headway plan`; returns the exit status."""
    if any(one.partition("=")[0] in LOAD_FLAGS for one in argv):
        return _over_a_load(argv)
    try:
        try:
            arguments = build_parser().parse_args(argv)
        except ConfigError as error:
            if str(error).startswith(("unknown flag", "unrecognized arguments")):
                raise ConfigError(
                    f"{error}; flags of a load, such as -f and --slo, need --trace FILE or --generate KIND"
                ) from None
            raise
        answer = answer_of(arguments)
    except HeadwayRuntimeError as error:
        print(f"headway plan: {error}", file=sys.stderr)
        return EXIT_STATUS_BAD_INPUT
    except Exception as error:
        logger.exception("the plan broke off")
        return broke_off(error)
    print(json.dumps(as_json(answer), indent=2) if arguments.json else text(answer))
    return EXIT_STATUS_FITS if answer.fit.fits else EXIT_STATUS_TOO_LARGE


def broke_off(error: Exception) -> int:
    """The exit status for a fault of the program, which is no answer: 1 would say that it does not fit."""
    print(f"headway plan: broke off: {type(error).__name__}: {error}", file=sys.stderr)
    return EXIT_STATUS_BAD_INPUT


def _over_a_load(argv: list[str]) -> int:
    """Replicas and costs of a load are simulated, by who contributes that: nothing here knows of loads."""
    found = list(entry_points(group=LOAD_GROUP))
    if not found:
        print("headway plan: a load needs the simulator; install the whole checkout", file=sys.stderr)
        return EXIT_STATUS_BAD_INPUT
    try:
        simulate = found[0].load()
    except ModuleNotFoundError as error:
        print(
            f"headway plan over a load needs {error.name!r}; remedy: pip install -e '.[runtime,simulate]' in "
            "the checkout",
            file=sys.stderr,
        )
        return EXIT_STATUS_BAD_INPUT
    return int(simulate(argv))


def build_parser(*, is_model_needed: bool = True) -> CommandParser:
    """The flags of a plan without a load. is_model_needed: whether nothing else can name one."""
    parser = CommandParser(
        prog="headway plan",
        description="Show the arithmetic of a model's memory on a GPU or a machine, and bounds of its speed.",
        epilog="With --trace FILE or --generate KIND also: replicas and costs of a load, simulated, and "
        "which lever pays; "
        "`headway plan --trace FILE --help` lists what goes with it.",
        raises=ConfigError,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP, nargs=None if is_model_needed else "?")
    add_source_arguments(parser)
    where = parser.add_argument_group("the device (default: this machine's memory)").add_argument
    where("--gpu", choices=tuple(GPU_KINDS), help="kind of GPU: its memory, bandwidth and arithmetic")
    where(
        "--memory",
        type=size,
        metavar="SIZE",
        help="of one GPU, or of the machine, e.g. 80Gi (default: the GPU's)",
    )
    where(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what --memory is of (auto: cuda)"
    )
    where(
        "--bandwidth",
        type=size,
        metavar="SIZE",
        help="bytes a second of its memory, for bounds and costs of a device that is no --gpu, e.g. 4.8T",
    )
    where("--flops", type=size, metavar="N", help="likewise: dense FLOP a second in that dtype, e.g. 989.5T")
    ranks = parser.add_mutually_exclusive_group()
    for name in ("--tensor-parallel-size", "--num-gpus"):
        ranks.add_argument(name, type=integer(1, 1024), dest="num_ranks", default=1, metavar="N")
    add("--dtype", choices=("auto", *STORED_DTYPES), default="auto")
    add("--quantization", "-q", choices=QUANTIZATIONS, default="auto")
    add("--weight-compression", choices=get_args(WeightCompression), default="auto")
    add("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    add("--max-model-len", type=integer(2), metavar="TOKENS", help="(default: the model's own)")
    add(
        "--max-num-seqs",
        type=integer(1),
        metavar="N",
        help=f"if given, so many sequences must fit at once (default: {GPU_NUM_SEQS} in a step of a GPU and "
        f"{CPU_NUM_SEQS} in one of a CPU, of which one must)",
    )
    add("--max-num-batched-tokens", type=integer(1), default=DEFAULT_MAX_NUM_BATCHED_TOKENS, metavar="N")
    add("--block-size", type=integer(1, 256), default=16, help="tokens per KV block")
    add("--speculative-config", metavar="JSON", help="as of headway serve: a draft takes memory, too")
    add("--enable-lora", action="store_true", help="as of headway serve: room for adapters")
    for name, most in (
        ("--max-loras", MOST_LORAS),
        ("--max-cpu-loras", MOST_LORAS),
        ("--max-lora-rank", MAX_RANK),
    ):
        add(name, type=integer(1, most), metavar="N", help="likewise")
    add(
        "--kv-offloading-size",
        type=gibibytes,
        metavar="GIB",
        help="as of headway serve: main memory, which is the device's own on a CPU",
    )
    add("--context", type=integer(1), metavar="TOKENS", help="of each sequence (default: --max-model-len)")
    add(
        "--concurrency",
        type=integer(1),
        metavar="N",
        help="so many sequences must fit at once, and are what bounds and costs are of (default: those that "
        "fit, at most --max-num-seqs)",
    )
    add(
        "--price-per-gpu-hour",
        "--price",
        type=not_negative,
        metavar="USD",
        help="for the cost of a million tokens",
    )
    add(
        "--efficiency",
        type=share,
        metavar="SHARE",
        help=f"part of the bound that an engine reaches, for the cost (default: {DEFAULT_EFFICIENCY})",
    )
    add("--json", action="store_true", help="the same numbers in bytes and seconds")
    return parser


def answer_of(arguments: argparse.Namespace) -> Answer:
    """Whether it fits, and how fast it could be. Raises HeadwayRuntimeError."""
    kind = None if arguments.gpu is None else GPU_KINDS[arguments.gpu]
    check_flags(arguments, kind)
    folder = resolve(
        arguments.model,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        headers_only=True,
    )
    headers = read_headers(folder)
    question = _question(arguments, folder, headers, kind)
    fit = assess(question)
    changes = [] if fit.fits else nearest_changes(question, lambda one: one.fits)
    changes = [_with_concurrency(one, arguments.concurrency) for one in changes]
    device = _told_device(question, kind)
    measured = kind or _own_kind(arguments, question, device)
    speed = None if measured is None else _speed(arguments, fit, measured)
    return Answer(arguments.model, device, fit, changes, speed, headers)


def _with_concurrency(change: Change, concurrency: int | None) -> Change:
    """What it leaves of the sequences that `--concurrency` asked for is to be told with the same flag."""
    number = change.fit.question.num_sequences
    if concurrency is None or number >= concurrency:
        return change
    return replace(change, flags=f"{change.flags} --concurrency {number}")


def _own_kind(arguments: argparse.Namespace, question: Question, device: str) -> GpuKind | None:
    """Of a device that is in no table."""
    if arguments.bandwidth is None:
        return None
    told = "as --bandwidth and --flops say"
    return GpuKind(
        *("own", device, question.memory_bytes, arguments.bandwidth, float(arguments.flops), None, told),
        LEAST_CAPABILITY,
        MULTIPROCESSORS_UNTOLD,
    )


def _question(
    arguments: argparse.Namespace, folder: Path, headers: Headers | None, kind: GpuKind | None
) -> Question:
    model = read_model_config(folder)
    loaded = LoadedModel(
        model,
        choose_quantization(arguments.quantization, folder),
        frozenset() if headers is None else headers.plain_modules,
    )
    length = arguments.max_model_len or model.max_position_embeddings
    if length > model.longest_context:
        raise ConfigError(
            f"--max-model-len={length} is more than the model's {model.told_longest_context}; ask for "
            "at most that"
        )
    context = arguments.context or length
    if context > length:
        raise ConfigError(f"--context={context} is more than --max-model-len, {length}; ask for at most that")
    is_cpu = arguments.device == "cpu" or (kind is None and arguments.memory is None)
    dtype = served_dtype(arguments.dtype, model.dtype, loaded.quantization, is_cpu=is_cpu)
    # Ranks on CPUs share a machine, and each has its part of it.
    ranks = arguments.num_ranks
    if is_cpu:
        memory = (arguments.memory or free_memory_bytes()) // ranks
    else:
        memory = arguments.memory or (0 if kind is None else kind.memory_bytes)
    speculative = speculative_options(
        arguments.speculative_config, folder, arguments.download_dir, headers_only=True
    )
    lora = lora_bounds(arguments)
    most, together = arguments.max_num_seqs, arguments.concurrency or 1
    default = CPU_NUM_SEQS if is_cpu else GPU_NUM_SEQS
    return Question(
        model=loaded,
        placement=this_processor(dtype, max(1, usable_cpus() // ranks), arguments.weight_compression)
        if is_cpu
        else gpu_placement(dtype, kind),
        kv_cache_dtype=chosen_kv_cache_dtype(arguments.kv_cache_dtype, folder),
        max_model_len=length,
        max_num_seqs=most or max(min(default, arguments.max_num_batched_tokens), together),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        context=context,
        num_sequences=most or together,
        memory_bytes=memory,
        overhead_bytes=CPU_OVERHEAD_BYTES if is_cpu else CUDA_OVERHEAD_BYTES,
        block_size=arguments.block_size,
        num_ranks=ranks,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        draft=_draft(speculative),
        num_adapters=0 if lora is None else lora.max_cpu_loras,
        adapter_rank=0 if lora is None else lora.max_lora_rank,
        offload_bytes=int((arguments.kv_offloading_size or 0) * GIB),
    )


def _draft(speculative: SpeculativeOptions | None) -> LoadedModel | None:
    if speculative is None or speculative.config.model_path is None:
        return None
    folder = Path(speculative.config.model_path)
    headers = read_headers(folder)
    plain = frozenset() if headers is None else headers.plain_modules
    return LoadedModel(read_model_config(folder), choose_quantization("auto", folder), plain)


def _speed(arguments: argparse.Namespace, fit: Fit, kind: GpuKind) -> Speed:
    """Of as many sequences as were asked for; if they do not fit, of those that do."""
    number = arguments.concurrency if fit.fits else None
    most = max(1, min(fit.sequences_that_fit, fit.question.max_num_seqs))
    together = bounds(fit, kind, number or most)
    efficiency = DEFAULT_EFFICIENCY if arguments.efficiency is None else arguments.efficiency
    return Speed(kind, bounds(fit, kind, 1), together, arguments.price_per_gpu_hour, efficiency)


def _told_device(question: Question, kind: GpuKind | None) -> str:
    if kind is not None:
        return kind.product
    return "a CPU" if question.placement.is_cpu else "a GPU"
