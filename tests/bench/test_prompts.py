"""Prompts are as long as asked, share what they should, and repeat with their seed."""

from pathlib import Path

import numpy
import pytest

from headway_bench.errors import InputFileError, OptionsError, TargetError
from headway_bench.prompts import TokenIds, Words, candidates_of, draw_row, words_of_one_token
from headway_bench.spread import fixed, parse_spread
from headway_bench.tokenizer import LocalTokenizer
from headway_bench.workload import Shape, from_trace, random_stream, synthetic
from headway_traces import TraceRequest


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> LocalTokenizer:
    return LocalTokenizer(tokenizer_folder)


@pytest.fixture
def words(tokenizer: LocalTokenizer) -> Words:
    found = words_of_one_token(candidates_of(tokenizer.decoded_vocabulary()), tokenizer.count, "tokenizer")
    assert found is not None
    return found


def shape(**changes: object) -> Shape:
    plain = {
        "input_length": fixed(40),
        "output_length": fixed(8),
        "turns": fixed(1),
        "think_seconds": fixed(0),
    }
    return Shape(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 3, 50, 777])
def test_a_text_has_exactly_the_tokens_asked(words: Words, tokenizer: LocalTokenizer, length: int) -> None:
    for seed in range(20):
        assert tokenizer.count(words.write(draw_row(words.size, length, (seed,)))) == length


def test_words_that_do_not_add_up_are_refused(words: Words) -> None:
    with pytest.raises(TargetError, match="--prompt-lengths=ids"):
        words.check(lambda text: len(text.split()) + (len(text) > 300), random_stream(0))


def test_too_few_words_are_none() -> None:
    assert words_of_one_token(["one", "two"], lambda text: len(text.split()), "server") is None
    assert words_of_one_token(["one", "two"], lambda text: 7, "server") is None


def test_token_ids_are_written_as_they_are() -> None:
    assert TokenIds((10, 20, 30)).write(numpy.array([2, 0])) == [30, 10]


def test_plain_ids_leave_out_special_ones(tokenizer: LocalTokenizer) -> None:
    ids = tokenizer.plain_ids()
    assert 0 not in ids
    assert len(ids) > 256


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="--tokenizer"):
        LocalTokenizer(tmp_path)


def test_what_the_server_adds_is_left_out_of_the_first_message_only(words: Words) -> None:
    conversation = synthetic(shape(turns=fixed(3)), words, 5, 0, 0)(0)
    assert [len(str(turn.prompt).split()) for turn in conversation] == [35, 40, 40]
    assert [turn.input_tokens for turn in conversation] == [40, 40, 40]


def test_no_prompt_is_shorter_than_what_the_server_adds_and_a_token(words: Words) -> None:
    (turn,) = synthetic(shape(input_length=fixed(3)), words, 5, 0, 0)(0)
    assert (len(str(turn.prompt).split()), turn.input_tokens) == (1, 6)
    (turn,) = from_trace((TraceRequest(0.0, 3, 3),), 512, words, 5, 0, 0)(0)
    assert (len(str(turn.prompt).split()), turn.input_tokens) == (1, 6)


def test_conversations_repeat_with_seed_and_point_and_only_then(words: Words) -> None:
    spread = parse_spread("uniform:5:60")
    made = {
        (seed, point): [synthetic(shape(input_length=spread), words, 0, seed, point)(n) for n in range(5)]
        for seed in (0, 1)
        for point in (0, 1)
    }
    assert made[0, 0] == [synthetic(shape(input_length=spread), words, 0, 0, 0)(n) for n in range(5)]
    prompts = [str(turn.prompt) for group in made.values() for (turn,) in group]
    assert len(set(prompts)) == 20


def test_prompts_share_as_many_beginnings_as_asked(words: Words) -> None:
    workload = synthetic(shape(num_prefixes=3, prefix_length=30), words, 0, 0, 0)
    prompts = [str(workload(number)[0].prompt).split() for number in range(60)]
    assert {len(prompt) for prompt in prompts} == {70}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 3
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 60
    assert workload(0)[0].input_tokens == 70


def test_a_traces_prompts_share_exactly_the_blocks_that_its_hash_ids_share(words: Words) -> None:
    requests = (
        TraceRequest(0.0, 1300, 3, (0, 1, 2)),
        TraceRequest(0.0, 1536, 3, (0, 1, 3)),
        TraceRequest(0.0, 600, 3, (0, 9)),
        TraceRequest(0.0, 700, 3),
    )
    workload = from_trace(requests, 512, words, 0, 0, 0)
    first, second, third, bare = (str(workload(number)[0].prompt).split() for number in range(4))
    assert [len(prompt) for prompt in (first, second, third, bare)] == [1300, 1536, 600, 700]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1300]
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]
    assert bare[:10] != first[:10]
    assert workload(4)[0].prompt == workload(0)[0].prompt, "the trace begins again"


def test_a_hash_id_stands_for_as_many_tokens_whatever_is_added_by_the_server(words: Words) -> None:
    workload = from_trace((TraceRequest(0.0, 1024, 3, (4, 5)),), 512, words, 24, 0, 0)
    assert len(str(workload(0)[0].prompt).split()) == 1000


def test_a_range_beyond_reach_is_named() -> None:
    with pytest.raises(OptionsError, match="normal"):
        parse_spread("normal:5:1:9:3", 1)
