"""Images and artifacts for the tests of registries, and how they are pushed and fetched."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import RegistryModel
from headway_runtime.sources.registry import Registry

IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
Fetch = Callable[..., Path]


@dataclass(frozen=True)
class Layer:
    content: bytes
    media_type: str = TAR
    annotations: dict[str, str] = field(default_factory=dict)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Pusher:
    """Pushes to a registry as its API wants it."""

    def __init__(self, address: str, repository: str, login: tuple[str, str] | None = None) -> None:
        self.address, self.repository = address, repository
        self._client = httpx2.Client(base_url=f"http://{address}", auth=login, timeout=60)

    def close(self) -> None:
        self._client.close()

    def blob(self, content: bytes) -> dict[str, Any]:
        begun = self._client.post(f"/v2/{self.repository}/blobs/uploads/")
        assert begun.status_code == 202, begun.text
        where = urlsplit(begun.headers["location"])
        digest = digest_of(content)
        done = self._client.put(f"{where.path}?{where.query}&digest={digest}", content=content)
        assert done.status_code == 201, done.text
        return {"digest": digest, "size": len(content)}

    def manifest(self, manifest: dict[str, Any], reference: str) -> str:
        content = json.dumps(manifest).encode()
        done = self._client.put(
            f"/v2/{self.repository}/manifests/{reference}",
            content=content,
            headers={"content-type": manifest["mediaType"]},
        )
        assert done.status_code == 201, done.text
        return digest_of(content)

    def push(self, layers: list[Layer], tag: str = "v1", config: str = IMAGE_CONFIG) -> RegistryModel:
        rows = [
            {"mediaType": one.media_type, "annotations": one.annotations, **self.blob(one.content)}
            for one in layers
        ]
        self.manifest(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": config, **self.blob(b"{}")},
                "layers": rows,
            },
            tag,
        )
        return RegistryModel(self.address, self.repository, tag)


def fetch_image(model: RegistryModel, cache: Path, patience: Patience, watcher: Any) -> Path:
    store = store_of(model, str(cache), os.environ)
    with closing(Registry(model)) as registry:
        return fetch(model, registry, store, patience, watcher, check_config)


def artifact(files: dict[str, bytes], annotation: str = "org.opencontainers.image.title") -> list[Layer]:
    return [Layer(content, TAR, {annotation: name}) for name, content in files.items()]
