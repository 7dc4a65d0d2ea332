"""Logins to OCI registries: where they are found, who gets them, and what a registry may say in return."""

import base64
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.sources.registry_pushes import Fetch, Pusher, artifact, digest_of, fetch_image

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import RegistryModel
from headway_runtime.sources.registry import Registry, is_plain
from headway_runtime.sources.registry_login import Credentials, find_credentials
from headway_runtime.sources.remote import Listing


@pytest.fixture
def fetched(tmp_path: Path, impatient: Patience, watcher: Any) -> Fetch:
    return lambda model: fetch_image(model, tmp_path / "cache", impatient, watcher)


def write_login(folder: Path, host: str, entry: dict[str, str], **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}, **more}))


def auth_of(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def docker_folder() -> Path:
    return Path(os.environ["HOME"]) / ".docker"


def test_a_login_opens_a_registry(
    closed_registry: str, fetched: Fetch, tiny: dict[str, bytes], docker_folder: Path
) -> None:
    with closing(Pusher(closed_registry, "team/a", ("reader", "secret"))) as pusher:
        model = pusher.push(artifact(tiny), config="application/vnd.x+json")
    with pytest.raises(ModelFetchError, match=r"answers 401, with no login; give a login .*docker login 127"):
        fetched(model)
    write_login(docker_folder, closed_registry, auth_of("reader", "wrong"))
    with pytest.raises(ModelFetchError, match="answers 401, with the login of 'reader'"):
        fetched(model)
    write_login(docker_folder, closed_registry, auth_of("reader", "secret"))
    assert (fetched(model) / "model.safetensors").read_bytes() == tiny["model.safetensors"]


def test_tokens_are_fetched_with_the_login_and_again_when_they_end(
    token_registry: Any, fetched: Fetch, make_files: Any, holds: Any, docker_folder: Path
) -> None:
    files = make_files()
    token_registry.add(files, "v1")
    host = token_registry.url.removeprefix("http://")
    model = RegistryModel(host, "team/a", "v1")
    with pytest.raises(ModelFetchError, match="its token service answers 401 to no login"):
        fetched(model)
    write_login(docker_folder, host, auth_of("reader", "secret"))
    with closing(Registry(model)) as registry:
        listing = registry.listing()
        token_registry.num_tokens = 7  # the one that was given no longer holds
        with registry.open(listing.files[0], 0) as stream:
            assert b"".join(stream.chunks) == files[listing.files[0].path]
    holds(fetched(model), files)
    assert token_registry.storage.asked
    assert not any("authorization" in one.headers for one in token_registry.storage.asked)


def described(registry: Any, docker_folder: Path, **manifests: dict[str, Any]) -> Listing:
    """What is listed of `v1`, where the registry has these manifests."""
    host = registry.url.removeprefix("http://")
    registry.manifests |= {name: json.dumps(one).encode() for name, one in manifests.items()}
    write_login(docker_folder, host, auth_of("reader", "secret"))
    with closing(Registry(RegistryModel(host, "team/a", "v1"))) as opened:
        return opened.listing()


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        ({"layers": None}, "layers=None in its manifest: want a list of objects; push the model again"),
        ({"layers": ["sha256:0"]}, r"layers=\['sha256:0'\] in its manifest: want a list of objects"),
        ({"layers": [], "config": "none"}, "config='none' in its manifest: want an object"),
        (
            {"layers": [{"annotations": ["title"]}]},
            r"annotations=\['title'\] in its manifest: want an object",
        ),
        ({"manifests": None}, "manifests=None in its manifest: want a list of objects"),
        ({"manifests": [{"platform": "amd64"}]}, "platform='amd64' in its manifest: want an object"),
    ],
)
def test_a_field_of_a_manifest_that_is_none_of_its_kind_is_named(
    token_registry: Any, docker_folder: Path, manifest: dict[str, Any], want: str
) -> None:
    with pytest.raises(ModelFetchError, match=want):
        described(token_registry, docker_folder, v1=manifest)


def test_what_a_manifest_may_leave_out_may_be_null(
    token_registry: Any, tiny: dict[str, bytes], docker_folder: Path
) -> None:
    token_registry.add(tiny, "v1")
    plain = json.loads(token_registry.manifests["v1"])
    digest = digest_of(json.dumps({**plain, "config": None}).encode())
    index = {"manifests": [{"digest": digest, "platform": None}]}
    listing = described(token_registry, docker_folder, v1=index, **{digest: {**plain, "config": None}})
    assert {file.path for file in listing.files} == tiny.keys()
    nameless = {"layers": [{**one, "annotations": None} for one in plain["layers"]]}
    assert described(token_registry, docker_folder, v1=nameless).files == ()


def test_a_login_is_sent_to_no_strange_token_service(
    token_registry: Any, fetched: Fetch, tiny: dict[str, bytes], docker_folder: Path
) -> None:
    token_registry.add(tiny, "v1")
    token_registry.realm = "ftp://elsewhere.example/token"
    host = token_registry.url.removeprefix("http://")
    write_login(docker_folder, host, auth_of("reader", "secret"))
    with pytest.raises(
        ModelFetchError, match=r"'ftp://elsewhere\.example/token' as its token service, where"
    ):
        fetched(RegistryModel(host, "team/a", "v1"))


def test_a_registry_that_gives_other_bytes_is_not_believed(
    token_registry: Any, fetched: Fetch, tiny: dict[str, bytes], docker_folder: Path, fault: Any
) -> None:
    token_registry.add(tiny, "v1")
    host = token_registry.url.removeprefix("http://")
    write_login(docker_folder, host, auth_of("reader", "secret"))
    token_registry.manifests["sha256:" + "0" * 64] = token_registry.manifests["v1"]
    with pytest.raises(
        ModelFetchError, match=r"gives a manifest whose digest is sha256:\w+, not sha256:0000"
    ):
        fetched(RegistryModel(host, "team/a", "sha256:" + "0" * 64))
    digest = digest_of(tiny["model.safetensors"])
    token_registry.storage.faults[digest] = [fault(damage=True)] * 2
    with pytest.raises(ModelFetchError, match=r"model.safetensors: its checksum is .* where the source says"):
        fetched(RegistryModel(host, "team/a", "v1"))
    token_registry.manifests["v1"] = b"<html>"
    with pytest.raises(ModelFetchError, match="gives a manifest that is no JSON; is it a registry"):
        fetched(RegistryModel(host, "team/a", "v1"))


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ({".docker/config.json": {"auths": {"r.example": auth_of("a", "b:c")}}}, Credentials("a", "b:c")),
        ({".docker/config.json": {"auths": {"https://r.example": auth_of("a", "b")}}}, Credentials("a", "b")),
        ({".docker/config.json": {"auths": {"r.example": {"identitytoken": "t"}}}}, Credentials("", "", "t")),
        ({".docker/config.json": {"auths": {"other.example": auth_of("a", "b")}}}, None),
        (
            {".config/containers/auth.json": {"auths": {"r.example": auth_of("p", "q")}}},
            Credentials("p", "q"),
        ),
        (
            {".docker/config.json": {"credHelpers": {"r.example": "test"}}},
            Credentials("helped", "r.example!"),
        ),
        ({".docker/config.json": {"credsStore": "test"}}, Credentials("helped", "r.example!")),
        ({}, None),
    ],
)
def test_logins_are_found_where_tools_keep_them(
    places: dict[str, Any], want: Credentials | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(
        '#!/bin/sh\nread server\necho "{\\"Username\\": \\"helped\\", \\"Secret\\": \\"$server!\\"}"\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    for path, content in places.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    assert find_credentials("r.example", {"HOME": str(tmp_path)}) == want


def test_a_login_file_that_is_broken_or_a_helper_that_is_missing_is_named(tmp_path: Path) -> None:
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFetchError, match=r"config.json: cannot be read .*log in again"):
        find_credentials("r.example", environment)
    (tmp_path / "config.json").write_text('{"credHelpers": {"r.example": "nowhere"}}')
    with pytest.raises(ModelFetchError, match="docker-credential-nowhere, which keeps the login"):
        find_credentials("r.example", environment)


def test_tls_is_left_out_where_it_cannot_be_or_is_said_so() -> None:
    assert is_plain("localhost:5000", {})
    assert is_plain("127.0.0.1:5000", {})
    assert not is_plain("r.example:5000", {})
    assert not is_plain("127.evil.example", {})
    assert is_plain("r.example:5000", {"HEADWAY_PLAIN_HTTP_REGISTRIES": "a:1, r.example:5000"})
