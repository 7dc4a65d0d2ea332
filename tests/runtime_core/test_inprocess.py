"""The engine in one's own process: prompts in every form, and parameters that work."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway_runtime import Engine, GenerationOutput, Grammar, SamplingParams, StructuredOutputsParams
from headway_runtime.engine import EngineCore
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import Request
from headway_runtime.sources import resolve

MODEL = "bundled://headway-tiny"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, max_model_len=256, max_num_seqs=8, num_threads=1, max_waiting=4) as one:
        yield one


def generate(engine: Engine, prompts: Any, params: Any = GREEDY, **options: Any) -> list[GenerationOutput]:
    return engine.generate(prompts, params, use_tqdm=False, **options)


def test_prompts_without_parameters_get_the_models_own_defaults(engine: Engine, tmp_path: Path) -> None:
    assert engine.get_default_sampling_params() == SamplingParams()
    folder = tmp_path / "model"
    shutil.copytree(resolve(MODEL), folder)
    said = {"temperature": 0.5, "top_k": 1, "max_new_tokens": 3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(said))
    with Engine(str(folder), max_model_len=256, num_threads=1) as own:
        assert own.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=1, max_tokens=3)
        (short,) = own.generate("Once upon a time", use_tqdm=False)
        assert len(short.outputs[0].token_ids) == 3
        # Parameters that are given are used as they are.
        (long,) = generate(own, "Once upon a time", SamplingParams(seed=1, ignore_eos=True))
        assert len(long.outputs[0].token_ids) == 16
    options = keyword_options(folder, {"generation_config": "none"})
    assert options.defaults.sampling_params() == SamplingParams()


def test_a_text_its_token_ids_and_lists_of_either_give_the_same_answer(engine: Engine) -> None:
    text = "Once upon a time"
    token_ids = engine.tokenizer.encode(text, add_special_tokens=True)
    one, same = generate(engine, text)[0], generate(engine, token_ids)[0]
    assert one.text
    assert one.text == same.text
    assert (one.prompt, same.prompt) == (text, None)
    assert one.prompt_token_ids == same.prompt_token_ids == tuple(token_ids)
    both = generate(engine, [text, token_ids, text])
    assert [output.outputs[0].token_ids for output in both] == [one.outputs[0].token_ids] * 3


def test_prompts_may_be_the_dicts_that_vllm_has_for_them(engine: Engine) -> None:
    text = "Once upon a time"
    token_ids = engine.tokenizer.encode(text, add_special_tokens=True)
    (want,) = generate(engine, text)
    (alone,) = generate(engine, {"prompt_token_ids": token_ids})
    listed = generate(engine, [{"prompt": text}, {"prompt_token_ids": token_ids, "prompt": "its name"}, text])
    assert {one.text for one in (alone, *listed)} == {want.text}
    assert [one.prompt for one in (alone, *listed)] == [None, text, "its name", text]
    assert all(one.prompt_token_ids == tuple(token_ids) for one in listed)


def test_answers_come_in_the_order_of_prompts_however_many_may_wait(engine: Engine) -> None:
    prompts = [f"The number {index} is" for index in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + index % 5, ignore_eos=True) for index in range(40)]
    outputs = generate(engine, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + index % 5 for index in range(40)]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    for index in range(5):
        assert generate(engine, prompts[index], params[index])[0].text == outputs[index].text


def test_a_seed_gives_each_of_n_answers_again(engine: Engine) -> None:
    params = SamplingParams(n=4, seed=5, temperature=1.5, max_tokens=12)
    first, again = generate(engine, "Tell me", params)[0], generate(engine, "Tell me", params)[0]
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in again.outputs]
    assert [one.index for one in first.outputs] == [0, 1, 2, 3]
    assert len({one.token_ids for one in first.outputs}) > 1
    unseeded = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True)
    assert len({generate(engine, "Tell me", unseeded)[0].text for _ in range(3)}) > 1


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_an_answer_and_is_its_reason(engine: Engine, *, included: bool) -> None:
    whole = generate(engine, "Once upon a time", SamplingParams(temperature=0, max_tokens=20))[0].text
    stop = whole.split()[3]
    params = SamplingParams(
        temperature=0, max_tokens=20, stop=stop, include_stop_str_in_output=included, logprobs=0
    )
    got = generate(engine, "Once upon a time", params)[0].outputs[0]
    before = whole[: whole.index(stop)]
    assert got.text == (before + stop if included else before)
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.token_ids) < 20


def test_a_bad_word_does_not_come_as_the_token_that_it_is_within_texts(engine: Engine) -> None:
    """Bare it has two tokens, after a space one."""
    (free,) = generate(engine, "The capital of France is")
    assert free.outputs[0].text.startswith(" Paris")
    for word in ("Paris", " Paris"):
        params = SamplingParams(temperature=0, max_tokens=8, bad_words=[word])
        (kept,) = generate(engine, "The capital of France is", params)
        assert "Paris" not in kept.outputs[0].text


def test_logprobs_are_one_per_token_and_add_up(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=1)
    output = generate(engine, "Once upon a time", params)[0]
    got = output.outputs[0]
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.token_ids) == 6
    assert all(len(one.top) == 3 and one.top[0][1] == one.chosen for one in got.logprobs)
    assert got.cumulative_logprob == pytest.approx(sum(one.chosen for one in got.logprobs))
    plain = generate(engine, "Once upon a time")[0]
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def test_timings_add_up(engine: Engine) -> None:
    timings = generate(engine, "Once upon a time")[0].timings
    assert timings.queue_seconds is not None
    assert timings.prefill_seconds is not None
    assert timings.ttft_seconds is not None
    assert timings.ttft_seconds == pytest.approx(timings.queue_seconds + timings.prefill_seconds)
    assert timings.ttft_seconds < timings.e2e_seconds < 60


def test_a_chat_goes_through_the_models_template(engine: Engine) -> None:
    chat = [{"role": "user", "content": "What is your name?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is your name?"}]}]
    one = engine.chat(chat, GREEDY, use_tqdm=False)[0]
    assert one.prompt is not None
    assert one.prompt != "What is your name?"
    assert "What is your name?" in one.prompt
    chats: Any = [chat, parts]
    two = engine.chat(chats, GREEDY, use_tqdm=False)
    assert [output.text for output in two] == [one.text, one.text]


TELLING = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_chats_template_is_given_all_that_it_is_to_know(engine: Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    told = engine.chat(
        chat,
        GREEDY,
        use_tqdm=False,
        tools=[WEATHER],
        chat_template=TELLING,
        chat_template_kwargs={"mood": "calm"},
    )[0]
    assert told.prompt == "<user>hi</>[weather]calm<assistant>"
    plain = engine.chat(chat, GREEDY, use_tqdm=False, chat_template=TELLING, add_generation_prompt=False)[0]
    assert plain.prompt == "<user>hi</>"


async def test_an_answer_goes_on_where_its_beginning_ends(engine: Engine) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon "}]
    *_, last = [
        one
        async for one in engine.chat_async(
            chat, GREEDY, chat_template=TELLING, add_generation_prompt=False, continue_final_message=True
        )
    ]
    assert last.prompt == "<user>hi</><assistant>Once upon "


@pytest.mark.parametrize(
    ("arguments", "param", "want"),
    [
        ({"continue_final_message": True}, "continue_final_message", "excludes add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
            "needs a final message of role 'assistant'",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "sets 'tools'"),
        ({"tools": [{"name": "weather"}]}, "tools", "a function with a name"),
        ({"chat_template": "{% if %}"}, "chat_template", "not valid Jinja"),
    ],
)
def test_what_a_template_cannot_be_given_is_named(
    engine: Engine, arguments: dict[str, Any], param: str, want: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False, **arguments)
    assert (want in str(caught.value), caught.value.param) == (True, param)


async def test_a_stream_grows_to_the_whole_answer(engine: Engine) -> None:
    # Long enough that a busy machine does not have it all in one piece.
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    whole = engine.generate("Once upon a time", params, use_tqdm=False)[0]
    seen = [output async for output in engine.generate_async("Once upon a time", params)]
    assert all(later.text.startswith(sooner.text) for sooner, later in pairwise(seen))
    assert len(seen) > 1
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].outputs == whole.outputs
    chat = [{"role": "user", "content": "hi"}]
    *_, last = [output async for output in engine.chat_async(chat, GREEDY)]
    assert last.text == engine.chat(chat, GREEDY, use_tqdm=False)[0].text


async def test_many_streams_and_threads_share_one_engine(engine: Engine) -> None:
    prompts = [f"Story {index}:" for index in range(12)]
    want = [output.text for output in generate(engine, prompts)]

    async def stream(prompt: str) -> str:
        *_, last = [output async for output in engine.generate_async(prompt, GREEDY)]
        return last.text

    streams = asyncio.gather(*(stream(prompt) for prompt in prompts))
    threads = asyncio.gather(*(asyncio.to_thread(generate, engine, prompts) for _ in range(3)))
    assert await streams == want
    assert [[output.text for output in one] for one in await threads] == [want] * 3


async def test_leaving_a_stream_frees_its_request(engine: Engine) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    before = engine.metrics().finished["abort"]
    stream = engine.generate_async("Once", endless)
    async for _ in stream:
        break
    await stream.aclose()

    async def listen() -> None:
        async for _ in engine.generate_async("Twice", endless):
            has_begun.set()

    has_begun = asyncio.Event()
    task = asyncio.create_task(listen())
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.metrics().finished["abort"] == before + 2


def test_a_beginning_that_came_before_is_found_unless_the_salt_differs(engine: Engine) -> None:
    prompt = [7, 5, 6, 8] * 20 + [9]
    first, again = generate(engine, prompt)[0], generate(engine, prompt)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 80)
    assert again.outputs == first.outputs
    other = generate(engine, prompt, cache_salt="other")[0]
    assert (other.num_cached_tokens, other.outputs) == (0, first.outputs)
    with Engine(MODEL, max_model_len=256, enable_prefix_caching=False, num_threads=1) as without:
        assert [generate(without, prompt)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_a_grammar_holds_every_answer_and_a_wrong_one_is_named(engine: Engine) -> None:
    params = SamplingParams(grammar=Grammar("regex", "(red|blue){2}"), max_tokens=20, n=3, temperature=1.5)
    for answer in generate(engine, "Colours:", params)[0].outputs:
        assert re.fullmatch("(red|blue){2}", answer.text), answer
    wrong = SamplingParams(grammar=Grammar("regex", "(("), max_tokens=5)
    with pytest.raises(InvalidRequestError):
        generate(engine, ["good", "good"], [GREEDY, wrong])
    assert generate(engine, "Once")[0].finished


def test_priority_and_salt_reach_the_scheduler(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    add_request = EngineCore.add_request

    def spy(core: EngineCore, request: Request, now: float) -> None:
        seen.append((request.priority, request.cache_salt))
        add_request(core, request, now)

    monkeypatch.setattr(EngineCore, "add_request", spy)
    generate(engine, ["a", "b"], priority=-3, cache_salt="mine")
    chat = [{"role": "user", "content": "hi"}]
    engine.chat(chat, GREEDY, use_tqdm=False, priority=7, cache_salt="other")
    assert seen == [(-3, "mine"), (-3, "mine"), (7, "other")]


def test_what_vllms_parameters_say_is_done(engine: Engine) -> None:
    text = "Once upon a time there was"
    (plain,) = generate(engine, text)
    (silent,) = generate(engine, text, SamplingParams(temperature=0, max_tokens=8, detokenize=False))
    assert (silent.text, silent.outputs[0].token_ids) == ("", plain.outputs[0].token_ids)
    (cut,) = generate(engine, text, SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == plain.prompt_token_ids[-3:]
    fits = SamplingParams(temperature=0, max_tokens=56, truncate_prompt_tokens=-1, ignore_eos=True)
    (long,) = generate(engine, [[5] * 300], fits)
    assert (len(long.prompt_token_ids), len(long.outputs[0].token_ids)) == (200, 56)
    yes = StructuredOutputsParams(choice=["yes", "no"])
    (answer,) = generate(engine, text, SamplingParams(structured_outputs=yes, seed=1))
    assert answer.text in ("yes", "no")
    first = engine.tokenizer.decode(plain.outputs[0].token_ids[:1], skip_special_tokens=True)
    (other,) = generate(engine, text, SamplingParams(temperature=0, max_tokens=8, bad_words=[first]))
    assert plain.outputs[0].token_ids[0] not in other.outputs[0].token_ids
    (every,) = generate(engine, text, SamplingParams(logprobs=20, prompt_logprobs=1, max_tokens=1, seed=1))
    assert len((every.outputs[0].logprobs or ())[0].top) == 20
    with pytest.raises(InvalidRequestError, match="--max-logprobs"):
        generate(engine, text, SamplingParams(logprobs=-1))


def test_the_bar_counts_prompts(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["a", "b", "c"], GREEDY)
    assert "3/3" in capsys.readouterr().err
    engine.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
