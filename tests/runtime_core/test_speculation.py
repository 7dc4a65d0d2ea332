"""Guessing tokens ahead: the answers are those without it, whatever was asked, and it does guess."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from headway_runtime.config import Dtype, Envelope, Limits, SpeculativeConfig
from headway_runtime.draws import Drawer
from headway_runtime.errors import LimitRangeError
from headway_runtime.inprocess import Engine
from headway_runtime.kernels.cpu.processor import multiplies_pairs
from headway_runtime.request import Grammar
from headway_runtime.request import SamplingParams as EngineParams
from headway_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.runtime_core.conftest import Checkpoint, EngineDriver

MODEL, DRAFT = "bundled://headway-tiny", "bundled://headway-tiny-draft"
PROMPTS = [
    "Once upon a time",
    "What is 12 + 30?",
    "one two three one two three one two",
    "Tom and Anna went to the",
]
METHODS: dict[str, dict[str, object]] = {
    "draft model": {"model": DRAFT, "num_speculative_tokens": 4, "adaptive": False},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "adaptive": False},
}


# PyTorch's products add up in an order that depends on the number of rows, which guesses change: in bfloat16
# that rounds other tokens into being. Where products are not our own, float32 leaves no room for that.
HAS_ORDER = multiplies_pairs()
DTYPE: Dtype = "auto" if HAS_ORDER else "float32"


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine(MODEL, dtype=DTYPE, max_model_len=256, num_threads=1) as engine:
        yield engine


@pytest.fixture(params=list(METHODS))
def guessing(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = METHODS[request.param]
    with Engine(MODEL, dtype=DTYPE, max_model_len=256, num_threads=1, speculative_config=config) as engine:
        yield engine


# Answers with the same beginning, from which on what followed it is judged.
LEAST_ANSWERS = 100
FILTERS: dict[str, Any] = {"temperature": 1.2, "top_k": 8, "min_p": 0.02}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
    "seed": SamplingParams(temperature=0.9, seed=3, max_tokens=60),
    "filters": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, seed=5, max_tokens=60),
    "penalties": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        max_tokens=60,
    ),
    "bias": SamplingParams(temperature=0.5, seed=1, logit_bias={300: 4.0, 17: -100.0}, max_tokens=40),
    "allowed": SamplingParams(temperature=1.0, seed=2, allowed_token_ids=list(range(60, 90)), max_tokens=40),
    "bad words": SamplingParams(temperature=0.7, seed=8, bad_words=["the", "a", "there was"], max_tokens=60),
    "min tokens": SamplingParams(temperature=0.0, min_tokens=30, max_tokens=50),
    "stop": SamplingParams(temperature=0.0, stop=[" a", "the"], max_tokens=60),
    "stop token": SamplingParams(temperature=0.0, stop_token_ids=list(range(200, 400)), max_tokens=60),
    "one token": SamplingParams(temperature=0.0, max_tokens=1),
    "two tokens": SamplingParams(temperature=0.0, max_tokens=2),
    "logprobs": SamplingParams(temperature=0.7, seed=9, logprobs=3, prompt_logprobs=1, max_tokens=40),
    "to the end of the context": SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None),
    "choices": SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=30),
    "schema": SamplingParams(
        temperature=0.8,
        seed=6,
        max_tokens=60,
        grammar=Grammar("json_schema", json.dumps(COLOUR)),
    ),
    "regex": SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar("regex", "(ab|cd|12)*")),
}


def wanted(value: Any) -> Any:
    """What is to be answered: numbers to the last bit, or as near as sums without an order come."""
    if isinstance(value, dict):
        return {name: wanted(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(wanted, value))
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) and not HAS_ORDER else value


@pytest.mark.parametrize("params", [pytest.param(one, id=name) for name, one in PARAMS.items()])
def test_answers_are_those_without_guesses(plain: Engine, guessing: Engine, params: SamplingParams) -> None:
    want = plain.generate(PROMPTS, params, use_tqdm=False)
    got = guessing.generate(PROMPTS, params, use_tqdm=False)
    assert [asdict(one)["outputs"] for one in got] == [wanted(asdict(one)["outputs"]) for one in want]
    got_logprobs = [asdict(one)["prompt_logprobs"] for one in got]
    assert got_logprobs == [wanted(asdict(one)["prompt_logprobs"]) for one in want]
    drafts = guessing.metrics().drafts
    if sum(len(answer.token_ids) for one in want for answer in one.outputs) > 100:
        assert drafts.num_tokens > 0, "nothing was guessed"
    assert drafts.num_accepted == sum(drafts.accepted_at) <= drafts.num_tokens


def test_guesses_that_come_true_spare_steps(guessing: Engine) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)
    guessing.generate(PROMPTS[2], params, use_tqdm=False)
    metrics = guessing.metrics()
    assert metrics.drafts.num_accepted > 30
    assert metrics.counters["generated_tokens"] == 100
    assert metrics.counters["steps"] <= 100 - metrics.drafts.num_accepted + 1
    # Tokens that come together are one gap, and nobody is counted a decode for his guesses.
    assert sum(metrics.histograms["inter_token"].counts) == metrics.counters["steps"] - 1
    assert metrics.counters["decode_step_sequences"] == metrics.counters["steps"] - 1


@pytest.fixture(params=["itself", "another model", "ngram"])
def speculative(request: pytest.FixtureRequest, checkpoint: Callable[..., Checkpoint]) -> SpeculativeConfig:
    folder = {"itself": "gqa", "another model": "mha, untied", "ngram": None}[request.param]
    if folder is None:
        return SpeculativeConfig("ngram", None, 1, 3, adaptive=False)
    return SpeculativeConfig("draft_model", str(checkpoint(folder).folder), adaptive=False)


def test_random_models_preempted_cached_and_cut_up_generate_what_they_did_without(
    start_engine: Callable[..., EngineDriver],
    checkpoint: Callable[..., Checkpoint],
    random_prompts: Callable[..., list[list[int]]],
    speculative: SpeculativeConfig,
) -> None:
    beginning = random_prompts(1, [50])[0]
    prompts = [beginning + own for own in random_prompts(2, [1, 9, 30, 14, 2, 40, 23, 7])]
    sampling = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}] * 4

    def tokens(block_bytes: int, **changes: Any) -> tuple[list[list[int]], EngineDriver]:
        driver = start_engine(
            kv_cache_memory_bytes=30 * block_bytes,
            max_model_len=160,
            envelope=Envelope(16, 96, 5),
            limits=Limits(16, 96, 5),
            **changes,
        )
        for index, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
            driver.add(str(index), prompt, max_tokens=60, **own)
        driver.run()
        return [driver.tokens(str(index)) for index in range(len(prompts))], driver

    own_bytes = checkpoint().kv_bytes(1)
    draft_bytes = {None: 0, str(checkpoint().folder): own_bytes}.get(
        speculative.model_path, checkpoint("mha, untied").kv_bytes(1)
    )
    want, _ = tokens(own_bytes)
    got, driver = tokens(own_bytes + draft_bytes, speculative=speculative)
    assert got == want
    assert driver.counter("preemptions") > 0
    assert driver.counter("cached_tokens") > 0
    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_tokens > 50
    if speculative.model_path == str(checkpoint().folder):
        # The same model guesses what it will say, but where its own arithmetic adds up in another order.
        assert drafts.num_accepted > 0.95 * drafts.num_tokens


def test_a_draft_guesses_as_far_as_its_rotation_is_stretched(
    start_engine: Callable[..., EngineDriver],
    checkpoint: Callable[..., Checkpoint],
    random_prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    """YaRN, beyond the length before scaling: the prompt alone is longer than that."""
    checkpoint().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn}))
    driver = start_engine(
        tmp_path,
        max_model_len=250,
        speculative=SpeculativeConfig("draft_model", str(tmp_path), adaptive=False),
        envelope=Envelope(4, 256, 4),
        limits=Limits(4, 256, 4),
    )
    (prompt,) = random_prompts(5, [100])
    driver.add("0", prompt, temperature=0.0, max_tokens=100)
    driver.run()
    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_tokens > 60
    assert drafts.num_accepted > 0.9 * drafts.num_tokens


def test_the_limit_turns_guessing_off_and_on_again(
    start_engine: Callable[..., EngineDriver], random_prompts: Callable[..., list[list[int]]]
) -> None:
    driver = start_engine(
        speculative=SpeculativeConfig("ngram", None, 1, 3, adaptive=False),
        envelope=Envelope(16, 256, 4),
        limits=Limits(16, 256, 4),
    )

    def num_guessed(limit: int) -> int:
        driver.engine.set_limits(Limits(16, 256, limit))
        before = driver.metrics.snapshot().drafts.num_tokens
        for _ in range(10):
            driver.step()
        return driver.metrics.snapshot().drafts.num_tokens - before

    (prompt,) = random_prompts(1, [60])
    driver.add("0", prompt * 2, temperature=0.0, max_tokens=120)
    driver.step()
    counts = [num_guessed(limit) for limit in (4, 0, 2)]
    assert counts[0] > 0
    assert counts[1] == 0
    assert 0 < counts[2] <= 20
    with pytest.raises(LimitRangeError, match="num_speculative_tokens"):
        driver.engine.set_limits(Limits(16, 256, 5))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_turning_guessing_off_and_on_changes_no_answer(
    start_engine: Callable[..., EngineDriver],
    random_prompts: Callable[..., list[list[int]]],
    speculative: SpeculativeConfig,
    temperature: float,
) -> None:
    plain = start_engine()
    driver = start_engine(speculative=speculative, envelope=Envelope(16, 256, 4), limits=Limits(16, 256, 4))
    # Halves that repeat each other give prompt lookup something to find.
    prompts = {str(index): 2 * prompt for index, prompt in enumerate(random_prompts(8, [20, 30, 40]))}
    for one in (plain, driver):
        for name, prompt in prompts.items():
            one.add(name, prompt, temperature=temperature, seed=int(name), max_tokens=100)
    plain.run()
    num_guessed = []
    for limit in (4, 0, 2, 0, 4):
        driver.engine.set_limits(Limits(16, 256, limit))
        before = driver.metrics.snapshot().drafts.num_tokens
        for _ in range(6):
            driver.step()
        num_guessed.append(driver.metrics.snapshot().drafts.num_tokens - before)
    assert driver.engine.has_work  # all of it happened within the answers
    driver.run()
    assert [number > 0 for number in num_guessed] == [True, False, True, False, True]
    assert [driver.tokens(name) for name in prompts] == [plain.tokens(name) for name in prompts]


def test_the_distribution_is_the_models(
    start_engine: Callable[..., EngineDriver],
    checkpoint: Callable[..., Checkpoint],
    random_prompts: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    """20,000 answers, guessed by a model that is nearly the same: chi-square of their tokens."""
    num_answers = 20_000
    similar = copy.deepcopy(checkpoint().model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in similar.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    similar.save_pretrained(tmp_path)
    speculative = SpeculativeConfig("draft_model", str(tmp_path), adaptive=False)
    driver = start_engine(
        speculative=speculative,
        max_model_len=64,
        max_waiting=num_answers,
        envelope=Envelope(64, 512, 2),
        limits=Limits(64, 512, 2),
    )
    (prompt,) = random_prompts(3, [17])
    for index in range(num_answers):
        driver.add(str(index), prompt, **FILTERS, seed=index, max_tokens=4)
    while driver.engine.has_work:
        for one in driver.engine.step(0.0).outputs:
            driver.outputs[one.request_id].append(one)
    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_drafts >= num_answers
    assert 0.05 < drafts.num_accepted / drafts.num_tokens < 0.95
    # Each answer is judged at its second, third and fourth token: after guesses that came true, and after
    # those that did not. What stands at the third must be drawn from the model's distribution after the first
    # two, and so on.
    answers = [driver.tokens(str(index)) for index in range(num_answers)]
    num_judged, statistic, degrees = 0, 0.0, 0
    for place in (1, 2, 3):
        seen: dict[tuple[int, ...], Counter[int]] = {}
        for answer in answers:
            seen.setdefault(tuple(answer[:place]), Counter())[answer[place]] += 1
        for beginning, tokens in seen.items():
            if tokens.total() < LEAST_ANSWERS:
                continue
            probabilities = filtered(checkpoint().logits([*prompt, *beginning])[-1].double(), **FILTERS)
            own_statistic, own_degrees = chi_square(probabilities, tokens)
            num_judged += tokens.total()
            statistic += own_statistic
            degrees += own_degrees
    assert num_judged >= 20_000
    assert degrees > 100
    # Four standard deviations of a chi-square distribution above its mean.
    assert statistic < degrees + 4.0 * (2.0 * degrees) ** 0.5, (num_judged, statistic, degrees)


def chi_square(probabilities: torch.Tensor, seen: Counter[int]) -> tuple[float, int]:
    """Of tokens that were seen, and its degrees of freedom; tokens that are not likely are one together."""
    count = seen.total()
    got = torch.zeros_like(probabilities)
    for token, number in seen.items():
        got[token] = number
    assert got[probabilities == 0.0].sum() == 0
    likely = probabilities * count >= 5.0
    want = torch.cat((probabilities[likely], probabilities[~likely].sum().view(1))) * count
    got = torch.cat((got[likely], got[~likely].sum().view(1)))
    want, got = want[want > 1e-9], got[want > 1e-9]
    return float(((got - want) ** 2 / want).sum()), len(want) - 1


def filtered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution that is sampled from, straight from its definition."""
    probabilities = (logits / temperature).softmax(dim=-1)
    if min_p:
        probabilities[probabilities < min_p * probabilities.max()] = 0.0
    if top_k:
        probabilities[probabilities < probabilities.sort(descending=True).values[top_k - 1]] = 0.0
    return probabilities / probabilities.sum()


def test_draws_of_two_distributions_agree_as_often_as_the_theory_says(
    random_prompts: Callable[..., list[list[int]]],
) -> None:
    """One random number for both: at least (1 - d) / (1 + d) of draws agree, at most 1 - d."""
    generator = torch.Generator().manual_seed(5)
    model = torch.randn(200, generator=generator) * 2.0
    draft = model + torch.randn(200, generator=generator) * 0.7
    distance = float((model.softmax(-1) - draft.softmax(-1)).abs().sum()) / 2
    drawer, number = Drawer(200, torch.device("cpu")), 20_000
    tokens = []
    for logits in (model, draft):
        params = [EngineParams(seed=seed) for seed in range(number)]
        found = torch.empty(number, dtype=torch.int64)
        for part in drawer.plan(range(number), range(number), params):
            rows = logits.expand(number, -1).contiguous()
            found[part.places] = drawer.draw(rows, part, numpy.full(number, 7))[0]
        tokens.append(found)
    agreeing = float((tokens[0] == tokens[1]).double().mean())
    assert 0.1 < distance < 0.6
    assert (1 - distance) / (1 + distance) - 0.02 < agreeing < 1 - distance + 0.02
