"""What range a schema node has, in words: `kubectl explain` shows a field's description and no bounds.

A description that a person wrote with its numbers in it is left as it is; to any other one its range is
added, and that of the elements where these have no description of their own, which no command would show.
"""

import re
from typing import Any

Schema = dict[str, Any]

# Names of the lower and upper bound, and what is counted.
BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " elements"),
    ("minProperties", "maxProperties", " entries"),
)
_DEFAULT = re.compile(r"(?<=\. )(?:No default|Default)\b")


def range_of(node: Schema) -> str:
    """Of numbers, of the length of text, of the number of elements; empty without an upper bound."""
    for least, most, unit in BOUNDS:
        if most in node:
            low = node.get(least)
            return f"{low} to {node[most]}{unit}" if low is not None else f"at most {node[most]}{unit}"
    return ""


def with_range(description: str, node: Schema) -> str:
    """`description` with a sentence of what it lacks, before the one that tells the default."""
    parts = [] if _is_told(description, node) else [range_of(node)]
    for word, each in (("items", "each"), ("additionalProperties", "each value")):
        element = node.get(word)
        if isinstance(element, dict) and "description" not in element and not _is_told(description, element):
            parts.append(f"{each} {range_of(element)}")
    if not parts:
        return description
    sentence = ", ".join(parts)
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    place = _DEFAULT.search(description)
    if place is None:
        return f"{description} {sentence}"
    return f"{description[: place.start()]}{sentence} {description[place.start() :]}"


def _is_told(description: str, node: Schema) -> bool:
    """Whether both numbers stand in it; that there must be one at all need not be said again."""
    for least, most, _ in BOUNDS:
        if most in node:
            is_trivial = least != "minimum" and node.get(least) == 1
            wanted = [str(node[bound]) for bound in (least, most) if bound in node]
            return set(wanted[1:] if is_trivial else wanted) <= set(re.findall(r"\d+", description))
    return True
