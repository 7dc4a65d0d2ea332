"""Whether an answer is the expected one, by the rule that the task names. Knows no model.

exact     the same text, but for white space around it
contains  the expected text stands somewhere in it
regex     the expected pattern is found in it (Python's `re`)
json      it is JSON, and as a value the same
"""

import json
import re
from typing import Literal, get_args

Match = Literal["exact", "contains", "regex", "json"]
MATCHES: tuple[Match, ...] = get_args(Match)


def is_right(match: Match, want: object, given: str) -> bool:
    """want: a text; for json the value."""
    if match == "json":
        return _same_json(want, given)
    assert isinstance(want, str), want
    if match == "exact":
        return given.strip() == want.strip()
    if match == "contains":
        return want in given
    return re.search(want, given) is not None


def _same_json(want: object, given: str) -> bool:
    try:
        # By their writing: Python holds True for 1.
        return json.dumps(json.loads(given), sort_keys=True) == json.dumps(want, sort_keys=True)
    except (ValueError, RecursionError):  # an answer of brackets without end is a wrong one
        return False
