"""What a replica that does not listen yet says in its log of the model that it fetches. Pure.

The lines are those of `headway serve` before it opens its port: how far it is, and what it meets on the way.
"""

import re

# As the runtime writes its log: time, level, logger, words.
_LINE = re.compile(r"\S+Z (INFO|WARNING) headway_runtime\.(?:sources\.[a-z_.]+|load_progress) (.+)")
_LONGEST_WORDS = 240


def fetch_words(log: str) -> tuple[str, bool]:
    """The latest words about a fetch among lines of a log ("" where there are none); whether they warn."""
    for line in reversed(log.splitlines()):
        if found := _LINE.fullmatch(line):
            return found[2][:_LONGEST_WORDS], found[1] == "WARNING"
    return "", False
