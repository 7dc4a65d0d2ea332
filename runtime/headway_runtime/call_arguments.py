"""What a call of the in-process engine says besides its prompts, checked before anything of it runs.

The engine's thread trusts what it is given: a priority or a salt that it cannot reckon with would end it, and
with it all that others wait for.
"""

from collections.abc import Sequence

from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import LARGEST_PRIORITY, MAX_SALT_CHARACTERS, SMALLEST_PRIORITY
from headway_runtime.sampling_params import SamplingParams, check_integer, is_text, wrong


def check_call(priority: object, cache_salt: object) -> None:
    """InvalidRequestError for what no request may carry."""
    check_integer("priority", priority, SMALLEST_PRIORITY, LARGEST_PRIORITY)
    if not is_text(cache_salt) or len(cache_salt) > MAX_SALT_CHARACTERS:
        remedy = f"want a string of at most {MAX_SALT_CHARACTERS} characters; '' is none"
        raise wrong("cache_salt", cache_salt, remedy)


def params_of_each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts; `default` if none are given.

    InvalidRequestError unless it is one, or one for each.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    if not isinstance(given, Sequence):
        raise wrong("sampling_params", given, "want SamplingParams(...), or a list with one for each prompt")
    for one in given:
        if not isinstance(one, SamplingParams):
            raise wrong("sampling_params", one, "each of them is to be SamplingParams(...)")
    if len(given) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries for {count} prompts; give one, or one for each",
            param="sampling_params",
        )
    return given
