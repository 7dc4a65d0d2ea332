"""The engine in one's own process: what it cannot do is named, and nothing of it runs."""

from collections.abc import Iterator
from typing import Any

import pytest

from headway_runtime import Engine, GenerationOutput, Grammar, SamplingParams
from headway_runtime.errors import ContextLengthError, InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("bundled://headway-tiny", max_model_len=256, num_threads=1) as one:
        yield one


def generate(engine: Engine, prompts: Any, params: Any = GREEDY, **options: Any) -> list[GenerationOutput]:
    return engine.generate(prompts, params, use_tqdm=False, **options)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"priority": "x"}, "priority='x': want an integer"),
        ({"priority": 1.5}, "priority=1.5: want an integer"),
        ({"priority": float("nan")}, "priority=nan: want an integer"),
        ({"priority": True}, "priority=True: want an integer"),
        ({"priority": None}, "priority=None: want an integer"),
        ({"priority": 2**63}, "priority=9223372036854775808: is outside [-9223372036854775808, "),
        ({"priority": -(10**400)}, "is outside [-9223372036854775808, "),
        ({"priority": 10**5000}, "is outside [-9223372036854775808, "),
        ({"cache_salt": None}, "cache_salt=None: want a string"),
        ({"cache_salt": 5}, "cache_salt=5: want a string"),
        ({"cache_salt": b"salt"}, "cache_salt=b'salt': want a string"),
        ({"cache_salt": "\ud800"}, "cache_salt='\\ud800': want a string"),
        ({"cache_salt": "a" * 1025}, "want a string of at most 1024 characters"),
        ({"sampling_params": 5}, "sampling_params=5: want SamplingParams(...)"),
        ({"sampling_params": {"n": 1}}, "sampling_params={'n': 1}: want SamplingParams(...)"),
        ({"sampling_params": [None]}, "sampling_params=None: each of them is to be SamplingParams(...)"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
async def test_a_wrong_argument_of_a_call_is_named_and_the_engine_lives_on(
    engine: Engine, options: dict[str, Any], want: str
) -> None:
    calls: dict[str, Any] = {"sampling_params": GREEDY, **options}
    chat = [{"role": "user", "content": "hi"}]
    (field,) = options
    for call in (engine.generate, engine.chat):
        prompt: Any = "a" if call == engine.generate else chat
        with pytest.raises(InvalidRequestError) as caught:
            call(prompt, use_tqdm=False, **calls)
        assert want in str(caught.value)
        assert (caught.value.param, len(str(caught.value)) < 300) == (field, True)
    for stream in (engine.generate_async("a", **calls), engine.chat_async(chat, **calls)):
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in stream:
                pass
        assert want in str(caught.value)
    assert generate(engine, "a", priority=2**63 - 1, cache_salt="a" * 1024)[0].finished
    assert generate(engine, "a", priority=-(2**63))[0].finished


@pytest.mark.parametrize(
    ("prompts", "want"),
    [
        (None, "prompts=None: want a text, a list of token ids, or a list of texts or such lists"),
        (5, "prompts=5: want a text"),
        (b"ab", "prompts=b'ab': want a text"),
        ({"prompt": "a", "multi_modal_data": 1}, "holds 'multi_modal_data'; give 'prompt'"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids='abc': want a list of token ids"),
        ({"prompt": 5, "prompt_token_ids": [5]}, "prompt=5: want a text"),
        ([{}], "prompt={}: holds nothing; give 'prompt', 'prompt_token_ids'"),
        ([None], "prompt=None: want a text or a list of token ids"),
        ([1, "a"], "prompt=[1, 'a']: want a text or a list of token ids"),
        ([True], "prompt=[True]: want a text or a list of token ids"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_told_what_prompts_may_be(engine: Engine, prompts: Any, want: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate(engine, prompts)
    assert want in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "want"),
    [
        (None, "messages=None: want a list of dicts with role and content"),
        ("hi", "messages='hi': want a list of dicts"),
        ({"role": "user", "content": "hi"}, "want a list of dicts"),
        ([5], "messages=5: want a list of dicts"),
        ([], "messages=[]: is empty; give at least one message"),
        ([{"role": "user", "content": 5}], "content=5 is no text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "is no text part"),
    ],
)
def test_what_is_no_chat_is_told_what_chats_may_be(engine: Engine, messages: Any, want: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.chat(messages, GREEDY, use_tqdm=False)
    assert (want in str(caught.value), caught.value.param) == (True, "messages")


def test_a_grammar_that_cannot_be_compiled_is_named(engine: Engine) -> None:
    unclosed = SamplingParams(grammar=Grammar("regex", "("))
    with pytest.raises(
        InvalidRequestError, match=r"grammar=Grammar\(.* cannot be enforced: (?s:.*)unclosed"
    ) as caught:
        generate(engine, "a", unclosed)
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_grammar")


def test_one_wrong_prompt_is_named_before_anything_runs(engine: Engine) -> None:
    received = engine.metrics().counters["received"]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (["good", [5] * 300], ContextLengthError, "prompt has 300 tokens"),
        (["good", ""], InvalidRequestError, "prompt='' is empty"),
        (["good", [10**6]], InvalidRequestError, "outside"),
        (["good", 5.5], InvalidRequestError, "want a text or a list of token ids"),
        (["good", ["nested"]], InvalidRequestError, "want a text or a list of token ids"),
    ]
    for prompts, kind, message in wrong:
        with pytest.raises(kind, match=message):
            generate(engine, prompts)
    with pytest.raises(InvalidRequestError, match="1 entries for 2 prompts"):
        generate(engine, ["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="min_tokens=255 is more than the answer may have"):
        generate(engine, "hello there", SamplingParams(max_tokens=None, min_tokens=255))
    with pytest.raises(InvalidRequestError, match="has no role"):
        engine.chat([{"content": "hi"}])
    assert engine.metrics().counters["received"] == received
    assert generate(engine, []) == []
