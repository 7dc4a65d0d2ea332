"""What users of the in-process engine may ask for, and how they are told what they may not."""

from typing import Any, get_args

import annotated_types
import pytest

from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import Grammar
from headway_runtime.sampling_params import ABOVE_LOWEST, INTEGERS, NUMBERS, SamplingParams
from headway_runtime.server.protocol import CompletionBody
from headway_runtime.structured_outputs import StructuredOutputsParams


def engine_params(params: SamplingParams, room: int = 100, max_logprobs: int = 20) -> Any:
    return params.for_engine(
        vocab_size=50,
        eos_token_ids=frozenset({1}),
        room=room,
        encode=lambda text: [ord(one) % 50 for one in text],
        max_logprobs=max_logprobs,
    )


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", 2.5, "outside [0, 2]"),
        ("temperature", "hot", "want a finite number"),
        ("temperature", float("nan"), "want a finite number"),
        ("temperature", True, "want a finite number"),
        ("temperature", 10**400, "outside [0, 2]"),
        pytest.param("temperature", -(10**5000), "outside [0, 2]", id="a number that Python does not print"),
        ("top_p", -0.1, "outside [0, 1]"),
        ("top_p", None, "want a finite number"),
        ("repetition_penalty", 0, "outside (0, "),
        ("n", 0, "outside [1, 128]"),
        ("n", None, "want an integer"),
        ("max_tokens", 0, "outside [1, "),
        ("max_tokens", 5.0, "want an integer or None"),
        ("seed", 2**63, "outside"),
        ("repetition_penalty", float("inf"), "want a finite number"),
        ("logprobs", -2, "outside [-1, "),
        ("bad_words", "word", "want a list of strings"),
        ("truncate_prompt_tokens", 0, "at least one token"),
        ("truncate_prompt_tokens", -2, "outside [-1, "),
        ("detokenize", None, "want True or False"),
        ("structured_outputs", {"regex": "a"}, "want StructuredOutputsParams"),
        ("bad_words", [""], "1 to 256 characters"),
        ("bad_words", ["a"] * 129, "at most 128"),
        ("stop", [""], "1 to 256 characters"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", [5], "1 to 256 characters"),
        ("stop", 5, "want a string"),
        ("stop_token_ids", [-1], "is no token id"),
        ("stop_token_ids", "12", "want a list of token ids"),
        ("allowed_token_ids", [], "allow at least one"),
        ("logit_bias", {5: 101}, "outside [-100, 100]"),
        ("logit_bias", {"5": 1}, "is no token id"),
        ("logit_bias", [5], "want a dict"),
        ("ignore_eos", 1, "want True or False"),
        ("logit_bias", {5: 10**400}, "outside [-100, 100]"),
        ("stop_token_ids", [10**400], "is no token id"),
        ("allowed_token_ids", [2**31], "is no token id"),
        ("stop", "\ud800", "1 to 256 characters"),
        ("grammar", r"\d", "want a Grammar"),
        ("grammar", Grammar("json_schema", {}), "is a string"),  # type: ignore[arg-type]
        ("min_tokens", 17, "more than max_tokens=16"),
    ],
)
def test_a_wrong_value_is_named_with_the_way_out(field: str, value: object, remedy: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert message.startswith(f"{field}=")
    assert remedy in message
    assert caught.value.param == field


def test_a_grammar_of_no_kind_is_refused_when_it_is_made() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Grammar("regexp", "a")  # type: ignore[arg-type]
    kinds = "'json_object', 'json_schema', 'regex', 'choice', 'lark', 'ebnf'"
    assert str(caught.value) == f"kind='regexp' is no kind of grammar; known are {kinds}"
    assert caught.value.param == "grammar"


def test_ranges_are_those_of_the_http_api() -> None:
    for name, (lowest, highest) in {**INTEGERS, **NUMBERS}.items():
        field = CompletionBody.model_fields[name]
        found = list(field.metadata)
        for member in get_args(field.annotation):
            found += getattr(member, "__metadata__", ())
        bounds: dict[str, object] = {}
        for one in found:
            for bound in [one, *getattr(one, "metadata", ())]:
                for kind in (annotated_types.Ge, annotated_types.Gt, annotated_types.Le):
                    if isinstance(bound, kind):
                        bounds[kind.__name__] = getattr(bound, kind.__name__.lower())
        low = "Gt" if name in ABOVE_LOWEST else "Ge"
        # The HTTP API takes max_tokens=0 for an echo.
        want = {low: 0 if name == "max_tokens" else lowest, "Le": highest}
        assert bounds == want, name


def test_the_engine_gets_what_was_asked_for_within_the_model() -> None:
    got = engine_params(
        SamplingParams(
            temperature=1e-6,
            top_k=-1,
            top_p=0.5,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={7: 2.5},
            allowed_token_ids=[7, 8],
            bad_words=["ab", "c"],
            max_tokens=200,
            min_tokens=2,
            stop_token_ids=[9],
            logprobs=2,
            prompt_logprobs=0,
            grammar=Grammar("regex", "a+"),
        )
    )
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.0, 0, 0.5, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (1, -1, 1.5)
    assert (got.logit_bias, got.allowed_token_ids) == (((7, 2.5),), {7, 8})
    a, b, c = (ord(one) % 50 for one in "abc")
    assert got.bad_words == ((a, b), (c,)), "with a space these would be longer"
    assert (got.max_tokens, got.min_tokens, got.stop_token_ids) == (100, 2, {1, 9})
    assert (got.num_logprobs, got.num_prompt_logprobs, got.grammar) == (
        2,
        0,
        Grammar("regex", "a+", "grammar"),
    )


def test_no_share_of_probability_is_greedy_and_penalties_end_where_float32_does() -> None:
    got = engine_params(SamplingParams(top_p=0.0, temperature=1.5, repetition_penalty=1e300))
    assert (got.temperature, got.top_p, got.repetition_penalty) == (0.0, 1.0, 1e6)
    assert engine_params(SamplingParams(repetition_penalty=1e-300)).repetition_penalty == 1e-6


def test_log_probabilities_are_as_many_as_the_engine_gives() -> None:
    every = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    got = engine_params(every, max_logprobs=-1)
    assert (got.num_logprobs, got.num_prompt_logprobs) == (50, 50)
    assert engine_params(SamplingParams(logprobs=60), max_logprobs=-1).num_logprobs == 50
    assert engine_params(SamplingParams(logprobs=30), max_logprobs=30).num_logprobs == 30
    for params, field in ((every, "logprobs"), (SamplingParams(prompt_logprobs=21), "prompt_logprobs")):
        with pytest.raises(InvalidRequestError, match=r"at most 20, or .* --max-logprobs") as caught:
            engine_params(params)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({"json": {"type": "object"}}, Grammar("json_schema", '{"type": "object"}', "structured_outputs")),
        ({"json": "{}"}, Grammar("json_schema", "{}", "structured_outputs")),
        ({"regex": "a+"}, Grammar("regex", "a+", "structured_outputs")),
        ({"choice": ("a", "b")}, Grammar("choice", '["a", "b"]', "structured_outputs")),
        ({"grammar": "root ::= x"}, Grammar("ebnf", "root ::= x", "structured_outputs")),
        ({"json_object": True}, Grammar("json_object", "", "structured_outputs")),
    ],
)
def test_an_answers_form_may_be_said_in_vllms_words(asked: dict[str, Any], want: Grammar) -> None:
    assert engine_params(SamplingParams(structured_outputs=StructuredOutputsParams(**asked))).grammar == want


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({}, "structured_outputs holds nothing"),
        ({"json_object": False}, "json_object=True"),
        ({"regex": "a", "choice": ["a"]}, "holds regex, choice; give one"),
        ({"regex": 5}, "structured_outputs.regex=5: want a text"),
        ({"choice": "ab"}, "of choice a list of texts"),
        ({"json": [1]}, "of json also a dict"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object"),
    ],
)
def test_a_form_that_is_none_is_named(asked: dict[str, Any], want: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**asked)
    assert want in str(caught.value)


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="give one of them"):
        SamplingParams(grammar=Grammar("regex", "a"), structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="looked for in the text"):
        SamplingParams(stop="a", detokenize=False)


def test_a_bad_word_of_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="comes to no token"):
        engine_params(SamplingParams(bad_words=["  "]))


def test_no_limit_means_what_fits_and_ignore_eos_means_no_end() -> None:
    got = engine_params(SamplingParams(max_tokens=None, ignore_eos=True), room=37)
    assert (got.max_tokens, got.stop_token_ids) == (37, frozenset())


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_token_that_the_model_lacks_is_refused(field: str) -> None:
    fields: dict[str, Any] = {field: {50: 1.0} if field == "logit_bias" else [50]}
    with pytest.raises(InvalidRequestError, match=f"{field} holds token id 50; this model's ids end at 49"):
        engine_params(SamplingParams(**fields))


def test_what_can_never_be_sampled_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="all stop tokens"):
        engine_params(SamplingParams(allowed_token_ids=[1], min_tokens=1))
