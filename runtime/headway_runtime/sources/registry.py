"""An image or artifact of an OCI registry: its manifest, and its layers as files or as archives of files.

Speaks the distribution API (OCI Distribution Specification 1.1) itself, as there is no client for Python that
continues an interrupted blob. Every manifest and blob is compared with the digest that names it.

    image        layers are tar archives, whose /models folder holds the model (KServe's modelcars)
    artifact     each layer is a file, named by an annotation, or a tar of files (ORAS, ModelPack)

Layers of code and of training data are left where they are.
"""

import hashlib
import json
import os
import platform
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import httpx2

from headway_runtime.errors import ModelFetchError, SourceRefusedError
from headway_runtime.sources.checksums import Checksum
from headway_runtime.sources.http_answers import (
    TIMEOUT,
    chunks_of,
    is_transient,
    offset_of,
    retry_after,
    unreachable,
)
from headway_runtime.sources.reference import RegistryModel
from headway_runtime.sources.registry_login import Login
from headway_runtime.sources.remote import Listing, RemoteFile, Stream, TransientError
from headway_runtime.sources.wanted import IMAGE_ROOT

# Registries to be asked without TLS, beside those of this machine: host:port, separated by commas.
PLAIN_HTTP_VARIABLE = "HEADWAY_PLAIN_HTTP_REGISTRIES"
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
IMAGE_LAYERS = ("application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs.")
IMAGE_CONFIGS = ("application/vnd.oci.image.config.", "application/vnd.docker.container.image.")
# How a layer is named that is one file: by ModelPack, by its predecessor, by ORAS.
PATH_ANNOTATIONS = ("org.cncf.model.filepath", "org.cnai.model.filepath", "org.opencontainers.image.title")
UNPACK_ANNOTATION = "io.deis.oras.content.unpack"
_LEFT_OUT = re.compile(r"\.(code|dataset)\.")
_TAR = re.compile(r"[.+]tar([.+]|$)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LARGEST_MANIFEST_BYTES = 16 << 20
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registry:
    """One repository of one registry."""

    def __init__(self, model: RegistryModel, environment: dict[str, str] | None = None) -> None:
        environment = dict(os.environ) if environment is None else environment
        self._model = model
        self._host = model.host
        self._repository = model.repository
        scheme = "http" if is_plain(self._host, environment) else "https"
        self._base = f"{scheme}://{self._host}/v2/{self._repository}"
        self._client = httpx2.Client(
            follow_redirects=True, timeout=TIMEOUT, headers={"user-agent": "headway"}
        )
        self._login = Login(
            self._client, model.host, self._repository, environment, is_plain=scheme == "http"
        )

    def listing(self) -> Listing:
        """Of the manifest that the reference names now."""
        digest, manifest = self._manifest(self._model.reference)
        if "manifests" in manifest:
            digest, manifest = self._manifest(self._choose(self._objects(manifest, "manifests")))
        files: list[RemoteFile] = []
        archives: list[RemoteFile] = []
        config = self._object(manifest, "config")
        is_image = str(config.get("mediaType", "")).startswith(IMAGE_CONFIGS)
        for number, layer in enumerate(self._objects(manifest, "layers")):
            file, is_archive = self._described(layer, number)
            if file is not None:
                (archives if is_archive else files).append(file)
        is_image = is_image and not files
        identity = digest.removeprefix("sha256:")
        below = IMAGE_ROOT if is_image else ""
        return Listing(identity, tuple(files), tuple(archives), below, is_nested=True)

    def _described(self, layer: dict[str, Any], number: int) -> tuple[RemoteFile | None, bool]:
        """A layer as a file, and whether that is an archive; None for what is never wanted."""
        media_type, digest = str(layer.get("mediaType", "")), str(layer.get("digest", ""))
        annotations = self._object(layer, "annotations")
        if not _DIGEST.fullmatch(digest) or not isinstance(layer.get("size"), int):
            raise ModelFetchError(
                f"{self._model}: layer {number} of its manifest has the digest {digest!r} and the size "
                f"{layer.get('size')!r}; want sha256 and a number: push it again"
            )
        if _LEFT_OUT.search(media_type):
            return None, False
        path = next((str(annotations[name]) for name in PATH_ANNOTATIONS if annotations.get(name)), None)
        is_archive = _is_archive(media_type, annotations, has_path=path is not None)
        if path is None and not is_archive:
            return None, False  # a file without a name
        value = digest.removeprefix("sha256:")
        name = f"layer {number}" if is_archive or path is None else path.removeprefix("./")
        return RemoteFile(name, layer["size"], value, digest, Checksum("sha256", value)), is_archive

    def _choose(self, manifests: list[dict[str, Any]]) -> str:
        """Of an index: this machine's platform, else the first that is an image at all."""
        here = MACHINES.get(platform.machine(), platform.machine())
        machines = [self._object(one, "platform").get("architecture") for one in manifests]
        usable = [one for one, machine in zip(manifests, machines, strict=True) if machine != "unknown"]
        fitting = [one for one, machine in zip(manifests, machines, strict=True) if machine == here]
        for one in fitting or usable:
            if _DIGEST.fullmatch(str(one.get("digest"))):
                return str(one["digest"])
        raise ModelFetchError(f"{self._model}: its index lists no image; push the model again")

    def _object(self, of: dict[str, Any], field: str) -> dict[str, Any]:
        """One that may be left out, which a null says, too."""
        value = of.get(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._refuse_field(field, value, "an object")
        return value

    def _objects(self, of: dict[str, Any], field: str) -> list[dict[str, Any]]:
        """A list that has to be there."""
        value = of.get(field)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self._refuse_field(field, value, "a list of objects")
        return value

    def _refuse_field(self, field: str, value: object, want: str) -> NoReturn:
        raise ModelFetchError(
            f"{self._model}: {field}={reprlib.repr(value)} in its manifest: want {want}; push the model again"
        )

    def _manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        """The digest and content of a manifest."""
        accept = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))
        with self._asked(f"/manifests/{reference}", {"accept": accept}) as response:
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > LARGEST_MANIFEST_BYTES:
                    raise ModelFetchError(
                        f"{self._model}: its manifest is longer than {LARGEST_MANIFEST_BYTES} bytes"
                    )
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise TransientError(f"{self._host} gives a manifest whose digest is {digest}, not {reference}")
        try:
            manifest = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ModelFetchError(
                f"{self._model}: {self._host} gives a manifest that is no JSON; is it a registry?"
            ) from error
        if not isinstance(manifest, dict) or not ("layers" in manifest or "manifests" in manifest):
            raise ModelFetchError(
                f"{self._model}: its manifest names no layers; push an OCI image or artifact"
            )
        return digest, manifest

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The bytes of a blob, perhaps from a storage that the registry redirects to."""
        headers = {"accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        with self._asked(f"/blobs/{file.locator}", headers) as response:
            try:
                yield Stream(offset_of(response, offset), chunks_of(response))
            except httpx2.HTTPError as error:
                raise unreachable(error, self._host) from error

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    @contextmanager
    def _asked(self, path: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """A good answer; logs in where that is asked for, once."""
        for is_last in (False, True):
            try:
                # The client takes the login off where a redirect leaves the registry.
                request = self._client.build_request(
                    "GET", self._base + path, headers={**headers, **self._login.headers}
                )
                response = self._client.send(request, stream=True)
            except httpx2.HTTPError as error:
                raise unreachable(error, self._host) from error
            try:
                if response.status_code == 401 and not is_last:
                    self._login.answer(response.headers.get_list("www-authenticate"))
                    continue
                self._check(response, path)
                yield response
                return
            finally:
                response.close()

    def _check(self, response: httpx2.Response, path: str) -> None:
        status = response.status_code
        if status < 300:
            return
        if is_transient(status):
            raise TransientError(f"{self._host} answers {status}", retry_after(response.headers))
        self._refuse(status, path)

    def _refuse(self, status: int, path: str) -> NoReturn:
        model = self._model
        if status in (401, 403):
            message = (
                f"{self._host} answers {status}, with {self._login.description}; give a login that may pull "
                f"it: `docker login {model.host}` (or podman, oras), or DOCKER_CONFIG with a config.json"
            )
        elif status == 404 and path.startswith("/manifests/"):
            message = (
                f"there is no {self._repository!r} with {model.reference!r} at {self._host}; "
                "look at the name and the tag"
            )
        elif status == 404:
            message = f"a layer that its manifest names is not at {self._host}; push it again"
        else:
            message = f"{self._host} answers {status}"
        raise SourceRefusedError(f"{model}: {message}")


def _is_archive(media_type: str, annotations: dict[str, Any], *, has_path: bool) -> bool:
    if annotations.get(UNPACK_ANNOTATION) == "true":
        return True
    if media_type.startswith(IMAGE_LAYERS):
        return not has_path  # ORAS gives single files an image layer's type, too
    return bool(_TAR.search(media_type))


def is_plain(host: str, environment: dict[str, str]) -> bool:
    """Whether a registry is asked without TLS: those of this machine, and those that the user names."""
    named = {one.strip() for one in environment.get(PLAIN_HTTP_VARIABLE, "").split(",")}
    name = host.partition(":")[0]
    is_local = name == "localhost" or re.fullmatch(r"127(\.\d{1,3}){3}", name) is not None
    return host in named or (is_local and not host.endswith(":443"))
