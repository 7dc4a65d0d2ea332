"""What ranks say to each other, beside tensors. Plain data; `wire` carries it."""

from dataclasses import dataclass, field
from typing import Literal

from headway_runtime.config import EngineConfig

# Of what follows; another version of this package is refused by it.
PROTOCOL = 2

# calls: what rank 0 has the others compute, and their answers. watch: signs of life.
# node: signs of life of a node without rank 0, which starts that node's ranks.
Role = Literal["calls", "watch", "node"]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection, to rank 0.

    rank: the node's first, where a node speaks. token: proves that rank 0's own process has started the rank.
    agreed: what all nodes must say alike, by the flag's name; a node tells it.
    """

    role: Role
    rank: int
    node_rank: int
    pid: int
    token: str = ""
    protocol: int = PROTOCOL
    agreed: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a Hello of one who cannot take part."""

    message: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to any other; for a rank's calls, once all ranks are there.

    store_port: where the ranks' tensors meet. host: this process' own address for the others, where rank 0
        knows it better. config: rank 0's; the model's folder, and what is the node's own, are not of it.
    """

    store_port: int = 0
    host: str = ""
    config: EngineConfig | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the runner, and what it is called with. is_confirmed: rank 0 waits for a Report.

    alike: the attribute of the result in which all ranks must agree; "" for none.
    """

    method: str
    arguments: tuple[object, ...]
    is_confirmed: bool = False
    alike: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """error: what a confirmed call raised. value: what is to be agreed on. alike: what the Call asks for."""

    value: int = 0
    error: str | None = None
    alike: object = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The least of all values."""

    value: int


# On the connections that watch: a byte each, of which the last two are followed by a message. Each ping wants
# a PING back.
PING = b"p"
# The same, once all ranks can compute.
PING_READY = b"y"
# Rank 0 ends in good order.
BYE = b"b"
FAILED = b"f"
RANK_ENDED = b"r"


@dataclass(frozen=True, slots=True)
class Failed:
    """The last word of a rank that cannot start. status: that its process ends with."""

    message: str
    status: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A node tells of one of its ranks. status: as subprocess has it, negative for a signal."""

    rank: int
    status: int
