"""Documents that say which test holds a claim: the test is there, in the file that they name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FILE = re.compile(r"`((?:tests|e2e|benchmarks)/[\w/]+\.py)(?:::\w+)?`")
TEST = re.compile(r"`(?:[\w/]+\.py::)?(test_\w+)`")


def defined_in(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


EVERYWHERE = {
    name
    for folder in ("tests", "e2e")
    for path in (ROOT / folder).rglob("test_*.py")
    for name in defined_in(path)
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    lines = (ROOT / document).read_text().splitlines()
    missing = []
    for number, line in enumerate(lines, start=1):
        files = FILE.findall(line)
        missing += [f"{document}:{number}: {name}" for name in files if not (ROOT / name).exists()]
        missing += [f"{document}:{number}: {name}" for name in TEST.findall(line) if name not in EVERYWHERE]
    assert missing == []


def test_each_claim_about_the_operator_names_its_test() -> None:
    """In the table of docs/operations.md; a test beside a file is in that file."""
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Where each claim is tested")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 50
    for row in rows:
        files, names = FILE.findall(row), TEST.findall(row)
        assert files, row
        held = {name for path in files for name in defined_in(ROOT / path)}
        assert set(names) <= held, (row, set(names) - held)
    whole = {
        f"{folder}/{path.name}"
        for folder in ("e2e", "tests/chart")
        for path in (ROOT / folder).glob("test_*.py")
    }
    assert whole - {path for row in rows for path in FILE.findall(row)} == set()


def test_files_that_are_said_to_need_no_cluster_ask_for_none() -> None:
    """In the sentence before that table: they have an API server of their own."""
    folder = ROOT / "e2e"
    alone = {*folder.glob("test_api_*.py"), *folder.glob("test_*_api.py")}
    alone |= {folder / "test_operator_faults.py", folder / "test_untouched_children.py"}
    asking = {path for path in folder.glob("test_*.py") if re.search(r"\w: Kubernetes\b", path.read_text())}
    assert asking == {*folder.glob("test_*.py")} - alone
