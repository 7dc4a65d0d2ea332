"""What the sampling options do to the tokens that the real engine chooses, by the `openai` client.

The weights are random, so that no token is likely: what a test wants to happen is made likely by a bias.
"""

from __future__ import annotations

import inspect
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import RunningServer, StartServer

ONE, TWO, THREE = "50", "60", "70"
PROMPT = [40, 41, 42, 43]


def completion(client: openai.OpenAI, **options: Any) -> Any:
    parameters = inspect.signature(client.completions.create).parameters
    known = {name: value for name, value in options.items() if name in parameters}
    body = {name: value for name, value in options.items() if name not in parameters}
    known = {"prompt": PROMPT, "max_tokens": 12, **known}
    return client.completions.create(
        model="tiny", extra_body={"ignore_eos": True, "return_token_ids": True, **body}, **known
    )


def tokens(client: openai.OpenAI, **options: Any) -> list[int]:
    """The tokens of one answer."""
    found = completion(client, **options).choices[0].token_ids
    assert isinstance(found, list)
    return found


def chat_tokens(client: openai.OpenAI, **options: Any) -> list[int]:
    """The same by a chat, for what the two endpoints read apart."""
    parameters = inspect.signature(client.chat.completions.create).parameters
    known = {name: value for name, value in options.items() if name in parameters}
    body = {name: value for name, value in options.items() if name not in parameters}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "one"}],
        extra_body={"ignore_eos": True, "return_token_ids": True, **body},
        **{"max_tokens": 12, **known},
    )
    found = answer.choices[0].token_ids
    assert isinstance(found, list)
    return found


def test_no_temperature_is_greedy_and_a_high_one_scatters(openai_client: openai.OpenAI) -> None:
    cold = [tokens(openai_client, temperature=0, seed=seed) for seed in range(3)]
    assert cold[0] == cold[1] == cold[2]
    assert len({tuple(tokens(openai_client, temperature=2, seed=seed)) for seed in range(3)}) == 3
    # Warmer is farther from the likeliest token: its bias of 4 holds when it is cold, and not when it is hot.
    bias = {"logit_bias": {ONE: 4}, "max_tokens": 64, "seed": 1}
    shares = [tokens(openai_client, temperature=one, **bias).count(int(ONE)) for one in (0.3, 1.0, 2.0)]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize("option", [{"top_k": 1}, {"top_p": 0.0001}, {"top_p": 0}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_choice_is_greedy(openai_client: openai.OpenAI, option: dict[str, Any]) -> None:
    greedy = tokens(openai_client, temperature=0)
    assert tokens(openai_client, temperature=2, seed=3, **option) == greedy
    assert tokens(openai_client, temperature=2, seed=3) != greedy


def test_top_k_top_p_and_min_p_keep_the_best(openai_client: openai.OpenAI) -> None:
    """Two tokens share nearly all of the probability; each option keeps these two or one of them."""
    bias = {"logit_bias": {ONE: 50, TWO: 49}, "temperature": 1, "max_tokens": 64, "seed": 5}
    both = {int(ONE), int(TWO)}
    for option in ({"top_k": 2}, {"top_p": 0.999}, {"min_p": 0.01}, {"top_k": -1}):
        assert set(tokens(openai_client, **bias, **option)) == both
    for option in ({"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.99}):
        assert set(tokens(openai_client, **bias, **option)) <= {int(ONE)}


def test_a_seed_gives_the_same_tokens_whatever_else_runs(openai_client: openai.OpenAI) -> None:
    alone = {seed: tokens(openai_client, seed=seed, max_tokens=24) for seed in range(6)}
    assert len({tuple(found) for found in alone.values()}) == 6
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(lambda seed: tokens(openai_client, seed=seed, max_tokens=24), alone)
    assert list(together) == list(alone.values())
    assert chat_tokens(openai_client, seed=1) == chat_tokens(openai_client, seed=1)


def test_equal_prompts_of_one_request_get_answers_of_their_own(openai_client: openai.OpenAI) -> None:
    def answers(**options: Any) -> list[tuple[int, ...]]:
        made = completion(openai_client, prompt=[PROMPT] * 3, temperature=2, **options)
        return [tuple(one.token_ids) for one in made.choices]

    assert len(set(answers())) == 3
    assert len(set(answers(n=2))) == 6
    # A seed fixes the answer to a prompt, wherever in a list that is.
    assert set(answers(seed=4)) == {tuple(tokens(openai_client, temperature=2, seed=4))}


def test_a_logit_bias_makes_and_unmakes_tokens(openai_client: openai.OpenAI) -> None:
    assert set(tokens(openai_client, logit_bias={ONE: 100})) == {int(ONE)}
    assert set(chat_tokens(openai_client, logit_bias={ONE: 100})) == {int(ONE)}
    greedy = tokens(openai_client, temperature=0)
    banned = {str(token_id): -100 for token_id in set(greedy)}
    assert not set(tokens(openai_client, temperature=0, logit_bias=banned)) & set(greedy)


def test_only_allowed_tokens_come(openai_client: openai.OpenAI) -> None:
    allowed = [50, 60, 70]
    found = tokens(openai_client, allowed_token_ids=allowed, temperature=2, max_tokens=64, seed=1)
    assert set(found) == set(allowed)
    assert set(chat_tokens(openai_client, allowed_token_ids=[50])) == {50}


def test_bad_words_never_come(openai_client: openai.OpenAI, byte_level_tokenizer: Any) -> None:
    """Of two tokens one never follows the other; a word of one token never comes."""
    first, last = byte_level_tokenizer.encode("qz", add_special_tokens=False).ids
    options: dict[str, Any] = {"allowed_token_ids": [first, last], "seed": 1, "max_tokens": 64}

    def pairs(found: list[int]) -> set[tuple[int, int]]:
        return set(pairwise(found))

    for ask in (tokens, chat_tokens):
        assert (first, last) in pairs(ask(openai_client, **options))
        kept = ask(openai_client, **options, bad_words=["qz", "never"])
        assert (first, last) not in pairs(kept)
        assert last in ask(openai_client, **options, bad_words=["qz"], logit_bias={str(last): 5})
        assert set(ask(openai_client, **options, bad_words=["q"])) == {last}
    # What the prompt ends with is no part of the answer.
    begun = tokens(
        openai_client,
        prompt=[first],
        max_tokens=1,
        logit_bias={str(last): 100},
        bad_words=["qz"],
    )
    assert begun == [last]
    with pytest.raises(openai.BadRequestError, match="forbid fewer") as caught:
        tokens(openai_client, **options, bad_words=["q", "z"])
    assert (caught.value.param, caught.value.code) == ("bad_words", "invalid_value")


def test_presence_is_punished_once_and_frequency_every_time(openai_client: openai.OpenAI) -> None:
    """ONE is ahead of TWO by 3, then by less, and both are far ahead of the rest."""
    options = {"logit_bias": {ONE: 80, TWO: 77}, "temperature": 0, "max_tokens": 20}
    one = int(ONE)
    assert set(tokens(openai_client, **options)) == {one}
    assert set(tokens(openai_client, **options, presence_penalty=2)) == {one}, "3 is more than 2"
    frequent = tokens(openai_client, **options, frequency_penalty=2)
    assert frequent[0] == one
    assert 8 <= frequent.count(one) <= 12, "they take turns once ONE's lead is gone"
    # A token makes itself a little likelier, so that a small lead grows to less than 2 with the first one.
    narrow = {**options, "logit_bias": {ONE: 80, TWO: 79.5}}
    assert set(tokens(openai_client, **narrow)) == {one}
    present = tokens(openai_client, **narrow, presence_penalty=2)
    assert present[:2] == [one, int(TWO)]
    assert len(set(present[2:])) == 1, "both have been punished, and are not again"
    assert len(set(tokens(openai_client, **narrow, frequency_penalty=2)[2:])) == 2
    assert set(tokens(openai_client, **narrow, presence_penalty=-2, frequency_penalty=-2)) == {one}


def test_repetition_is_punished_in_the_prompt_too(openai_client: openai.OpenAI) -> None:
    """Whatever the greedy answer repeats, it repeats less when that costs."""
    options = {"temperature": 0, "max_tokens": 48}
    plain = tokens(openai_client, **options)
    punished = tokens(openai_client, **options, repetition_penalty=10)
    assert len(set(punished)) > len(set(plain))
    first = tokens(openai_client, temperature=0, max_tokens=1)
    # The token that would have come first stands in the prompt of the second request, and so does not come.
    prompt = [*first, *PROMPT]
    unpunished = tokens(openai_client, prompt=prompt, temperature=0, max_tokens=1)
    changed = tokens(
        openai_client, prompt=[*unpunished, *prompt], repetition_penalty=10, temperature=0, max_tokens=1
    )
    assert changed[0] not in {*unpunished, *prompt}
    # There is no end to it, but that of what it can do.
    endless = tokens(openai_client, **options, repetition_penalty=1e300)
    assert endless == tokens(openai_client, **options, repetition_penalty=1e6)
    assert len(set(endless)) == 48


def test_min_tokens_keeps_the_end_away(openai_client: openai.OpenAI) -> None:
    ending = {"logit_bias": {"1": 100}, "ignore_eos": False, "max_tokens": 10}
    assert len(tokens(openai_client, **ending)) == 1
    assert len(tokens(openai_client, **ending, min_tokens=5)) == 6


def test_logprobs_are_of_the_models_own_distribution(openai_client: openai.OpenAI) -> None:
    (plain,) = completion(openai_client, temperature=0, logprobs=5, max_tokens=1).choices
    values = list(plain.logprobs.top_logprobs[0].values())
    assert values == sorted(values, reverse=True)
    assert sum(math.exp(value) for value in values) < 1
    forced = completion(
        openai_client, temperature=0, logprobs=0, max_tokens=1, logit_bias={ONE: 100}
    ).choices[0]
    assert forced.logprobs.token_logprobs[0] < values[0], "a bias makes no token likely to the model"


def test_prompt_logprobs_are_those_the_tokens_would_have_had(openai_client: openai.OpenAI) -> None:
    """An answer's log-probabilities, and those of the same tokens as a prompt, are the same numbers."""
    made = completion(openai_client, temperature=0, logprobs=2, max_tokens=8)
    answer = made.choices[0].token_ids
    scored = completion(openai_client, prompt=[*PROMPT, *answer], prompt_logprobs=2, max_tokens=1)
    entries = scored.choices[0].prompt_logprobs
    assert entries[0] is None
    assert len(entries) == len(PROMPT) + len(answer)
    own = [entry[str(token_id)] for entry, token_id in zip(entries[len(PROMPT) :], answer, strict=True)]
    assert [one["rank"] for one in own] == [1] * 8
    want = made.choices[0].logprobs.token_logprobs
    assert [one["logprob"] for one in own] == pytest.approx(want, abs=1e-3)
    unlikely = completion(openai_client, prompt=[*PROMPT, 50], prompt_logprobs=0, max_tokens=1)
    (place,) = unlikely.choices[0].prompt_logprobs[-1].values()
    assert place["rank"] > 20
    echoed = completion(openai_client, prompt=[*PROMPT, *answer], echo=True, logprobs=0, max_tokens=0)
    assert echoed.choices[0].logprobs.token_logprobs[len(PROMPT) :] == pytest.approx(want, abs=1e-3)


def test_best_of_returns_the_likeliest(openai_client: openai.OpenAI) -> None:
    options = {"seed": 11, "max_tokens": 6, "temperature": 1.5}
    every = completion(openai_client, **options, n=5, logprobs=0)
    means = [sum(one.logprobs.token_logprobs) / 6 for one in every.choices]
    want = sorted(range(5), key=means.__getitem__, reverse=True)[:2]
    best = completion(openai_client, **options, n=2, best_of=5)
    assert [one.token_ids for one in best.choices] == [every.choices[place].token_ids for place in want]
    assert [one.index for one in best.choices] == [0, 1]
    assert all(one.logprobs is None for one in best.choices), "they were not asked for"
    assert best.usage.completion_tokens == 30


def test_a_cached_prefix_is_told_and_changes_no_token(openai_client: openai.OpenAI) -> None:
    prompt = [10 + place % 200 for place in range(100)]
    options = {"prompt": prompt, "temperature": 0, "cache_salt": "told"}
    first, second = (completion(openai_client, **options) for _ in range(2))
    other = completion(openai_client, **{**options, "cache_salt": "another"})
    assert [one.usage.prompt_tokens_details.cached_tokens for one in (first, second, other)] == [0, 96, 0]
    assert first.choices[0].token_ids == second.choices[0].token_ids == other.choices[0].token_ids


@pytest.fixture(scope="module")
def narrow_server(start_shared_server: StartServer) -> RunningServer:
    """The real engine, with room for one request at a time and any number of log-probabilities."""
    return start_shared_server("--max-num-seqs=1", "--num-threads=1", "--max-logprobs=-1", fake=False)


@pytest.fixture(scope="module")
def narrow_client(narrow_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{narrow_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_log_probabilities_are_as_many_as_the_server_gives(
    narrow_client: openai.OpenAI, openai_client: openai.OpenAI, byte_level_tokenizer: Any
) -> None:
    size = byte_level_tokenizer.get_vocab_size()
    hello: Any = [{"role": "user", "content": "one"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": hello, "max_tokens": 2, "logprobs": True}
    for wanted, want in ((-1, size), (30, 30), (10**6, size)):
        chat = narrow_client.chat.completions.create(**asked, top_logprobs=wanted)
        for one in chat.choices[0].logprobs.content:
            assert len(one.top_logprobs) == want
            if want == size:
                assert sum(math.exp(each.logprob) for each in one.top_logprobs) == pytest.approx(1, abs=1e-3)
    scored = completion(narrow_client, prompt_logprobs=-1, logprobs=-1, echo=True, max_tokens=1)
    assert {len(entry) for entry in scored.choices[0].prompt_logprobs[1:]} == {size}
    for field, ask in (("logprobs", {"logprobs": 21}), ("prompt_logprobs", {"prompt_logprobs": -1})):
        with pytest.raises(openai.BadRequestError, match="--max-logprobs") as caught:
            completion(openai_client, **ask)
        assert caught.value.param == field
    with pytest.raises(openai.BadRequestError, match="at most 20") as caught:
        openai_client.chat.completions.create(**asked, top_logprobs=21)
    assert caught.value.param == "top_logprobs"


def test_the_lowest_priority_goes_first(narrow_client: openai.OpenAI, narrow_server: RunningServer) -> None:
    # A hundred choices, one after the other: they last until they are given up.
    blocker = narrow_client.completions.create(
        model="tiny",
        prompt="a",
        n=100,
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True, "priority": -100},
    )
    next(iter(blocker))
    received = narrow_server.sample()["counters"]["received"]
    ended: list[int] = []
    lock = threading.Lock()

    def run(priority: int) -> None:
        completion(narrow_client, priority=priority, max_tokens=30)
        with lock:
            ended.append(priority)

    def wait_for(count: int) -> None:
        narrow_server.sample_until(lambda sample: sample["counters"]["received"] == received + count)

    with ThreadPoolExecutor(3) as pool:
        for count, priority in enumerate((10**12, 0, -(10**12)), 1):
            pool.submit(run, priority)
            wait_for(count)
        blocker.close()
    assert ended == [-(10**12), 0, 10**12]
