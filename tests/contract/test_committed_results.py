"""Results name the commit that they were measured at, one that everybody who has this repository has."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = re.compile(r'\bcommit(?:": "| )`?([0-9a-f]{7,40})\b', re.IGNORECASE)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def named() -> list[tuple[str, str]]:
    """Each commit and the page or file that names it."""
    folders = (ROOT / "benchmarks", ROOT / "docs", ROOT / "e2e")
    pages = [path for folder in folders for suffix in ("md", "json") for path in folder.rglob(f"*.{suffix}")]
    return sorted(
        {
            (commit, str(page.relative_to(ROOT)))
            for page in [*pages, ROOT / "README.md"]
            for commit in COMMIT.findall(page.read_text(encoding="utf-8"))
        }
    )


def test_every_commit_that_results_name_is_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history: a git clone that is not shallow")
    found = named()
    assert len({page for _, page in found}) >= 5, found
    unknown = [
        f"{page}: {commit}"
        for commit, page in found
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0
    ]
    assert not unknown, (
        f"measured at commits that nobody can look at: {unknown}; remedy: measure again at a commit on main"
    )
