"""Tokens of overlapping steps: those of the plain loop, whatever happens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_runtime.config import Limits
from headway_runtime.inprocess import Engine
from headway_runtime.request import FinishReason, Grammar, Request, SamplingParams
from headway_runtime.sampling_params import SamplingParams as UserParams

Start = Callable[..., Any]
VOCAB_SIZE = 96
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@dataclass(frozen=True)
class Add:
    prefix: int
    suffix: tuple[int, ...]
    priority: int
    salt: str
    max_tokens: int
    sampling: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class TakeOut:
    which: int
    way: str


@dataclass(frozen=True)
class SetLimits:
    num_seqs: int
    num_tokens: int


Event = Add | Steps | TakeOut | SetLimits
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 2},
    {"seed": 3},
    {"seed": 4, "top_k": 8, "top_p": 0.9},
    {"seed": 5, "min_p": 0.02, "num_logprobs": 0},
    {"seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.4, "num_logprobs": 1},
    {"temperature": 0.0, "logit_bias": ((5, 1.5), (7, -2.0)), "min_tokens": 3},
    {"seed": 7, "allowed_token_ids": frozenset(range(10, 40))},
    {"seed": 8, "bad_words": ((5,), (6,), (7,))},
    # This one is read before the next step, like one with a grammar.
    {
        "seed": 9,
        "top_k": 3,
        "bad_words": tuple((first, second) for first in range(40) for second in range(20)),
    },
    {"temperature": 0.0, "num_prompt_logprobs": 1},
)
ADDS = st.builds(
    Add,
    prefix=st.integers(0, 60),
    suffix=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8).map(tuple),
    priority=st.sampled_from([0, 0, 0, 1, -3]),
    salt=st.sampled_from(["", "", "tenant"]),
    max_tokens=st.integers(1, 40),
    # All of them but one overlap; most are plain, as they mostly are.
    sampling=st.sampled_from([*SAMPLINGS[:5] * 2, *SAMPLINGS, *SAMPLINGS[5:6]]),
)
LIMITS = st.integers(1, 8).flatmap(
    lambda num_seqs: st.builds(SetLimits, st.just(num_seqs), st.integers(num_seqs, 64))
)
TAKEN = st.builds(TakeOut, st.integers(0, 30), st.sampled_from(["abort", "finish"]))
EVENTS = st.lists(
    st.one_of(ADDS, ADDS, ADDS, st.builds(Steps, st.integers(1, 6)), TAKEN, LIMITS), min_size=8, max_size=30
)


@pytest.fixture(scope="module")
def engines(start: Start) -> tuple[Any, Any]:
    """The same engine plain and overlapping, of few blocks."""
    return start(num_blocks=12, overlap=False), start(num_blocks=12, overlap=True)


def apply(driver: Any, events: list[Event], stop: frozenset[int]) -> set[str]:
    """Names of the requests that were taken out."""
    driver.outputs.clear()
    driver.engine.set_limits(Limits(8, 64))
    gone: set[str] = set()
    for event in events:
        match event:
            case Add():
                prompt = [*((3 * index) % 11 for index in range(event.prefix)), *event.suffix]
                driver.add(
                    str(len(driver.outputs)),
                    prompt,
                    priority=event.priority,
                    salt=event.salt,
                    max_tokens=event.max_tokens,
                    stop_token_ids=stop,
                    **event.sampling,
                )
            case Steps():
                for _ in range(event.count):
                    driver.step()
            case TakeOut() if driver.outputs:
                name = str(event.which % len(driver.outputs))
                if getattr(driver.engine, event.way)(name, 0.0):
                    gone.add(name)
                driver.engine.check_integrity()
            case SetLimits():
                driver.engine.set_limits(Limits(event.num_seqs, event.num_tokens))
    driver.run()
    assert driver.engine.kv_blocks_used == 0
    return gone


def assert_alike(plain: Any, overlapping: Any, gone: set[str]) -> None:
    for name in plain.outputs:
        want, got = plain.tokens(name), overlapping.tokens(name)
        if name in gone:
            shorter = min(len(want), len(got))
            assert got[:shorter] == want[:shorter]
            continue
        assert got == want
        assert overlapping.reason(name) == plain.reason(name)
        for mine, theirs in zip(overlapping.logprobs(name), plain.logprobs(name), strict=True):
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        first = overlapping.outputs[name][0].prompt_logprobs
        want_first = plain.outputs[name][0].prompt_logprobs
        assert (first is None) == (want_first is None)
        for mine, theirs in zip(first or (), want_first or (), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-3)


@settings(
    max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(events=EVENTS, stop=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=6))
def test_any_life_brings_the_tokens_of_the_plain_loop(
    engines: tuple[Any, Any], events: list[Event], stop: frozenset[int]
) -> None:
    plain, overlapping = engines
    gone = apply(plain, events, stop) | apply(overlapping, events, stop)
    assert_alike(plain, overlapping, gone)
    for driver in engines:
        assert driver.counter("received") == driver.counter("finished") + driver.counter("aborted")


def test_lives_of_that_kind_preempt_stop_and_hit(engines: tuple[Any, Any]) -> None:
    """The random ones would prove little if nothing happened in them."""
    plain, overlapping = engines
    before = [{name: one.counter(name) for name in ("preemptions", "cached_tokens")} for one in engines]
    events: list[Event] = []
    for index in range(14):
        events.append(Add(48, (index, 2 * index), 0, "", 40, {"seed": index}))
        events.append(Steps(2))
    stop = frozenset({19, 57})
    gone = apply(plain, events, stop) | apply(overlapping, events, stop)
    assert_alike(plain, overlapping, gone)
    assert {overlapping.reason(name) for name in overlapping.outputs} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    for driver, counted in zip(engines, before, strict=True):
        assert driver.counter("preemptions") > counted["preemptions"]
        assert driver.counter("cached_tokens") > counted["cached_tokens"]


def test_grammars_and_stop_strings_bring_the_same_answers() -> None:
    prompts = ["Once upon a time", "The weather", "Count: one, two", "A word:", "Once upon a time"]
    params = [
        UserParams(temperature=0.0, max_tokens=24, stop=[" the", "e "]),
        UserParams(seed=5, max_tokens=24, ignore_eos=True),
        UserParams(seed=6, max_tokens=24),
        UserParams(temperature=0.0, max_tokens=24, grammar=Grammar("regex", "[a-z ]{3,12}")),
        UserParams(temperature=0.0, max_tokens=24, bad_words=["the", "there was", "and a", "little girl"]),
    ]
    answers = {}
    for overlap in (False, True):
        with Engine(
            "bundled://headway-tiny",
            overlap=overlap,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            kv_cache_memory_bytes=1 << 22,
        ) as engine:
            outputs = [one.outputs[0] for one in engine.generate(prompts, params, use_tqdm=False)]
            answers[overlap] = [
                (one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in outputs
            ]
    assert answers[True] == answers[False]


def test_a_grammar_is_followed(start: Start) -> None:
    matched: list[int] = []

    class Matcher:
        """Stands in for a grammar that wants each token to be the next number."""

        error, param, unwanted_ids = None, "grammar", frozenset({0})

        def __init__(self) -> None:
            self.following = 40

        @property
        def library_matcher(self) -> "Matcher":
            return self

        def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
            import ctypes

            bits = bytearray(num_bytes)
            bits[self.following // 8] |= 1 << self.following % 8
            ctypes.memmove(pointer, bytes(bits), num_bytes)

        def advance(self, token_id: int) -> None:
            assert token_id == self.following
            matched.append(token_id)
            self.following += 1

    driver = start()
    sampling = SamplingParams(temperature=0.0, max_tokens=6, grammar=Grammar("regex", "x"))
    request = Request("a", (1, 2, 3), sampling, 0.0)
    driver.engine._scheduler.add(request, Matcher())
    driver.outputs["a"] = []
    driver.add("beside", range(20), **GREEDY)
    driver.run()
    assert driver.tokens("a") == [40, 41, 42, 43, 44, 45] == matched
    assert len(driver.tokens("beside")) == 8
