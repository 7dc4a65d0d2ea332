"""What recordings take is told from what others of the device do, as far as a device tells."""

import pytest
import torch

from headway_runtime.graphs.capture import CudaCapturer
from headway_runtime.graphs.graph_memory import MOST_DRIVER_BYTES, GraphMemory, UsedBytes

MIB, GIB = 1 << 20, 1 << 30
BEFORE = UsedBytes(pool=20 * GIB, rest=3 * GIB)


@pytest.mark.parametrize(
    ("after", "want"),
    [
        pytest.param(UsedBytes(20 * GIB + 60 * MIB, 3 * GIB), 60 * MIB, id="in PyTorch's pool"),
        pytest.param(UsedBytes(20 * GIB, 3 * GIB + 5 * MIB), 5 * MIB, id="in the driver's"),
        pytest.param(UsedBytes(20 * GIB + 2 * MIB, 9 * GIB), 2 * MIB + MOST_DRIVER_BYTES, id="another grows"),
        pytest.param(UsedBytes(20 * GIB + 60 * MIB, GIB), 60 * MIB, id="another shrinks"),
        pytest.param(UsedBytes(19 * GIB, 3 * GIB + MIB), MIB, id="less than before"),
    ],
)
def test_a_recording_is_counted_whatever_others_do(after: UsedBytes, want: int) -> None:
    memory = GraphMemory(limit_bytes=GIB, num_bytes=100)

    memory.recorded(BEFORE, after)

    assert memory.num_bytes == 100 + want
    assert not memory.is_full


def test_a_gpu_tells_pytorchs_part_of_what_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = object.__new__(CudaCapturer)
    capturer._device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {3: 25 * GIB}[device.index])

    assert capturer.used_bytes() == UsedBytes(25 * GIB, 15 * GIB)
