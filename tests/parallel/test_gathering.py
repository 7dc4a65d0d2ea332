"""Who says hello to rank 0: nonsense is let go, and keeps nobody else out."""

import socket
from collections.abc import Callable, Iterator

import pytest

from headway_runtime.config import ParallelConfig
from headway_runtime.parallel import wire
from headway_runtime.parallel.gathering import Gathering
from headway_runtime.parallel.messages import Accepted, Hello, Refused
from headway_runtime.parallel.watch import RankWatch

# A pickle of a Hello that lacks all its fields.
EMPTY = b"\x80\x05cheadway_runtime.parallel.messages\nHello\n)\x81."


@pytest.fixture
def open_gathering() -> Iterator[Callable[..., tuple[Gathering, tuple[str, int]]]]:
    """open_gathering(**of ParallelConfig): one that waits, and its address."""
    opened: list[tuple[RankWatch, Gathering]] = []

    def make(**changes: int) -> tuple[Gathering, tuple[str, int]]:
        parallel = ParallelConfig(**({"size": 2, "num_nodes": 2} | changes), timeout_seconds=60.0)  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        watch = RankWatch(parallel, [], None)
        gathering = Gathering(listener, parallel, "secret", {}, watch)
        opened.append((watch, gathering))
        return gathering, address

    yield make
    for watch, gathering in opened:
        watch.close()
        gathering.close()


def answer_to(address: tuple[str, int], hello: object) -> object:
    with socket.create_connection(address, 10) as stranger:
        stranger.sendall(
            wire.LENGTH.pack(len(hello)) + hello if isinstance(hello, bytes) else wire.encode(hello)
        )
        answer = wire.receive(stranger)
        if isinstance(answer, Refused):
            assert stranger.recv(1) == b"", "the connection is left open"
        return answer


@pytest.mark.parametrize(
    ("nonsense", "told"),
    [
        (Hello("calls", 1, 1, 0, token=5), "token=5 of a Hello: want str"),  # type: ignore[arg-type]
        (Hello("node", 1, 1, 0, agreed=None), "agreed=None of a Hello: want dict"),  # type: ignore[arg-type]
        (Hello("calls", 1, "x", 0), "node_rank='x' of a Hello: want int"),  # type: ignore[arg-type]
        (Hello("watch", 1, "x", 0), "node_rank='x' of a Hello: want int"),  # type: ignore[arg-type]
        (Hello("watch", [1], 1, 0), "rank=[1] of a Hello: want int"),  # type: ignore[arg-type]
        (Hello("watch", 1.0, 1, 0), "rank=1.0 of a Hello: want int"),  # type: ignore[arg-type]
        (Hello("watch", True, 1, 0), "rank=True of a Hello: want int"),
        (Hello(["node"], 1, 1, 0), "role=['node'] of a Hello: want str"),  # type: ignore[arg-type]
        (Hello("calls", 1, 0, 0, token="\udc80"), "a rank of node 0 that its engine has not started"),
        (Hello("watch", 7, 1, 0), "rank 7 is here already, or unknown"),
        pytest.param(EMPTY, "role=None of a Hello", id="no fields"),
        (Accepted(), "want a Hello first"),
    ],
)
def test_a_hello_that_makes_no_sense_is_told_so_and_keeps_nobody_out(
    nonsense: object, told: str, open_gathering: Callable[..., tuple[Gathering, tuple[str, int]]]
) -> None:
    gathering, address = open_gathering()
    refused = answer_to(address, nonsense)
    assert isinstance(refused, Refused)
    assert told in refused.message
    assert answer_to(address, Hello("node", 1, 1, 0)) == Accepted()
    assert gathering.calls == {}


def test_no_stranger_takes_the_place_of_a_rank_of_node_0_as_another_node(
    open_gathering: Callable[..., tuple[Gathering, tuple[str, int]]],
) -> None:
    """Only who knows the engine's secret is one of its own ranks."""
    _, address = open_gathering(num_nodes=1)
    for node_rank in (1, -1):
        refused = answer_to(address, Hello("watch", 1, node_rank, 0))
        assert isinstance(refused, Refused)
        assert "rank 1 is of node 0" in refused.message
    assert answer_to(address, Hello("watch", 1, 0, 0, token="secret")) == Accepted()
