"""The ranks of rank 0's own node, started before anything heavy is imported, so that all import at once."""

import errno
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from headway_runtime.config import ParallelConfig
from headway_runtime.errors import ConfigError
from headway_runtime.parallel.gathering import Gathering
from headway_runtime.parallel.spawn import RankLaunch
from headway_runtime.parallel.watch import OnFailure, RankWatch


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """address: of this node, on which it listens."""

    address: str
    watch: RankWatch
    gathering: Gathering

    def close(self) -> None:
        """End them."""
        self.watch.close()
        self.gathering.close()


def start_ranks(
    parallel: ParallelConfig,
    num_threads: int,
    agreed: Mapping[str, object],
    on_failure: OnFailure | None = None,
    log_level: str = "info",
) -> StartedRanks:
    """ConfigError for an address that cannot be listened on.

    agreed: what other nodes must say alike. on_failure: called on a thread, once.
    """
    listener = _listen(parallel)
    host, port = listener.getsockname()[:2]
    token = secrets.token_hex(16)
    launches = [
        RankLaunch(
            rank=rank,
            node_rank=0,
            local_rank=rank,
            host=host if host not in ("0.0.0.0", "::") else "127.0.0.1",
            port=port,
            token=token,
            parent_pid=os.getpid(),
            timeout_seconds=parallel.timeout_seconds,
            num_threads=num_threads,
            log_level=log_level,
        )
        for rank in parallel.ranks_of(0)[1:]
    ]
    watch = RankWatch(parallel, launches, on_failure)
    return StartedRanks(host, watch, Gathering(listener, parallel, token, agreed, watch))


def _listen(parallel: ParallelConfig) -> socket.socket:
    """On one node, where only this machine comes; else where the others are told to come.

    That may be an address of nobody's here, such as a Kubernetes Service's: then on all of this node's.
    """
    if parallel.num_nodes == 1:
        return socket.create_server(("127.0.0.1", 0), backlog=256)
    address = (parallel.master_addr, parallel.master_port)
    try:
        return socket.create_server(address, backlog=256)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"--master-port={parallel.master_port!r}: cannot be listened on ({error}); choose another "
                "one, on all nodes"
            ) from error
    try:
        return socket.create_server(("", parallel.master_port), backlog=256)
    except OSError as error:
        raise ConfigError(
            f"--master-port={parallel.master_port!r}: cannot be listened on ({error}); choose another one, "
            "on all nodes"
        ) from error
