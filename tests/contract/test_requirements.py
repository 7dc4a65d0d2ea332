"""What the images and `make sbom` install: pinned, checked against hashes, as the constraints say, enough.

After a change of dependencies: make requirements.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
FILES = {"operator": ("operator", "gateway"), "runtime": ("runtime",)}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def requirements(name: str) -> list[tuple[Requirement, int]]:
    """Each with how many hashes it may have."""
    text = (CHECKOUT / "requirements" / f"{name}.txt").read_text()
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(Requirement(HASH.sub("", entry).strip()), len(HASH.findall(entry))) for entry in entries]


def pinned(name: str) -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    for requirement, _ in requirements(name):
        versions.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    return versions


@pytest.mark.parametrize("name", [*FILES, "build", "sbom"])
def test_everything_is_pinned_and_has_its_hashes(name: str) -> None:
    found = requirements(name)
    assert found
    for requirement, num_hashes in found:
        assert re.fullmatch(r"==[^=,*]+", str(requirement.specifier)), requirement
        assert num_hashes > 0, requirement


@pytest.mark.parametrize("name", [*FILES, "sbom"])
def test_pins_are_those_that_are_tested(name: str) -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    tested: dict[str, set[str]] = {}
    for line in (line for line in lines if line and not line.startswith("#")):
        requirement = Requirement(line.partition(" #")[0])
        tested.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    for package, versions in pinned(name).items():
        assert versions <= tested[package], f"{package}: run `make requirements`"


@pytest.mark.parametrize("name", FILES)
def test_every_direct_dependency_is_there(name: str) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    wanted = [*project.get("dependencies", ())]
    for extra in FILES[name]:
        wanted += project["optional-dependencies"][extra]
    versions = pinned(name)
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            continue  # one extra that takes in another
        for version in versions[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(version.removeprefix("=="), prereleases=True), text


@pytest.mark.parametrize("folder", FILES)
def test_dockerfiles_install_nothing_else(folder: str) -> None:
    text = (CHECKOUT / folder / "Dockerfile").read_text().replace("\\\n", " ")
    for line in re.findall(r"\bpip (?:install|wheel)[^&\n]*", text):
        is_checked = "--require-hashes" in line
        is_own = "--no-deps" in line and ("--no-index" in line or "--no-build-isolation" in line)
        assert is_checked or is_own, line


def test_images_have_the_same_base_named_by_its_digest() -> None:
    texts = [(CHECKOUT / folder / "Dockerfile").read_text() for folder in FILES]
    [base] = {line for text in texts for line in re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE)}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    # Nothing is taken from anywhere else.
    for text in texts:
        sources = re.findall(r"^FROM (\S+)|^COPY --from=(\S+)", text, re.MULTILINE)
        assert {one for pair in sources for one in pair if one} == {"${BASE}", "${DEPENDENCIES}", "build"}
