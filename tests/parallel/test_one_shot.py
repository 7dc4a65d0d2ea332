"""Which tensors ranks add up in one kernel, and that they all do, or none; the kernel itself needs GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton.launch import DEFAULT, Gpu, configuration
from headway_runtime.parallel import one_shot
from headway_runtime.parallel.one_shot import SmallSums, most_bytes_for, open_small_sums
from headway_runtime.parallel.share import Share
from headway_runtime.parallel.tensor_group import TensorGroup

CUDA = torch.device("cuda", 0)


class Done:
    def wait(self) -> None:
        """It is."""


class Processes:
    """Another rank that has the same numbers; adds up in place, as NCCL does."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def allreduce(self, tensors: list[Tensor]) -> Done:
        for tensor in tensors:
            self.shapes.append(tuple(tensor.shape))
            tensor.mul_(2)
        return Done()

    broadcast: Any = None
    allgather: Any = None
    gather: Any = None
    abort: Any = None


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (torch.ones(4, 8), True),
        (torch.ones(4, 8, dtype=torch.bfloat16), True),
        (torch.ones(32, 8), True),
        (torch.ones(33, 8), False),
        (torch.ones(3), False),
        (torch.ones(0, 8), False),
        (torch.ones(4, 8, dtype=torch.float16), False),
        (torch.ones(8, 8).t()[:4], False),
    ],
    ids=["small", "bfloat16", "as large as may be", "larger", "odd", "nothing", "float16", "in pieces"],
)
def test_small_tensors_are_added_up_in_one_kernel_and_others_by_nccl(x: Tensor, *, want: bool) -> None:
    processes = Processes()
    group = TensorGroup(Share(0, 2), processes, SmallSums(doubled, 1024))
    twice = x * 2

    total = group.add_up(x)

    assert torch.equal(total, twice)
    assert (processes.shapes == []) == want
    assert group.traffic.num_exchanges == 1
    assert group.traffic.num_bytes == x.nbytes


@pytest.mark.parametrize("size", one_shot.SIZES)
def test_the_limit_comes_from_the_table(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway_runtime.kernels.triton import launch

    gpu = Gpu("some gpu", 90, 132)
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu)

    want = configuration(one_shot.KERNEL, str(size), Gpu(DEFAULT, 90, 132))["most_bytes"]
    assert most_bytes_for(Share(0, size), CUDA) == want > 0
    # More ranks, more bytes that each of them reads.
    assert want * size >= 1 << 20


@pytest.mark.parametrize(
    ("share", "device"), [(Share(0, 2), torch.device("cpu")), (Share(0, 3), CUDA), (Share(0, 16), CUDA)]
)
def test_other_devices_and_numbers_of_ranks_are_nccls(share: Share, device: torch.device) -> None:
    assert most_bytes_for(share, device) == 0


def agree(*others: bool) -> Callable[[bool], bool]:
    """What all come to when another rank says these, in turn."""
    words = iter(others)
    return lambda own: own and next(words)


def refused() -> Any:
    raise RuntimeError("no direct access")


@pytest.mark.parametrize(
    ("can_share", "make", "others", "want"),
    [
        (True, lambda: doubled, (True, True), True),
        (False, lambda: doubled, (True, True), False),
        (True, lambda: doubled, (False, True), False),
        (True, refused, (True, True), False),
        (True, lambda: doubled, (True, False), False),
    ],
    ids=["all can", "this rank cannot", "another cannot", "this one fails", "another one fails"],
)
def test_all_ranks_do_it_or_none(
    *, can_share: bool, make: Callable[[], Any], others: tuple[bool, ...], want: bool
) -> None:
    found = open_small_sums(1024, lambda: can_share, make, agree(*others))

    assert (found is not None) == want


def test_without_a_limit_nobody_is_asked() -> None:
    assert open_small_sums(0, refused, refused, agree()) is None
