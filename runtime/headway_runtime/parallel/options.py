"""The flags that say how many processes share a model, and on which nodes, by vLLM's names. No torch."""

import argparse

from headway.argument_types import integer, positive
from headway_runtime.config import ParallelConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.placement import one_rank
from headway_runtime.model_config import ModelConfig

DEFAULT_PORT = 29501
DEFAULT_TIMEOUT_SECONDS = 600.0
MOST_RANKS = 1024


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        type=integer(1, MOST_RANKS),
        default=1,
        metavar="N",
        help="processes that share each layer, on a GPU each (default %(default)s)",
    )
    add(
        "--nnodes",
        type=integer(1, MOST_RANKS),
        default=1,
        metavar="N",
        help="nodes that these are on, equally many on each (default %(default)s)",
    )
    add(
        "--node-rank",
        type=integer(0, MOST_RANKS - 1),
        default=0,
        metavar="N",
        help="this node's number; 0 is the engine and answers, others only compute (default %(default)s)",
    )
    add(
        "--master-addr",
        default="127.0.0.1",
        metavar="HOST",
        help="of node 0, as the others reach it (default %(default)s)",
    )
    add(
        "--master-port",
        type=integer(1, 65535),
        default=DEFAULT_PORT,
        metavar="PORT",
        help="where node 0 listens for the others, with --nnodes above 1 (default %(default)s)",
    )
    add(
        "--distributed-timeout-seconds",
        type=positive,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="for all processes to come and to load their share (default %(default)s)",
    )


def parallel_config(arguments: argparse.Namespace, model: ModelConfig) -> ParallelConfig:
    """ConfigError for numbers that do not fit each other or the model, with the arithmetic."""
    size, num_nodes, node_rank = arguments.tensor_parallel_size, arguments.nnodes, arguments.node_rank
    if size % num_nodes:
        raise ConfigError(
            f"--tensor-parallel-size={size}: {size} ranks cannot be shared out evenly among "
            f"--nnodes={num_nodes}; choose a multiple of {num_nodes}"
        )
    if node_rank >= num_nodes:
        raise ConfigError(
            f"--node-rank={node_rank}: with --nnodes={num_nodes} there are nodes 0 to {num_nodes - 1}; give "
            "each node its own"
        )
    one_rank(model, size)
    return ParallelConfig(
        size,
        num_nodes,
        node_rank,
        arguments.master_addr,
        arguments.master_port,
        arguments.distributed_timeout_seconds,
    )
