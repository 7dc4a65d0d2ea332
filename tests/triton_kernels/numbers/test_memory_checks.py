"""The other tests' kernels are held to their tensors' memory, and one that leaves it is caught."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from headway_runtime.kernels.triton.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="nobody looks at what a GPU's threads access")


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    source, target, first_read, first_written, num_read, num_written
):
    lanes = tl.arange(0, 16)
    numbers = tl.load(source + first_read + lanes, mask=lanes < num_read, other=1.0)
    tl.store(target + first_written + lanes, numbers, mask=lanes < num_written)


@triton.jit
def count_kernel(counters, place):  # type: ignore[no-untyped-def]
    tl.atomic_add(counters + place, 1)


@pytest.mark.parametrize(
    ("reads", "writes", "want"),
    [
        pytest.param((0, 13), (0, 12), "a load of 4 bytes, 0 bytes past the end of one of 48", id="read"),
        pytest.param((9, 3), (1, 12), "a store of 4 bytes, 0 bytes past the end of one of 48", id="written"),
        pytest.param((-(1 << 40), 1), (0, 1), "a load of 4 bytes, before all tensors", id="before"),
    ],
)
def test_what_lies_beside_tensors_is_not_touched(
    reads: tuple[int, int], writes: tuple[int, int], want: str, device: torch.device
) -> None:
    source, target = (torch.zeros(12, device=device) for _ in range(2))
    with pytest.raises(InterpreterError, match=want):
        copy_kernel[(1,)](source, target, reads[0], writes[0], reads[1], writes[1])


def test_masked_lanes_touch_nothing(device: torch.device) -> None:
    source, target = torch.arange(12.0, device=device), torch.zeros(12, device=device)

    copy_kernel[(1,)](source, target, 4, 0, 8, 12)
    copy_kernel[(1,)](source, target, 1000, 1000, 0, 0)

    assert target.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 1.0, 1.0, 1.0, 1.0]


def test_counters_are_tensors_too(device: torch.device) -> None:
    counters = torch.zeros(2, dtype=torch.int32, device=device)

    count_kernel[(1,)](counters, 1)
    with pytest.raises(
        InterpreterError, match="an atomic operation of 4 bytes, 4 bytes past the end of one of 8"
    ):
        count_kernel[(1,)](counters, 3)

    assert counters.tolist() == [0, 1]
