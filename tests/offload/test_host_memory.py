"""Memory beside a GPU is pinned exactly as it was asked for, and no longer than it is used."""

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headway_runtime.errors import ConfigError
from headway_runtime.offload import host_memory
from headway_runtime.offload.host_memory import PORTABLE, PinnedMemory

CPU = torch.device("cpu")
# Neither a power of two nor whole pages.
NUM_BYTES = 5 * 2**20 + 1000


@dataclass
class Cuda:
    """What registers pages, by CUDA's own names. registered: sizes by address."""

    answers: dict[str, int] = field(default_factory=dict)
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's
        assert flags == PORTABLE
        answer = self.answers.get("register", 0)
        if answer == 0:
            self.registered[address] = num_bytes
        return answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's
        del self.registered[address]
        return self.answers.get("unregister", 0)

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802 - CUDA's
        return {2: "out of memory", 4: "driver shutting down"}[error]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_as_much_is_pinned_as_was_asked_for(cuda: Cuda) -> None:
    memory = PinnedMemory(NUM_BYTES, CPU)

    assert cuda.registered == {memory.bytes.data_ptr(): NUM_BYTES}
    assert memory.bytes.nbytes == memory.bytes.untyped_storage().nbytes() == NUM_BYTES
    assert memory.bytes.data_ptr() % 4096 == 0
    memory.bytes.fill_(7)
    assert int(memory.bytes.sum(dtype=torch.int64)) == 7 * NUM_BYTES


def test_it_is_let_go_once_when_it_is_closed(cuda: Cuda) -> None:
    memory = PinnedMemory(NUM_BYTES, CPU)
    memory.close()
    assert cuda.registered == {}
    memory.close()


def test_it_is_let_go_before_its_pages_are_by_whoever_forgets_to_close_it(cuda: Cuda) -> None:
    memory = PinnedMemory(NUM_BYTES, CPU)
    slots = memory.bytes.view(torch.uint8)[:10]
    del memory
    gc.collect()

    assert cuda.registered == {}
    assert slots.fill_(3).tolist() == [3] * 10


def test_what_a_device_may_still_copy_to_stays_pinned_and_nobody_gets_its_pages(cuda: Cuda) -> None:
    memory = PinnedMemory(NUM_BYTES, CPU)
    address = memory.bytes.data_ptr()
    memory.leave()
    memory.close()
    del memory
    gc.collect()

    assert cuda.registered == {address: NUM_BYTES}
    assert host_memory._left.pop().data_ptr() == address


def test_what_cannot_be_pinned_is_told_with_cudas_word(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next launch does not get that error once more."""
    launched: list[Any] = []
    monkeypatch.setattr(torch, "ones", lambda *size, device: launched.append(device))
    cuda.answers["register"] = 2

    with pytest.raises(
        ConfigError, match=rf"{NUM_BYTES} bytes .* cannot be pinned .*CUDA error 2, out of memory\); lower it"
    ):
        PinnedMemory(NUM_BYTES, CPU)

    assert launched == [CPU]


def test_what_stays_pinned_is_told_and_harms_nothing(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.answers["unregister"] = 4
    PinnedMemory(NUM_BYTES, CPU).close()

    assert f"{NUM_BYTES} bytes stay pinned until this process ends" in caplog.text


def test_more_memory_than_the_system_gives_is_told(cuda: Cuda) -> None:
    with pytest.raises(ConfigError, match=r"--kv-offloading-size: \d+ bytes of memory cannot be had"):
        PinnedMemory(2**60, CPU)
    assert cuda.registered == {}
