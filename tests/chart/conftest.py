"""The real helm for the chart's tests, and a function that renders the chart with it."""

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

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def helm() -> Path:
    """Helm as the cluster tests use it: compiled once into the cache, in 90 seconds where it is not there."""
    answer = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "build", "helm"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return Path(answer.stdout.splitlines()[-1].split("\t")[1])


@pytest.fixture(scope="session")
def render(helm: Path) -> Render:
    """Render the chart with `--set` arguments: every object it would install."""

    def run(*settings: str) -> list[dict[str, Any]]:
        arguments = [word for setting in settings for word in ("--set", setting)]
        output = subprocess.check_output(
            [helm, "template", "headway", CHART, "--namespace", "headway-system", *arguments],
            text=True,
            timeout=60,
        )
        return [document for document in yaml.safe_load_all(output) if document]

    return run
