"""The model that tests of the Hub fetch, and how its files are named and read."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from headway_runtime.sources.reference import HubModel

MODEL = HubModel("org/name", "main")
SHARD = "model-00002-of-00003.safetensors"
Fetch = Callable[..., Path]


def holds_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def storage_path(files: dict[str, bytes], name: str = SHARD) -> str:
    return hashlib.sha256(files[name]).hexdigest()
