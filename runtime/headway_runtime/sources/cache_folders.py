"""Where a remote model is kept: in the Hub's own cache if it is hf://, in a folder of ours else.

Reads the variables that the Hub's library documents (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME), so that nothing
has to be imported to find what is cached.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from headway_runtime.sources.reference import BucketModel, HubModel, RemoteModel
from headway_runtime.sources.store import Store
from headway_runtime.sources.wanted import MODEL, Kind

_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 80


def store_of(
    model: RemoteModel, download_dir: str | None, environment: Mapping[str, str], kind: Kind = MODEL
) -> Store:
    """The store of a model, or of an adapter. download_dir: the flag of that name."""
    if download_dir is not None:
        root, remedy = Path(download_dir).expanduser(), "choose another folder with --download-dir"
    elif isinstance(model, HubModel):
        root = hub_cache(environment)
        remedy = "choose another folder with --download-dir or HF_HOME"
    else:
        root = _cache_home(environment) / "headway" / "models"
        remedy = "choose another folder with --download-dir or XDG_CACHE_HOME"
    return Store(root.absolute() / _name(model, environment), f"free some of it, or {remedy}", kind.suffix)


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The cache of the Hub's library."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return _path(environment[name])
    if environment.get("HF_HOME"):
        return _path(environment["HF_HOME"]) / "hub"
    return _cache_home(environment) / "huggingface" / "hub"


def _cache_home(environment: Mapping[str, str]) -> Path:
    return _path(environment.get("XDG_CACHE_HOME") or "~/.cache")


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _name(model: RemoteModel, environment: Mapping[str, str]) -> str:
    """One folder's name: readable, and different for different sources."""
    if isinstance(model, HubModel):
        return "models--" + model.repository.replace("/", "--")  # as the Hub's library has it
    if isinstance(model, BucketModel):
        scheme, text = "s3", f"{model.bucket}/{model.prefix}"
        # Two servers may each have a bucket of that name.
        server = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    else:
        scheme, text, server = "oci", f"{model.host}/{model.repository}", ""
    readable = _OTHER_CHARACTERS.sub("--", text).strip("-")[-LONGEST_NAME:]
    return f"{scheme}--{readable}--{hashlib.sha256(f'{server} {text}'.encode()).hexdigest()[:8]}"
