"""Definitions of other projects' kinds, as published in their Go modules, pinned by content."""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.binaries import locked, toolchain
from e2e.cluster.settings import fingerprint

FETCH_TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Published:
    """Files of one version of a Go module. content: its hash, as `go.sum` has it."""

    module: str
    version: str
    content: str
    files: tuple[str, ...]


LEADER_WORKER_SET = Published(
    "sigs.k8s.io/lws",
    "v0.7.0",
    "h1:qWfzX8+UBak+Hq0+m/PuE3uO0mp/3dmm5q/h/7z31A8=",
    ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
)
MONITORING = Published(
    "github.com/prometheus-operator/prometheus-operator",
    "v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    tuple(
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kinds}.yaml"
        for kinds in ("podmonitors", "prometheusrules", "servicemonitors")
    ),
)


def files_of(published: Published, cache: Path) -> list[Path]:
    """The files, fetched once and kept in the cache. ValueError for other contents than the pinned ones."""
    name = published.module.rsplit("/", 1)[-1]
    kept = fingerprint([], published.version, published.content, *published.files)
    folder = cache / "cluster" / f"definitions-{name}-{kept}"
    if not folder.is_dir():
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _fetch(published, folder, cache)
    return [folder / Path(file).name for file in published.files]


def definitions(published: Published, cache: Path) -> list[dict[str, Any]]:
    """The CustomResourceDefinitions in these files."""
    # The loader in C, where it is there: one definition has more than a megabyte.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    texts = [file.read_text() for file in files_of(published, cache)]
    return [one for text in texts for one in yaml.load_all(text, loader) if one]


def _fetch(published: Published, folder: Path, cache: Path) -> None:
    """Into a neighbouring folder, which is renamed: the cache never holds half of them."""
    wanted = f"{published.module}@{published.version}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        done = subprocess.run(
            [toolchain(cache), "mod", "download", "-json", wanted],
            cwd=temporary,  # in no module, whose requirements would come along
            # The content is pinned here; a server of sums need not be reached.
            env=os.environ
            | {"GOSUMDB": "off", "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GOWORK": "off"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=FETCH_TIMEOUT_SECONDS,
            check=False,
        )
        told = json.loads(done.stdout or "{}")
        if done.returncode or "Error" in told:
            raise ValueError(f"{wanted} cannot be fetched: {told.get('Error', f'status {done.returncode}')}")
        if told["Sum"] != published.content:
            raise ValueError(f"{wanted} is {told['Sum']}, want {published.content}")
        files = Path(temporary) / "files"
        files.mkdir()
        for file in published.files:
            shutil.copyfile(Path(told["Dir"]) / file, files / Path(file).name)
        files.rename(folder)
