"""Log-probabilities of prompts against transformers', computed whole and in chunks, among other requests."""

from typing import Any

import pytest
import torch

from headway_runtime import logprobs
from headway_runtime.config import Envelope, Limits
from headway_runtime.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from headway_runtime.sequence import Sequence
from headway_runtime.sources import BUNDLED_FOLDER

NUM_TOP = 4


def check(
    entries: tuple[TokenLogprobs | None, ...] | None, prompt: list[int], logits: torch.Tensor, num_top: int
) -> None:
    """logits: [tokens, vocab], the reference's after each token of the prompt."""
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    want = logits.log_softmax(-1)
    for position, entry in enumerate(entries[1:], 1):
        row = want[position - 1]
        assert entry is not None
        assert entry.chosen == pytest.approx(float(row[prompt[position]]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
        for token, value in entry.top:
            assert value == pytest.approx(float(row[token]), abs=1e-3)


def only_first_has_them(outputs: list[RequestOutput]) -> bool:
    return outputs[0].prompt_logprobs is not None and all(one.prompt_logprobs is None for one in outputs[1:])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"envelope": Envelope(16, 24), "limits": Limits(16, 24)}, id="chunks"),
        pytest.param({"envelope": Envelope(4, 7), "limits": Limits(4, 7)}, id="odd chunks"),
    ],
)
def test_they_equal_the_references(
    changes: Any, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint("mha, untied")
    driver = start_engine(reference.folder, **changes)
    prompts = random_prompts(31, [1, 2, 17, 90, 61, 5])
    for index, prompt in enumerate(prompts):
        driver.add(
            str(index), prompt, temperature=0.0, max_tokens=6, num_prompt_logprobs=index % 3 and NUM_TOP
        )
        driver.add(f"{index}-other", prompt, temperature=0.0, max_tokens=6)
        driver.step()
    driver.run()
    for index, prompt in enumerate(prompts):
        outputs = driver.outputs[str(index)]
        assert only_first_has_them(outputs)
        check(outputs[0].prompt_logprobs, prompt, reference.logits(prompt), index % 3 and NUM_TOP)
        assert all(one.prompt_logprobs is None for one in driver.outputs[f"{index}-other"])
        assert driver.tokens(str(index)) == driver.tokens(f"{index}-other")


def test_they_equal_those_of_the_bundled_model(start_engine: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = BUNDLED_FOLDER / "headway-tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.randint(0, 1536, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    for batched_tokens in (256, 32):
        limits = {"envelope": Envelope(4, batched_tokens), "limits": Limits(4, batched_tokens)}
        driver = start_engine(folder, dtype="float32", **limits)
        driver.add("a", prompt, temperature=0.0, max_tokens=2, num_prompt_logprobs=NUM_TOP)
        driver.run()
        assert only_first_has_them(driver.outputs["a"])
        check(driver.outputs["a"][0].prompt_logprobs, prompt, logits, NUM_TOP)


def test_a_preemption_neither_repeats_nor_loses_any(
    checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    reference = checkpoint("gqa")
    driver = start_engine(
        kv_cache_memory_bytes=reference.kv_bytes(23), envelope=Envelope(8, 24), limits=Limits(8, 24)
    )
    prompts = random_prompts(5, [90, 60, 80, 20, 75])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, temperature=0.0, max_tokens=64, num_prompt_logprobs=NUM_TOP)
    driver.run()
    assert driver.counter("preemptions") >= 1
    for index, prompt in enumerate(prompts):
        assert only_first_has_them(driver.outputs[str(index)])
        check(driver.outputs[str(index)][0].prompt_logprobs, prompt, reference.logits(prompt), NUM_TOP)


def test_what_a_preempted_prompt_computes_again_is_not_taken_twice() -> None:
    sequence = Sequence(Request("a", tuple(range(9)), SamplingParams(num_prompt_logprobs=0), 0.0), 0)
    entries = [TokenLogprobs(-float(position), ()) for position in range(1, 9)]
    sequence.add_prompt_logprobs(0, entries[:3])
    sequence.add_prompt_logprobs(3, entries[3:5])
    for start, end in ((0, 2), (2, 5), (4, 7), (7, 8)):
        sequence.add_prompt_logprobs(start, entries[start:end])
    assert sequence.prompt_logprobs == entries


def test_logits_exist_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 1000)
    hidden = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    head = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    tokens = torch.randint(0, 300, (50,)).tolist()
    sizes = []

    def to_logits(first: int, last: int) -> torch.Tensor:
        sizes.append(last - first)
        return hidden[first:last] @ head

    entries = logprobs.PromptLogprobs(0, to_logits, 300, tokens, 2).read()
    assert sizes == [3] * 16 + [2]
    want = (hidden @ head).log_softmax(-1)
    assert [one.chosen for one in entries] == pytest.approx(
        want.gather(1, torch.tensor(tokens).unsqueeze(1)).flatten().tolist(), abs=1e-4
    )
    assert [[token for token, _ in one.top] for one in entries] == want.topk(2).indices.tolist()
