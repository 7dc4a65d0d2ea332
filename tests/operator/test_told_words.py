"""The words that decisions and events are told in: docs/slo.md has each that the code has, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headway_operator import conditions, slo

ROOT = Path(__file__).parents[2]
SLO, EVENTS = Path(slo.__file__).parent, Path(conditions.__file__).with_name("events.py")
PAGE = (
    (ROOT / "docs" / "slo.md").read_text().partition("## Causes, blockers, events")[2].partition("\n## ")[0]
)
# CamelCase with a small letter: neither TTFT nor a sentence.
WORD = re.compile(r"(?=.*[a-z])(?:[A-Z][A-Za-z]+)")


def constants(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def causes_and_blockers() -> set[str]:
    """Every CamelCase word in the controller's code, but for the names of its own classes and types."""
    trees = [ast.parse(path.read_text()) for path in SLO.glob("*.py")]
    words = {word for tree in trees for word in constants(tree) if WORD.fullmatch(word)}
    nodes = [one for tree in trees for one in ast.walk(tree)]
    classes = {one.name for one in nodes if isinstance(one, ast.ClassDef)}
    types = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return words - classes - types


def event_reasons() -> set[str]:
    """Second words of the tuples (kind, reason, message) that are written out."""
    tuples = [one.elts for one in ast.walk(ast.parse(EVENTS.read_text())) if isinstance(one, ast.Tuple)]
    kinds = [words for words in tuples if len(words) == 3 and {*constants(words[0])} & {"Normal", "Warning"}]
    return {one.value for _, one, _ in kinds if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def listed(table: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_every_cause_and_blocker_is_in_the_table_and_no_other() -> None:
    rows = listed(PAGE.partition("| event |")[0])
    assert len(rows) == len(set(rows))
    assert len(rows) > 25
    assert set(rows) == causes_and_blockers()


def test_every_event_that_is_no_condition_or_cause_is_in_the_table_and_no_other() -> None:
    rows = listed(PAGE.partition("| event |")[2])
    assert {"RevisionMade", "CanaryStep"} <= set(rows)
    assert sorted(rows) == sorted(event_reasons())
