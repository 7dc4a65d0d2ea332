"""CUDA keeps a current device for each thread: who steps an engine takes the engine's."""

import threading
from typing import Any

import pytest
import torch

from headway_runtime.runner import Runner


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """Which thread was given which device."""
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device))
    )
    return found


def runner_on(device: torch.device) -> Any:
    runner = Runner.__new__(Runner)
    runner._device = device
    return runner


def test_a_thread_that_enters_a_runner_has_its_device(set_devices: list[tuple[str, torch.device]]) -> None:
    runner = runner_on(torch.device("cuda", 3))

    thread = threading.Thread(target=runner.enter_thread, name="steps")
    thread.start()
    thread.join(20)

    assert set_devices == [("steps", torch.device("cuda", 3))]


def test_on_a_cpu_there_is_nothing_to_take(set_devices: list[tuple[str, torch.device]]) -> None:
    runner_on(torch.device("cpu")).enter_thread()

    assert set_devices == []
