"""Between the launch of a step and its reading nothing makes the host wait, in any layer that a GPU has."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from headway_runtime.config import Envelope, Limits, SpeculativeConfig

Start = Callable[..., Any]
# Decodes, a prompt in chunks, and one that begins with what another one computed.
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [53], list(range(20)), [*range(18), 60, 61])
SMALL: dict[str, Any] = {"envelope": Envelope(4, 16), "limits": Limits(4, 16)}


def run(driver: Any, device: Any, *, prompts: Any = PROMPTS, **sampling: Any) -> list[list[int]]:
    """Tokens of all prompts. One turn waits once at most."""
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, **{"temperature": 0.0, "max_tokens": 4, **sampling})
    while driver.engine.has_work:
        device.num_waits = 0
        with device.watching():
            outputs = driver.engine.step(0.0).outputs
        assert device.num_waits <= 1
        driver.engine.check_integrity()
        for one in outputs:
            driver.outputs[one.request_id].append(one)
    return [driver.tokens(str(number)) for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param("dense", {}, id="dense"),
        pytest.param("dense", {"kv_cache_dtype": "fp8"}, id="KV in fp8"),
        pytest.param("dense", {"kv_cache_dtype": "int8"}, id="KV in int8"),
        pytest.param("head norms", {}, id="norms of heads"),
        pytest.param("windows", {}, id="windows and soft caps"),
        pytest.param("experts", {}, id="experts"),
        pytest.param("wide", {"quantization": "int4"}, id="int4"),
        pytest.param("wide", {"quantization": "int8"}, id="int8"),
        pytest.param("wide", {"quantization": "fp8"}, id="fp8"),
        pytest.param("experts", {"quantization": "fp8"}, id="experts in fp8"),
    ],
)
def test_no_layer_makes_the_host_wait(
    shape: str, changes: dict[str, Any], start: Start, fake_device: Any
) -> None:
    overlapping = run(start(shape, **SMALL, **changes), fake_device)
    plain = run(start(shape, **SMALL, **changes, overlap=False), fake_device)
    assert overlapping == plain
    assert [len(tokens) for tokens in plain] == [4] * len(PROMPTS)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 1.0, "seed": 3}, id="draws"),
        pytest.param({"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9, "min_p": 0.01}, id="filters"),
        pytest.param({"num_logprobs": 3}, id="log-probabilities"),
        pytest.param({"logit_bias": ((3, 2.0),), "min_tokens": 3, "stop_token_ids": frozenset({4})}, id="edits"),
        pytest.param({"repetition_penalty": 1.2, "presence_penalty": 0.3}, id="penalties"),
    ],
)
def test_no_way_of_sampling_makes_the_host_wait(
    sampling: dict[str, Any], start: Start, fake_device: Any
) -> None:
    overlapping, plain = start(**SMALL), start(**SMALL, overlap=False)
    assert run(overlapping, fake_device, **sampling) == run(plain, fake_device, **sampling)
    if "num_logprobs" in sampling:
        for name in plain.outputs:
            got, want = overlapping.logprobs(name), plain.logprobs(name)
            assert [one.chosen for one in got] == pytest.approx([one.chosen for one in want], abs=1e-4)


def test_checking_guesses_makes_the_host_wait_for_nothing_else(start: Start, fake_device: Any) -> None:
    guessing: dict[str, Any] = {
        "speculative": SpeculativeConfig("ngram", adaptive=False),
        "envelope": Envelope(4, 32, 3),
        "limits": Limits(4, 32, 3),
    }
    driver = start(**guessing)
    want = run(start(**SMALL), fake_device, prompts=[[7, 8, 9] * 5], max_tokens=12)
    assert run(driver, fake_device, prompts=[[7, 8, 9] * 5], max_tokens=12) == want
    assert driver.metrics.snapshot().drafts.num_tokens > 0


def test_tokens_that_are_computed_again_do_not_make_the_host_wait(start: Start, fake_device: Any) -> None:
    prompts = [list(range(index, index + 14)) for index in range(3)]
    small = {**SMALL, "max_model_len": 64, "enable_prefix_caching": False}
    want = run(start(**small, overlap=False), fake_device, prompts=prompts, max_tokens=24)
    driver = start(**small, num_blocks=6)
    assert run(driver, fake_device, prompts=prompts, max_tokens=24) == want
    assert driver.counter("preemptions") > 0


def test_clearing_blocks_does_not_make_the_host_wait(start: Start, fake_device: Any) -> None:
    driver = start(**SMALL, num_blocks=9)
    cleared: list[int] = []
    clear = driver.engine._runner.clear_blocks

    def noted(blocks: Any) -> None:
        cleared.extend(blocks)
        clear(blocks)

    driver.engine._runner.clear_blocks = noted
    for number in range(6):
        driver.add(f"gone {number}", range(number, number + 60), temperature=0.0, max_tokens=8)
        for _ in range(3):
            with fake_device.watching():
                driver.engine.step(0.0)
        driver.engine.abort(f"gone {number}", 0.0)
    while driver.engine.has_work:
        with fake_device.watching():
            driver.engine.step(0.0)
    assert cleared


def plant(place: str, look: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a function of a module, or a method of a class there, look into the device's memory."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def planted(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        seen = [one for one in (result, *arguments) if isinstance(one, Tensor)]
        look(seen[0].flatten()[:1])
        return result

    monkeypatch.setattr(owner, name, planted)


KERNELS = "headway_runtime.kernels.triton"
LAYERS = "headway_runtime.layers"


@pytest.mark.parametrize(
    ("place", "shape", "changes"),
    [
        pytest.param("headway_runtime.models.decoder:Decoder._embedded", "dense", {}, id="embedding"),
        pytest.param(f"{KERNELS}.norm:Norm.__call__", "dense", {}, id="norm"),
        pytest.param(f"{LAYERS}.linear:Linear.__call__", "dense", {}, id="product"),
        pytest.param(f"{KERNELS}.rotate_and_store:RotateAndStore.__call__", "head norms", {}, id="rotation"),
        pytest.param(f"{KERNELS}.paged_attention:PagedAttention.attend", "dense", {}, id="attention"),
        pytest.param(f"{LAYERS}.experts:GatedMLP.__call__", "dense", {}, id="gate"),
        pytest.param(f"{LAYERS}.fused_experts:FusedExperts.__call__", "experts", {}, id="experts"),
        pytest.param(
            f"{LAYERS}.coded_linear:CodedLinear.__call__", "wide", {"quantization": "int4"}, id="coded product"
        ),
        pytest.param(
            f"{LAYERS}.coded_linear:CodedRowsLinear.__call__",
            "wide",
            {"quantization": "fp8"},
            id="coded rows",
        ),
        pytest.param("headway_runtime.models.decoder:Decoder.logits", "dense", {}, id="head"),
        pytest.param("headway_runtime.device_sampler:draw", "dense", {}, id="draws"),
        pytest.param("headway_runtime.token_feed:TokenFeed.fill", "dense", {}, id="feed"),
    ],
)
def test_a_wait_in_any_layer_is_noticed(
    place: str,
    shape: str,
    changes: dict[str, Any],
    start: Start,
    fake_device: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = start(shape, **SMALL, **changes)
    plant(place, lambda found: found.item(), monkeypatch)
    with pytest.raises(AssertionError, match="makes the host wait"):
        run(driver, fake_device)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda found: found.tolist(), id="tolist"),
        pytest.param(lambda found: found.cpu(), id="cpu"),
        pytest.param(lambda found: found.numpy(), id="numpy"),
        pytest.param(lambda found: bool(found == 0), id="bool"),
        pytest.param(lambda found: float(found), id="float"),
        pytest.param(lambda found: found.isfinite().all().item(), id="item of a sum"),
        pytest.param(lambda found: found.nonzero(), id="nonzero"),
        pytest.param(lambda found: found[found > 0], id="mask"),
        pytest.param(lambda found: found.masked_select(found > 0), id="masked_select"),
        pytest.param(lambda found: found.unique(), id="unique"),
        pytest.param(lambda found: torch.equal(found, found), id="equal"),
        pytest.param(lambda found: torch.tensor([1.0]), id="a tensor of the host's numbers"),
        pytest.param(
            lambda found: found + torch.from_numpy(numpy.ones(1, numpy.float32)), id="a blocking copy"
        ),
        pytest.param(lambda found: torch.cuda.synchronize(), id="synchronize"),
    ],
)
def test_any_kind_of_wait_is_noticed(
    look: Callable[[Tensor], Any], start: Start, fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(**SMALL)
    plant(f"{KERNELS}.norm:Norm.__call__", look, monkeypatch)
    with pytest.raises(AssertionError, match=r"wait|host's memory"):
        run(driver, fake_device)


def test_a_step_that_reuses_the_memory_of_one_under_way_is_noticed(start: Start, fake_device: Any) -> None:
    driver = start(**SMALL)
    integers = driver.engine._runner._inputs._integers
    assert len(integers._hosts) == 2
    del integers._hosts[1], integers._arrays[1]
    with pytest.raises(AssertionError, match="the host wrote where a step that is under way reads"):
        run(driver, fake_device)


def test_what_was_not_waited_for_is_nonsense(
    start: Start, fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(start(**SMALL), fake_device)
    from headway_runtime import transfers

    driver = start(**SMALL)
    monkeypatch.setattr(transfers.Moment, "wait", lambda self: None)
    assert run(driver, fake_device) != want
