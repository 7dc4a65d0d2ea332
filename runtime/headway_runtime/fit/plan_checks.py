"""Which flags of `headway plan` make no sense together: said before anything is read."""

import argparse

from headway_runtime.errors import ConfigError
from headway_runtime.fit.gpu_kinds import GpuKind


def check_flags(arguments: argparse.Namespace, kind: GpuKind | None) -> None:
    """Raises ConfigError. kind: that of `--gpu`."""
    is_cpu = arguments.device == "cpu"
    if kind is not None and is_cpu:
        raise ConfigError(f"--gpu={kind.name!r} is no CPU; leave --device=cpu out")
    has_speed = kind is not None or arguments.bandwidth is not None
    _check_own_kind(arguments, kind)
    if arguments.price_per_gpu_hour is not None and not has_speed:
        raise ConfigError(
            f"--price-per-gpu-hour={arguments.price_per_gpu_hour!r}: how many tokens an hour makes hangs on "
            "the kind of GPU; give --gpu, or --bandwidth and --flops"
        )
    if arguments.concurrency is not None and not has_speed:
        raise ConfigError(
            f"--concurrency={arguments.concurrency!r} is for bounds of a kind of GPU; give --gpu, or "
            "--bandwidth and --flops, or --max-num-seqs for so many sequences to fit at once"
        )
    most = arguments.max_num_seqs
    if arguments.concurrency is not None and most is not None and arguments.concurrency > most:
        raise ConfigError(
            f"--concurrency={arguments.concurrency!r} is more than --max-num-seqs={most!r}: so many are "
            "never computed at once; lower it, or raise --max-num-seqs"
        )
    if arguments.efficiency is not None and arguments.price_per_gpu_hour is None:
        raise ConfigError(
            f"--efficiency={arguments.efficiency!r} is for the cost of a million tokens; give "
            "--price-per-gpu-hour, or leave it out"
        )
    is_for_gpus = arguments.device == "cuda" or (arguments.num_ranks > 1 and not is_cpu)
    if kind is None and arguments.memory is None and is_for_gpus:
        raise ConfigError(
            "a plan for GPUs needs to know their memory; give --gpu KIND or --memory SIZE, or --device cpu"
        )


def _check_own_kind(arguments: argparse.Namespace, kind: GpuKind | None) -> None:
    given = {"--bandwidth": arguments.bandwidth, "--flops": arguments.flops}
    for flag, value in given.items():
        if value is None:
            continue
        if kind is not None:
            raise ConfigError(f"{flag}={value!r}: --gpu={kind.name!r} says it already; leave out one of them")
        if None in given.values():
            raise ConfigError(f"{flag}={value!r}: bounds need both; give --bandwidth and --flops")
