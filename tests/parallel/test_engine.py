"""A whole engine over two ranks gives the tokens of one: with everything that moves KV or guesses tokens."""

from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits, OffloadConfig, SpeculativeConfig
from headway_runtime.errors import HeadwayRuntimeError, RankDiedError
from headway_runtime.parallel.messages import Call
from headway_runtime.parallel.ranks import serves_call

NUM_TOKENS = 24


def answers(driver: Any, prompts: list[list[int]], **sampling: Any) -> dict[str, list[int]]:
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens=NUM_TOKENS, **sampling)
        driver.step()
    driver.run()
    return {str(index): driver.tokens(str(index)) for index in range(len(prompts))}


def both(single: Any, pair: Any, folder: Any, **changes: Any) -> tuple[Any, Any]:
    """Drivers of one rank and of two."""
    return single(folder, **changes), pair(folder, **changes)


def test_mixed_batches(checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any) -> None:
    reference = checkpoint("qwen3 moe")
    one, two = both(
        single_driver, pair_driver, reference.folder, envelope=Envelope(16, 32), limits=Limits(16, 32)
    )
    prompts = random_prompts(3, [1, 17, 60, 90, 33])
    assert answers(two, prompts) == answers(one, prompts)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_drawn_tokens(
    checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any, *, overlap: bool
) -> None:
    reference = checkpoint("llama")
    one, two = both(single_driver, pair_driver, reference.folder, overlap=overlap)
    prompts = random_prompts(4, [20, 40])
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    assert answers(two, prompts, **sampling) == answers(one, prompts, **sampling)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapping"])
def test_preemption(
    checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any, *, overlap: bool
) -> None:
    reference = checkpoint("llama")
    prompts = random_prompts(5, [90, 60, 80, 20, 75])
    # 64 blocks of 4 tokens on either: a rank has half the KV heads.
    bytes_of = {1: reference.kv_bytes(65, 4), 2: reference.kv_bytes(65, 4) // 2}
    shared = {"block_size": 4, "max_model_len": 200, "overlap": overlap}
    one = single_driver(reference.folder, kv_cache_memory_bytes=bytes_of[1], **shared)
    two = pair_driver(reference.folder, kv_cache_memory_bytes=bytes_of[2], **shared)
    assert answers(two, prompts) == answers(one, prompts)
    assert two.counter("preemptions") == one.counter("preemptions") > 0


def test_prefix_cache(checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any) -> None:
    reference = checkpoint("llama")
    (prefix, *tails) = random_prompts(6, [64, 10, 20])
    prompts = [prefix, *(prefix + tail for tail in tails)]
    one, two = both(single_driver, pair_driver, reference.folder)
    assert answers(two, prompts) == answers(one, prompts)
    counted = "cached_tokens"
    assert two.counter(counted) == one.counter(counted) > 0


def test_offload(checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any) -> None:
    """Each rank keeps its own part of what leaves the KV cache."""
    reference = checkpoint("llama")
    prompts = random_prompts(6, [150] * 4) * 2
    shared = {"block_size": 4, "max_model_len": 200, "offload": OffloadConfig(reference.kv_bytes(400, 4))}
    one = single_driver(reference.folder, kv_cache_memory_bytes=reference.kv_bytes(65, 4), **shared)
    two = pair_driver(reference.folder, kv_cache_memory_bytes=reference.kv_bytes(65, 4) // 2, **shared)
    assert answers(two, prompts) == answers(one, prompts)
    found = [driver.metrics.snapshot().offload for driver in (one, two)]
    assert found[0].host.hit_tokens == found[1].host.hit_tokens > 300
    assert [one.host.limit_bytes for one in found] == [reference.kv_bytes(400, 4), reference.kv_bytes(200, 4)]


def test_prompt_logprobs(checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any) -> None:
    """Logits of single rows are a call of all ranks, too."""
    reference = checkpoint("gemma2")
    (prompt,) = random_prompts(7, [40])
    found = []
    for driver in both(single_driver, pair_driver, reference.folder):
        driver.add("a", prompt, max_tokens=2, num_prompt_logprobs=3)
        driver.run()
        (entries,) = [one.prompt_logprobs for one in driver.outputs["a"] if one.prompt_logprobs]
        found.append([one.chosen for one in entries if one is not None])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), atol=3e-4, rtol=0.0)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation(
    method: Any, checkpoint: Any, single_driver: Any, pair_driver: Any, random_prompts: Any
) -> None:
    reference = checkpoint("llama")
    # The model guesses for itself, on rank 0 alone, which has all of the draft.
    draft = str(reference.folder) if method == "draft_model" else None
    changes = {
        "speculative": SpeculativeConfig(method, draft, 1, 3, adaptive=False),
        "envelope": Envelope(8, 256, 3),
        "limits": Limits(8, 256, 3),
    }
    (piece, other) = random_prompts(8, [12, 30])
    prompts = [piece * 4, other]
    plain = answers(single_driver(reference.folder), prompts)
    two = pair_driver(reference.folder, **changes)
    assert answers(two, prompts) == plain
    drafts = two.metrics.snapshot().drafts
    assert drafts.num_tokens > 0
    if method == "draft_model":
        assert drafts.num_accepted > 0.8 * drafts.num_tokens


def test_a_request_that_fails_alone_leaves_ranks_in_step(
    checkpoint: Any, pair_driver: Any, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling is rank 0's own: what fails there, no other rank has to hear of."""
    reference = checkpoint("llama")
    driver = pair_driver(reference.folder)
    (prompt,) = random_prompts(9, [20])
    runner = driver.engine._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner._sampler, "launch", lambda *_: [][0])
        driver.add("a", prompt, max_tokens=4)
        driver.run()
    assert driver.outputs["a"][-1].error == "IndexError: list index out of range"
    assert runner.is_usable()
    assert len(answers(driver, [prompt])["0"]) == NUM_TOKENS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_confirmed_call_tells_who_failed(rank: int, pair: Any) -> None:
    kind, told = (LookupError, "no such file") if rank == 0 else (HeadwayRuntimeError, "rank 1 on node 0: ")
    with pytest.raises(kind, match=told):
        pair.check(rank, "no such file")
    # All go on.
    assert pair.check(-1, "") == 0


def test_only_marked_methods_are_called(pair: Any) -> None:
    assert callable(serves_call(pair, Call("clear_blocks", ())))
    for name in ("close", "_free_bytes", "__init__", "missing"):
        with pytest.raises(RankDiedError, match="is no method that all ranks run"):
            serves_call(pair, Call(name, ()))
