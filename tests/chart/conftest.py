"""The real helm and promtool for the chart's tests, and functions that render the chart and pick from it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
CHART = CHECKOUT / "charts" / "headway"
BUILD_TIMEOUT_SECONDS = 900
NAMESPACED = "watchNamespace=models"

Render = Callable[..., list[dict[str, Any]]]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def built(group: str) -> Path:
    """A program as the cluster tests use it: compiled once into the cache, which takes minutes."""
    answer = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "build", group],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return Path(answer.stdout.splitlines()[-1].split("\t")[1])


@pytest.fixture(scope="session")
def helm() -> Path:
    return built("helm")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return built("prometheus")


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """Render the chart with `--set` arguments: every object it would install.

    `api_versions`: what the cluster has beside Kubernetes' own.
    """

    def run(*settings: str, api_versions: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        arguments = [word for setting in settings for word in ("--set", setting)]
        arguments += [word for version in api_versions for word in ("--api-versions", version)]
        output = subprocess.check_output(
            [helm, "template", "headway", CHART, "--namespace", "headway-system", *arguments],
            text=True,
            timeout=60,
        )
        return [document for document in yaml.safe_load_all(output) if document]

    return run
