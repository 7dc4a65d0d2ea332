"""Who says hello to rank 0: nonsense is let go, and keeps nobody else out."""

import socket

import pytest

from headway_runtime.config import ParallelConfig
from headway_runtime.parallel import wire
from headway_runtime.parallel.gathering import Gathering
from headway_runtime.parallel.messages import Accepted, Hello
from headway_runtime.parallel.watch import RankWatch


@pytest.mark.parametrize(
    "nonsense",
    [
        Hello("calls", 1, 0, 0, token=5),  # type: ignore[arg-type]
        Hello("node", 1, 1, 0, agreed=None),  # type: ignore[arg-type]
        b"nothing of ours",
    ],
    ids=["no token", "no words", "no hello"],
)
def test_a_hello_that_makes_no_sense_keeps_nobody_out(nonsense: object) -> None:
    parallel = ParallelConfig(size=2, num_nodes=2, timeout_seconds=60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    watch = RankWatch(parallel, [], None)
    gathering = Gathering(listener, parallel, "secret", {}, watch)
    try:
        with socket.create_connection(address, 10) as stranger:
            wire.send(stranger, nonsense)
            assert b"want a Hello" in (answer := stranger.recv(4096)) or not answer
        with socket.create_connection(address, 10) as node:
            wire.send(node, Hello("node", 1, 1, 0))
            assert wire.receive(node) == Accepted()
    finally:
        watch.close()
        gathering.close()
