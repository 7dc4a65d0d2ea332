"""Between the launch of a step and its reading nothing makes the host wait, in any layer that a GPU has."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.config import Envelope, Limits, SpeculativeConfig
from headway_runtime.kernels.triton import expert_inputs
from headway_runtime.layers import quantizer
from headway_runtime.layers.quantized_weights import Int8Input

Start = Callable[..., Any]
# What memory of the fake device's host holds before anything was waited for.
NONSENSE = 77
# A prompt in chunks, decodes beside it, and one that begins with what another one computed.
PROMPTS = ([3, 1, 4, 1, 5], list(range(18)), [*range(17), 60])
SMALL: dict[str, Any] = {"envelope": Envelope(4, 16), "limits": Limits(4, 16), "num_layers": 1}
# Interpreting takes long: what all layers do alike is looked at in one of them.


def run(driver: Any, device: Any, prompts: Sequence[list[int]] = PROMPTS, **sampling: Any) -> list[list[int]]:
    """Tokens of all prompts. sampling: of all; a list has one for each."""
    for number, prompt in enumerate(prompts):
        own = {name: one[number] if isinstance(one, list) else one for name, one in sampling.items()}
        driver.add(str(number), prompt, **{"temperature": 0.0, "max_tokens": 3, **own})
    turn(driver, device)
    return [driver.tokens(str(number)) for number in range(len(prompts))]


def turn(driver: Any, device: Any, most: int = 1000) -> None:
    """Until all is done. A turn waits once at most."""
    while driver.engine.has_work and most:
        most -= 1
        device.num_waits = 0
        with device.watching():
            outputs = driver.engine.step(0.0).outputs
        assert device.num_waits <= 1
        driver.engine.check_integrity()
        for one in outputs:
            driver.outputs[one.request_id].append(one)


def test_tokens_are_those_of_the_plain_loop(start: Start, fake_device: Any) -> None:
    overlapping, plain = start(**SMALL), start(**SMALL, overlap=False)
    want = run(plain, fake_device)
    assert run(overlapping, fake_device) == want
    assert run(overlapping, fake_device, PROMPTS[2:]) == want[2:]
    assert overlapping.counter("cached_tokens") == 16


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param("head norms", {"kv_cache_dtype": "fp8"}, id="norms of heads, KV in fp8"),
        pytest.param("windows", {"kv_cache_dtype": "int8", "num_layers": 2}, id="windows, KV in int8"),
        pytest.param("experts", {}, id="experts"),
        pytest.param("experts", {"quantization": "fp8"}, id="experts in fp8"),
        *(
            pytest.param(f"experts, {what}", {}, id=f"experts, {what}")
            for what in ("coded inputs", "act-order", "narrow blocks", "unlike")
        ),
        pytest.param("wide", {"quantization": "int4"}, id="int4"),
        pytest.param("wide", {"quantization": "int8"}, id="int8"),
        pytest.param("wide", {"quantization": "fp8"}, id="fp8"),
        pytest.param("coded inputs", {}, id="int8, inputs too"),
    ],
)
def test_no_layer_makes_the_host_wait(
    shape: str, changes: dict[str, Any], start: Start, fake_device: Any
) -> None:
    found = run(start(shape, **SMALL | changes), fake_device)
    assert [len(tokens) for tokens in found] == [3, 3, 3]


def test_experts_with_measured_inputs_do_not_make_the_host_wait(
    start: Start, fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    coded_inputs = expert_inputs.coded_inputs

    def noted(x: Tensor, *arguments: Any, **named: Any) -> Any:
        called.append(len(x))
        return coded_inputs(x, *arguments, **named)

    monkeypatch.setattr(quantizer, "Int8Input", lambda **kinds: Int8Input(0.05, 3))
    monkeypatch.setattr(expert_inputs, "coded_inputs", noted)
    found = run(start("experts, coded inputs", **SMALL), fake_device, PROMPTS[:1])
    assert len(found[0]) == 3
    assert called


def test_no_way_of_sampling_makes_the_host_wait(start: Start, fake_device: Any) -> None:
    prompts = [[5, 9], [7], [40], [3, 3]]
    asked: dict[str, Any] = {
        "temperature": [1.0, 0.8, 0.0, 0.0],
        "seed": [3, 4, 0, 0],
        "top_k": [0, 9, 0, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0],
        "num_logprobs": [None, 2, None, 0],
        "logit_bias": [(), (), ((3, 2.0),), ()],
        "min_tokens": [0, 0, 0, 2],
        "stop_token_ids": [frozenset(), frozenset(), frozenset(), frozenset({4})],
    }
    overlapping, plain = start(**SMALL), start(**SMALL, overlap=False)
    assert run(overlapping, fake_device, prompts, **asked) == run(plain, fake_device, prompts, **asked)
    for name in ("1", "3"):
        got, want = overlapping.logprobs(name), plain.logprobs(name)
        assert len(got) == 3
        assert [one.chosen for one in got] == pytest.approx([one.chosen for one in want], abs=1e-4)


def test_penalties_count_tokens_that_the_host_has_not_read(start: Start, fake_device: Any) -> None:
    asked: dict[str, Any] = {
        "repetition_penalty": [1.5, 1.0, 1.3, 1.0],
        "presence_penalty": [0.3, 0.9, 0.0, 0.0],
        "frequency_penalty": [0.0, 0.4, 0.2, 0.0],
        "logit_bias": [(), ((3, 2.0), (5, 2.0)), (), ((3, 1.0),)],
        "temperature": [0.0, 0.0, 0.9, 0.0],
        "max_tokens": 6,
    }
    prompts = [[5, 9, 9], [7], [40, 40, 3], [3, 3]]
    overlapping, plain = start(**SMALL), start(**SMALL, overlap=False)
    assert not overlapping.engine._scheduler.needs_reading
    want = run(plain, fake_device, prompts, **asked)
    assert run(overlapping, fake_device, prompts, **asked) == want
    unpenalized = asked | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert run(overlapping, fake_device, prompts, **unpenalized) != want, "they would prove nothing"


def test_penalized_requests_are_launched_before_their_tokens_are_read(start: Start, fake_device: Any) -> None:
    driver = start(**SMALL)
    driver.add("a", [5, 9, 9], temperature=0.0, max_tokens=4, repetition_penalty=1.5, num_prompt_logprobs=1)
    brought = []
    for _ in range(5):
        turn(driver, fake_device, 1)
        brought.append(len(driver.outputs["a"]))
    assert brought == [0, 1, 2, 3, 4]


def test_log_probabilities_of_prompts_do_not_make_the_host_wait(start: Start, fake_device: Any) -> None:
    overlapping, plain = start(**SMALL), start(**SMALL, overlap=False)
    asked: dict[str, Any] = {"num_prompt_logprobs": [2, 0, None], "num_logprobs": [None, 1, None]}
    assert run(overlapping, fake_device, **asked) == run(plain, fake_device, **asked)
    for name, num_top in (("0", 2), ("1", 0)):
        got, want = (one.outputs[name][0].prompt_logprobs for one in (overlapping, plain))
        assert len(got) == len(PROMPTS[int(name)])
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert (mine.rank, len(mine.top)) == (theirs.rank, num_top)
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)
    assert overlapping.outputs["2"][0].prompt_logprobs is None


def test_checking_guesses_makes_the_host_wait_for_nothing_else(start: Start, fake_device: Any) -> None:
    guessing: dict[str, Any] = {
        "speculative": SpeculativeConfig("ngram", adaptive=False),
        "envelope": Envelope(4, 32, 3),
        "limits": Limits(4, 32, 3),
    }
    driver = start(**SMALL | guessing)
    (tokens,) = run(driver, fake_device, [[8] * 5], max_tokens=6, logit_bias=((8, 100.0),))
    assert tokens == [8] * 6
    assert driver.metrics.snapshot().drafts.num_accepted > 0


def test_tokens_that_are_computed_again_do_not_make_the_host_wait(start: Start, fake_device: Any) -> None:
    prompts = [list(range(index, index + 30)) for index in range(2)]
    limits = {"envelope": Envelope(4, 64), "limits": Limits(4, 64)}
    driver = start(**SMALL | limits, max_model_len=64, num_blocks=5, enable_prefix_caching=False)
    found = run(driver, fake_device, prompts, max_tokens=6)
    assert [len(tokens) for tokens in found] == [6, 6]
    assert driver.counter("preemptions") > 0


def test_clearing_blocks_does_not_make_the_host_wait(start: Start, fake_device: Any) -> None:
    limits = {"envelope": Envelope(4, 64), "limits": Limits(4, 64)}
    driver = start(**SMALL | limits, max_model_len=64, num_blocks=4, enable_prefix_caching=False)
    cleared: list[int] = []
    clear = driver.engine._runner.clear_blocks

    def noted(blocks: Any) -> None:
        cleared.extend(blocks)
        clear(blocks)

    driver.engine._runner.clear_blocks = noted
    driver.add("gone", range(60), temperature=0.0)
    turn(driver, fake_device, 1)
    driver.engine.abort("gone", 0.0)
    driver.add("next", range(50), temperature=0.0, max_tokens=1)
    turn(driver, fake_device)
    assert cleared, "nobody knows what is left by a step that was not read"


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
        pytest.param(f"{KERNELS}.norm:Norm._launch", "dense", {}, id="norm"),
        pytest.param(f"{LAYERS}.linear:Linear.__call__", "dense", {}, id="product"),
        pytest.param(f"{KERNELS}.rotate_and_store:RotateAndStore.__call__", "head norms", {}, id="rotation"),
        pytest.param(f"{KERNELS}.paged_attention:PagedAttention.attend", "dense", {}, id="attention"),
        pytest.param(f"{LAYERS}.experts:GatedMLP.__call__", "dense", {}, id="gate"),
        pytest.param(f"{LAYERS}.fused_experts:FusedExperts.__call__", "experts", {}, id="experts"),
        pytest.param(
            f"{KERNELS}.expert_rows_product:expert_rows_product",
            "experts, coded inputs",
            {},
            id="experts, coded inputs",
        ),
        pytest.param(
            f"{KERNELS}.expert_inputs:ordered_inputs", "experts, act-order", {}, id="experts, act-order"
        ),
        pytest.param(
            f"{LAYERS}.coded_linear:CodedLinear.__call__",
            "wide",
            {"quantization": "int4"},
            id="coded product",
        ),
        pytest.param(
            f"{KERNELS}.coded_rows_product:CodedRowsProduct.__call__", "coded inputs", {}, id="coded rows"
        ),
        pytest.param("headway_runtime.models.decoder:Decoder.logits", "dense", {}, id="head"),
        pytest.param("headway_runtime.device_sampler:draw", "dense", {}, id="draws"),
        pytest.param("headway_runtime.token_feed:TokenFeed.fill", "dense", {}, id="feed"),
        pytest.param("headway_runtime.device_edits:edited", "dense", {}, id="edits"),
        pytest.param("headway_runtime.logprobs:_begun", "dense", {}, id="log-probabilities of prompts"),
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
    driver = start(shape, **SMALL | changes)
    plant(place, lambda found: found.item(), monkeypatch)
    with pytest.raises(AssertionError, match="makes the host wait"):
        run(driver, fake_device, [[3, 4]], frequency_penalty=0.5, num_prompt_logprobs=1)


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
    plant("headway_runtime.models.decoder:Decoder._embedded", look, monkeypatch)
    with pytest.raises(AssertionError, match=r"wait|host's memory"):
        run(driver, fake_device, [[3]])


def test_a_step_that_reuses_the_memory_of_one_under_way_is_noticed(start: Start, fake_device: Any) -> None:
    driver = start(**SMALL)
    integers = driver.engine._runner._inputs._integers
    assert len(integers._hosts) == 2
    del integers._hosts[1], integers._arrays[1]
    with pytest.raises(AssertionError, match="the host wrote where a step that is under way reads"):
        run(driver, fake_device, [[3]])


def test_what_was_not_waited_for_is_nonsense(
    start: Start, fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start(**SMALL)
    monkeypatch.setattr(transfers.Moment, "wait", lambda self: None)
    assert run(driver, fake_device, [[3]], max_tokens=2) == [[NONSENSE, NONSENSE]]
