"""A rank above 0 joins: both its connections with rank 0. Imports no torch, so that it is quick."""

import os
import socket

from headway_runtime.parallel.link import await_answer, connect, say_hello
from headway_runtime.parallel.messages import Accepted, Hello, Role
from headway_runtime.parallel.spawn import RankLaunch
from headway_runtime.parallel.wire import send


def say_hellos(launch: RankLaunch) -> tuple[socket.socket, socket.socket]:
    """Both connections, for calls and to be watched; the answer on the first is yet to come."""
    watch = connect(launch.host, launch.port, launch.timeout_seconds)
    say_hello(watch, _hello(launch, "watch"), launch.timeout_seconds)
    calls = connect(launch.host, launch.port, launch.timeout_seconds)
    send(calls, _hello(launch, "calls"))
    return calls, watch


def await_accepted(launch: RankLaunch, calls: socket.socket) -> Accepted:
    """Until all ranks are there."""
    accepted = await_answer(calls, launch.timeout_seconds)
    calls.settimeout(None)
    return accepted


def _hello(launch: RankLaunch, role: Role) -> Hello:
    return Hello(role, launch.rank, launch.node_rank, os.getpid(), launch.token)
