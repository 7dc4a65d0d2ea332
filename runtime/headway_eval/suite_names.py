"""What files of tasks are called in reports: by their names, and where two share one, by more of their paths.

Checks and metrics go by these names, so no two are the same.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def unique_names(paths: Sequence[Path]) -> list[str]:
    """As short as tells them apart; files that no folder tells apart are numbered."""
    lengths = [1] * len(paths)
    while True:
        names = [str(Path(*path.parts[-length:])) for path, length in zip(paths, lengths, strict=True)]
        counts = Counter(names)
        longer = [
            length + (counts[name] > 1 and length < len(path.parts))
            for name, path, length in zip(names, paths, lengths, strict=True)
        ]
        if longer == lengths:
            return numbered(names)
        lengths = longer


def numbered(names: Sequence[str], most_characters: int | None = None) -> list[str]:
    """Each name cut to so many characters; from the second of a kind on, with a number behind."""
    found: list[str] = []
    for name in names:
        number, one = 1, _cut(name, "", most_characters)
        while one in found:
            number += 1
            one = _cut(name, f" ({number})", most_characters)
        found.append(one)
    return found


def _cut(name: str, suffix: str, most_characters: int | None) -> str:
    if most_characters is None or len(name) + len(suffix) <= most_characters:
        return name + suffix
    return name[: most_characters - len(suffix) - 3] + "..." + suffix
