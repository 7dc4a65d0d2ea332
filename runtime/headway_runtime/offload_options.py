"""The flags that say where prefix blocks go that the KV cache has no room for, and what they come to."""

import argparse
from pathlib import Path

from headway.argument_types import gibibytes
from headway_runtime.config import OffloadConfig
from headway_runtime.errors import ConfigError

GIB = 2**30


def add_offload_arguments(parser: argparse.ArgumentParser) -> None:
    """Host memory in vLLM's words; the disk in ours."""
    add = parser.add_argument
    add(
        "--kv-offloading-size",
        type=gibibytes,
        metavar="GIB",
        help="host memory, in GiB and for all ranks together, for prefixes that the KV cache has no room for "
        "(default: they are lost)",
    )
    add(
        "--kv-offloading-disk-path",
        metavar="FOLDER",
        help="where what is in that memory is written to, too, to be found again after it is given up, and "
        "by the next engine of the same model; local, and nobody else's to read (default: nowhere)",
    )
    add(
        "--kv-offloading-disk-size",
        type=gibibytes,
        metavar="GIB",
        help="what files there may take, in GiB (needed with the folder)",
    )


def offload_config(arguments: argparse.Namespace, num_ranks: int) -> OffloadConfig | None:
    """ConfigError for flags that make no sense together. num_ranks: that share the model."""
    size, path = arguments.kv_offloading_size, arguments.kv_offloading_disk_path
    disk_size = arguments.kv_offloading_disk_size
    if size is None:
        for flag, value in (("path", path), ("size", disk_size)):
            if value is not None:
                raise ConfigError(
                    f"--kv-offloading-disk-{flag}={value!r}: blocks come to the disk through host memory; "
                    "give --kv-offloading-size, too"
                )
        return None
    if not arguments.enable_prefix_caching:
        raise ConfigError(
            f"--kv-offloading-size={size!r}: without the prefix cache nothing is found again; leave out "
            "--no-enable-prefix-caching or --kv-offloading-size"
        )
    if (path is None) != (disk_size is None):
        given, missing = ("path", "size") if disk_size is None else ("size", "path")
        raise ConfigError(
            f"--kv-offloading-disk-{given}={path if disk_size is None else disk_size!r}: give "
            f"--kv-offloading-disk-{missing}, too"
        )
    if path is None:
        return OffloadConfig(int(size * GIB))
    if num_ranks > 1:
        raise ConfigError(
            f"--kv-offloading-disk-path={path!r}: {num_ranks} ranks could lose different files of one block; "
            "leave it out, host memory is shared out over them, or give --tensor-parallel-size 1"
        )
    return OffloadConfig(int(size * GIB), str(Path(path).absolute()), int(disk_size * GIB))
