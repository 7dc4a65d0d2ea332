"""`make sbom`: each image's list has every package that the image installs, in its version, with its hashes.

By the tool in the version that requirements/sbom.txt pins, which the extra `dev` installs here.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[2]
ARGUMENTS = "requirements requirements/{}.txt --pyproject pyproject.toml --output-reproducible"
Packages = dict[tuple[str, str], set[str]]


def installed(image: str) -> Packages:
    """Hashes by name and version, as requirements/IMAGE.txt has them."""
    text = (CHECKOUT / "requirements" / f"{image}.txt").read_text().replace("\\\n", " ")
    packages: Packages = {}
    for line in (line for line in text.splitlines() if line and not line.startswith("#")):
        requirement = Requirement(line.partition(" --hash")[0].strip())
        key = (requirement.name, str(requirement.specifier).removeprefix("=="))
        packages.setdefault(key, set()).update(re.findall(r"--hash=sha256:(\w+)", line))
    return packages


def listed(image: str) -> Packages:
    """The same from the list that the tool makes of it."""
    answer = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *ARGUMENTS.format(image).split()],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "headway"
    packages: Packages = {}
    for one in document["components"]:
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
        hashes = packages.setdefault((one["name"], one["version"]), set())
        for reference in one["externalReferences"]:
            hashes |= {entry["content"] for entry in reference.get("hashes", ())}
    return packages


@pytest.mark.parametrize("image", ["operator", "runtime"])
def test_the_list_of_an_image_is_what_it_installs(image: str) -> None:
    want = installed(image)
    assert len(want) > 40
    assert listed(image) == want


def test_make_sbom_uses_the_pinned_tool_alone() -> None:
    recipe = (CHECKOUT / "Makefile").read_text().partition("\nsbom:")[2].partition("\n\n")[0]
    assert ARGUMENTS.format("$$image") in recipe.replace("\\\n", " ")
    assert re.findall(r"uv (?:tool|run|pip) .*", recipe) == [
        "uv pip sync --quiet --python $(SBOM) --require-hashes requirements/sbom.txt"
    ]
    pins = (CHECKOUT / "requirements" / "sbom.txt").read_text()
    assert f"\ncyclonedx-bom=={version('cyclonedx-bom')} " in pins
