"""The choices of a prepared request before they begin, and what becomes of them when all have ended.

A choice gets only what its client asked for: a plain one stays plain.
"""

import sys
from collections.abc import Collection

from headway_runtime.choice import Choice, TextRules
from headway_runtime.sampling_params import ALL_LOGPROBS
from headway_runtime.server.choice_details import DetailedChoice, Details
from headway_runtime.server.prompts import EncodedPrompt, Prepared
from headway_runtime.server.protocol import CompletionBody, GenerationBody
from headway_runtime.server.responses import WholeChoice
from headway_runtime.tokenizer import Vocabulary


def choices_of(
    body: GenerationBody, prepared: Prepared, vocabulary: Vocabulary, shown_tags: Collection[str] = ()
) -> dict[str, Choice]:
    """By engine request id. shown_tags: special tokens whose names are part of the text in any case."""
    sampling = prepared.requests[0].sampling
    rules = TextRules(
        stops=body.stops,
        with_stop=bool(body.include_stop_str_in_output),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop_reasons=frozenset(body.stop_token_ids or ()),
        special_tokens=body.skip_special_tokens is False or vocabulary.special_ids_of(shown_tags),
        # Who asks for token ids pairs them with their log-probabilities.
        keeps_cut_tokens=bool(body.return_token_ids),
    )
    details = [_details_of(body, prompt) for prompt in prepared.prompts]
    found: dict[str, Choice] = {}
    for index, request in enumerate(prepared.requests):
        own = details[index // prepared.choices_per_prompt]
        request_id = request.request_id
        if own is None:
            found[request_id] = Choice(index, request_id, vocabulary, rules)
        else:
            found[request_id] = DetailedChoice(index, request_id, vocabulary, rules, own)
    return found


def _details_of(body: GenerationBody, prompt: EncodedPrompt) -> Details | None:
    """None where plain text is all that was asked for."""
    is_plain = prompt.echo is None and body.prompt_logprobs is None
    if is_plain and not body.return_token_ids and not body.wants_running_usage:
        return None
    return Details(
        prompt_token_ids=prompt.token_ids,
        echo=prompt.echo,
        num_logprobs=_most_of(body.num_logprobs),
        num_prompt_logprobs=_most_of(body.prompt_logprobs),
        hides_answer=isinstance(body, CompletionBody) and body.max_tokens == 0,
        with_token_ids=bool(body.return_token_ids),
        with_usage=body.wants_running_usage,
    )


def _most_of(wanted: int | None) -> int | None:
    """How many of those that the engine gives are to be kept."""
    return sys.maxsize if wanted == ALL_LOGPROBS else wanted


def whole_choices(choices: list[Choice], whole: list[WholeChoice], prepared: Prepared) -> list[WholeChoice]:
    """What is sent of all choices, which have ended: the best of each prompt, with what was asked for of it.

    Best is the highest mean log-probability of a choice's tokens.
    """
    found: list[WholeChoice] = []
    for start in range(0, len(choices), prepared.choices_per_prompt):
        places = list(range(start, start + prepared.choices_per_prompt))
        first = choices[start]
        if isinstance(first, DetailedChoice):
            for place in places:
                _add_details(whole[place], choices[place], first)
        if prepared.answers_per_prompt < prepared.choices_per_prompt:
            places.sort(key=lambda place: choices[place].mean_logprob, reverse=True)
        found += [whole[place] for place in places[: prepared.answers_per_prompt]]
    return found


def _add_details(whole: WholeChoice, choice: Choice, first: DetailedChoice) -> None:
    """first: the first choice of the same prompt, which alone may know the prompt's log-probabilities."""
    assert isinstance(choice, DetailedChoice), "all choices of a request are alike"
    if choice.details.with_token_ids:
        whole.token_ids = choice.token_ids
        whole.prompt_token_ids = choice.details.prompt_token_ids
    if choice.details.num_prompt_logprobs is not None:
        whole.prompt_entries = first.prompt_entries(choice.details.num_prompt_logprobs)
