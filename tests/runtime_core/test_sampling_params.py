"""What users of the in-process engine may ask for, and how they are told what they may not."""

from typing import Any, get_args

import annotated_types
import pytest

from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import Grammar
from headway_runtime.sampling_params import ABOVE_LOWEST, INTEGERS, NUMBERS, SamplingParams
from headway_runtime.server.protocol import CompletionBody


def engine_params(params: SamplingParams, room: int = 100) -> Any:
    return params.for_engine(vocab_size=50, eos_token_ids=frozenset({1}), room=room)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", 2.5, "outside [0, 2]"),
        ("temperature", "hot", "want a finite number"),
        ("temperature", float("nan"), "want a finite number"),
        ("temperature", True, "want a finite number"),
        ("temperature", 10**400, "outside [0, 2]"),
        pytest.param("temperature", -(10**5000), "outside [0, 2]", id="a number that Python does not print"),
        ("top_p", 0.0, "outside (0, 1]"),
        ("top_p", None, "want a finite number"),
        ("repetition_penalty", 0, "outside [0.01, 10]"),
        ("n", 0, "outside [1, 128]"),
        ("n", None, "want an integer"),
        ("max_tokens", 0, "outside [1, "),
        ("max_tokens", 5.0, "want an integer or None"),
        ("seed", 2**63, "outside"),
        ("logprobs", 21, "outside [0, 20]"),
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
    assert (got.max_tokens, got.min_tokens, got.stop_token_ids) == (100, 2, {1, 9})
    assert (got.num_logprobs, got.num_prompt_logprobs, got.grammar) == (
        2,
        0,
        Grammar("regex", "a+", "grammar"),
    )


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
