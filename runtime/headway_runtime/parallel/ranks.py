"""What a runner needs of the processes that share its model: one that is alone, the first one, or another.

A method that `on_all_ranks` marks runs on each of them, with the same arguments, in the order in which the
first one calls them. This is the one place to make work happen everywhere:

    @on_all_ranks                  each rank computes its part; an error ends the engine
    @on_all_ranks(confirmed=True)  what may fail on one rank alone: the first one waits for all and raises for
                                   those that failed; the ranks that did not must be able to go on
    @on_all_ranks(confirmed=True, alike="digest")  the same; fails where a rank's result has another digest
    @on_all_ranks(told=compact)    others are called with compact(self, *arguments) instead

Arguments are plain data (see `wire`), a rank's own result is all that its caller gets, and such a method may
call another.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar, overload

import torch

from headway_runtime.errors import HeadwayRuntimeError, RankDiedError
from headway_runtime.parallel.messages import Call
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup

Method = TypeVar("Method", bound=Callable[..., Any])


class Ranks(Protocol):
    """The processes that share a model, as one of them sees it. num_local: of them on this node."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def num_local(self) -> int: ...
    @property
    def local_rank(self) -> int:
        """Which one of this node's it is: the number of its GPU."""

    @property
    def is_usable(self) -> bool:
        """Whether all do the same, as far as is known."""

    def open(self, device: torch.device) -> TensorGroup:
        """Connect their tensors; once all of them have come."""

    def agree(self, value: int) -> int:
        """The least of what all of them say; waits for all."""

    def ready(self) -> None:
        """This rank can compute."""

    def call(self, call: Call, work: Callable[[], Any]) -> Any:
        """`work` here, and the same call on the others, if this is the first."""

    def waiting(self) -> AbstractContextManager[None]:
        """Meanwhile this rank may wait for its device, which may wait for other ranks' numbers: if that does
        not end in time, the engine does."""

    def close(self) -> None:
        """End the others, if this is the first."""


class OnlyRank:
    """A process that has the whole model."""

    rank, size, num_local, local_rank, is_usable = 0, 1, 1, 0, True

    def open(self, device: torch.device) -> TensorGroup:
        return ALONE

    def agree(self, value: int) -> int:
        return value

    def ready(self) -> None:
        """Nobody waits for it."""

    def call(self, call: Call, work: Callable[[], Any]) -> Any:
        return work()

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """There are no others."""


class HasRanks(Protocol):
    ranks: Ranks


@overload
def on_all_ranks(method: Method) -> Method: ...
@overload
def on_all_ranks(
    *, confirmed: bool = False, alike: str = "", told: Callable[..., tuple[object, ...]] | None = None
) -> Callable[[Method], Method]: ...


def on_all_ranks(
    method: Callable[..., Any] | None = None,
    *,
    confirmed: bool = False,
    alike: str = "",
    told: Callable[..., tuple[object, ...]] | None = None,
) -> Any:
    """See the top of this file. The object has its ranks as `ranks`."""
    assert confirmed or not alike, "what nobody reports cannot be compared"

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def on_all(self: HasRanks, *arguments: object) -> Any:
            ranks = self.ranks
            if ranks.size == 1 or ranks.rank > 0:
                return method(self, *arguments)
            own = arguments if told is None else told(self, *arguments)
            return ranks.call(Call(method.__name__, own, confirmed, alike), lambda: method(self, *arguments))

        on_all.is_on_all_ranks = True  # type: ignore[attr-defined]
        return on_all

    return decorate if method is None else decorate(method)


def serves_call(target: object, call: Call) -> Callable[..., Any]:
    """The method that rank 0 calls. RankDiedError for one that no rank may be told to call."""
    method = getattr(type(target), call.method, None)
    if not getattr(method, "is_on_all_ranks", False):
        raise RankDiedError(f"{call.method!r} is no method that all ranks run; run one version on all nodes")
    assert method is not None
    return lambda *arguments: method(target, *arguments)


def told_error(error: Exception) -> str:
    """For another rank: an error of ours speaks for itself."""
    return str(error) if isinstance(error, HeadwayRuntimeError) else f"{type(error).__name__}: {error}"
