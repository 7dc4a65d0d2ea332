"""Steps that are replayed make the host wait for nothing else either, whatever they end in."""

from collections.abc import Callable
from typing import Any

import pytest

from headway_runtime.config import Envelope, Limits, SpeculativeConfig
from headway_runtime.graphs import opening
from headway_runtime.graphs.recording import Recorder

Start = Callable[..., Any]
SMALL: dict[str, Any] = {
    "envelope": Envelope(4, 16),
    "limits": Limits(4, 16),
    "num_layers": 1,
    "cuda_graph_sizes": (3,),
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(opening, "make_capturer", lambda device: recorder)
    return recorder


def run(driver: Any, device: Any, most_waits: int, **sampling: Any) -> list[list[int]]:
    """Tokens of three prompts. sampling: of the second one."""
    while driver.engine.has_idle_work:
        driver.engine.work_idly()
    device.take_copies()  # recording waits for all that it begins
    prompts = ([3, 1, 4, 1, 5], [9, 2, 9, 2], [7])
    for number, prompt in enumerate(prompts):
        own = sampling if number == 1 else {}
        driver.add(str(number), prompt, **{"temperature": 0.0, "max_tokens": 5, **own})
    while driver.engine.has_work:
        device.num_waits = 0
        with device.watching():
            outputs = driver.engine.step(0.0).outputs
        assert device.num_waits <= most_waits
        driver.engine.check_integrity()
        for one in outputs:
            driver.outputs[one.request_id].append(one)
    return [driver.tokens(str(number)) for number in range(len(prompts))]


@pytest.mark.parametrize(
    "asked",
    [{"seed": 4, "temperature": 0.8, "top_k": 9}, {"num_logprobs": 2, "logit_bias": ((3, 2.0),)}],
    ids=["up to tokens", "up to logits"],
)
def test_a_replayed_step_is_waited_for_once(
    asked: dict[str, Any], start: Start, fake_device: Any, recorder: Recorder
) -> None:
    want = run(start(**SMALL, overlap=False, enforce_eager=True), fake_device, 1, **asked)
    driver = start(**SMALL)

    assert run(driver, fake_device, 1, **asked) == want
    assert driver.counter("recorded_steps") >= driver.counter("steps") - 2


def test_all_guesses_of_a_step_are_waited_for_once(
    start: Start, fake_device: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft model's passes each is launched from memory that none of the others is launched from."""
    limits: dict[str, Any] = {"envelope": Envelope(4, 32, 4), "limits": Limits(4, 32, 4)}
    want = run(start(**SMALL, overlap=False, enforce_eager=True), fake_device, 1)
    path = start(**SMALL, enforce_eager=True).engine.config.model_path
    speculative = SpeculativeConfig("draft_model", path, adaptive=False)
    driver = start(**SMALL | limits, speculative=speculative)

    # The passes, and the step; at first there is one in which the draft reads the prompts, too.
    assert run(driver, fake_device, 3) == want
    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_accepted >= 8
    assert driver.counter("recorded_steps") >= driver.counter("steps") - 1
