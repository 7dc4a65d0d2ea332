"""OCI registries: images and artifacts pushed to a real one, logins, and what faults on the way do."""

import base64
import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import zstandard

from headway_runtime.errors import ModelFetchError
from headway_runtime.fit.headers import read_headers
from headway_runtime.sources import resolve_adapter
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import RegistryModel, parse
from headway_runtime.sources.registry import Registry, is_plain
from headway_runtime.sources.registry_login import Credentials, find_credentials
from headway_runtime.sources.remote import Listing

IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
RAW_WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Layer:
    content: bytes
    media_type: str = TAR
    annotations: dict[str, str] = field(default_factory=dict)


def tar_of(files: dict[str, bytes], **links: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o4777
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_json", ".json"))
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()


def zstd_of(content: bytes, window_log: int) -> bytes:
    """As `zstd --long=WINDOW_LOG` frames it: a header with the window's size, and one block, not packed."""
    header = bytes([0, (window_log - 10) << 3])
    return b"\x28\xb5\x2f\xfd" + header + (1 | len(content) << 3).to_bytes(3, "little") + content


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


@pytest.fixture
def pusher(registry_server: str, request: pytest.FixtureRequest) -> Iterator[Pusher]:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    with closing(Pusher(registry_server, f"team/{name}")) as pusher:
        yield pusher


Fetch = Callable[..., Path]


@pytest.fixture
def fetched(tmp_path: Path, impatient: Patience, watcher: Any) -> Fetch:
    def run(model: RegistryModel, patience: Patience = impatient) -> Path:
        store = store_of(model, str(tmp_path / "cache"), os.environ)
        with closing(Registry(model)) as registry:
            return fetch(model, registry, store, patience, watcher, check_config)

    return run


def in_models(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"models/{name}": content for name, content in files.items()}


def artifact(files: dict[str, bytes], annotation: str = "org.opencontainers.image.title") -> list[Layer]:
    return [Layer(content, TAR, {annotation: name}) for name, content in files.items()]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["tar", "gzip", "zstd"])
def test_an_image_gives_the_model_in_its_models_folder(
    pusher: Pusher,
    fetched: Fetch,
    make_files: Any,
    holds: Any,
    tmp_path: Path,
    pack: Callable[[bytes], bytes],
) -> None:
    files = make_files(shard_bytes=300_000)
    base = {"etc/config.json": b"{}", "bin/sh": b"x", "usr/lib/model.safetensors": b"x"}
    folder = fetched(pusher.push([Layer(pack(tar_of(base))), Layer(pack(tar_of(in_models(files))))]))
    holds(folder, files)
    # Modes and owners of an archive are its own business, and archives go when their files are out.
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o7111 for path in folder.iterdir())
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("blobs/*")) == sum(
        path.stat().st_size for path in folder.iterdir()
    )


@pytest.mark.parametrize("is_image", [False, True], ids=["artifact", "image"])
def test_a_plan_needs_no_more_than_headers_of_files_and_all_of_an_archive(
    pusher: Pusher,
    make_safetensors: Any,
    impatient: Patience,
    watcher: Any,
    tmp_path: Path,
    is_image: bool,  # noqa: FBT001 - a row of a table
) -> None:
    files = make_safetensors()
    layers = [Layer(tar_of(in_models(files)))] if is_image else artifact(files)
    model = pusher.push(layers, config=IMAGE_CONFIG if is_image else "application/vnd.x+json")
    store = store_of(model, str(tmp_path / "cache"), os.environ)
    with closing(Registry(model)) as registry:
        identity = registry.listing().identity
        folder = fetch(model, registry, store, impatient, watcher, check_config, headers_only=True)
    found = read_headers(folder)
    assert found is not None
    assert (found.num_files, found.num_bytes) == (2, 6_000_000)
    assert (store.complete(identity) == folder) == is_image
    assert (watcher.arrived_bytes > 6_000_000) == is_image


@pytest.mark.parametrize("is_image", [True, False])
def test_an_adapter_lies_in_a_registry_as_models_do(
    pusher: Pusher,
    adapter_files: dict[str, bytes],
    tmp_path: Path,
    is_image: bool,  # noqa: FBT001 - a row of a table
) -> None:
    layers = [Layer(tar_of(in_models(adapter_files)))] if is_image else artifact(adapter_files)
    model = pusher.push([*layers, *artifact({"README.md": b"x"})] if not is_image else layers)
    folder = resolve_adapter(str(model), download_dir=str(tmp_path / "cache"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == adapter_files


def test_upper_layers_win_and_what_they_remove_is_gone(
    pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes]
) -> None:
    lower = in_models(
        {**tiny, "chat_template.jinja": b"old", "added_tokens.json": b"old", "vocab.json": b"x"}
    )
    upper = in_models({"chat_template.jinja": b"new", ".wh.added_tokens.json": b""})
    folder = fetched(pusher.push([Layer(tar_of(lower)), Layer(tar_of(upper))]))
    assert (folder / "chat_template.jinja").read_bytes() == b"new"
    assert (folder / "vocab.json").exists()
    assert not (folder / "added_tokens.json").exists()
    opaque = in_models({".wh..wh..opq": b"", **tiny})
    folder = fetched(pusher.push([Layer(tar_of(lower)), Layer(tar_of(opaque))], "v2"))
    assert {path.name for path in folder.iterdir()} == tiny.keys() - {"README.md"}


@pytest.mark.parametrize(
    "annotation",
    ["org.opencontainers.image.title", "org.cncf.model.filepath", "org.cnai.model.filepath"],
)
def test_an_artifact_gives_its_files(
    pusher: Pusher, fetched: Fetch, make_files: Any, holds: Any, watcher: Any, annotation: str
) -> None:
    files = make_files(shard_bytes=300_000)
    folder = fetched(pusher.push(artifact(files, annotation), config="application/vnd.test.config.v1+json"))
    holds(folder, files)
    # Of a file that is not wanted, not a byte comes.
    assert watcher.arrived_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_a_modelpack_gives_its_files_and_no_code(
    pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes], watcher: Any
) -> None:
    small = {name: content for name, content in tiny.items() if name != "model.safetensors"}
    where = {"org.cncf.model.filepath": "model.safetensors"}
    layers = [
        Layer(tiny["model.safetensors"], RAW_WEIGHT, where),
        Layer(gzip.compress(tar_of(small)), "application/vnd.cncf.model.weight.config.v1.tar+gzip"),
        Layer(tar_of({"config.json": b"evil"}), "application/vnd.cncf.model.code.v1.tar"),
        Layer(b"evil", "application/vnd.cncf.model.code.v1.raw", {"org.cncf.model.filepath": "config.json"}),
    ]
    folder = fetched(pusher.push(layers, config="application/vnd.cncf.model.config.v1+json"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: content for name, content in tiny.items() if name != "README.md"
    }


def test_a_folder_that_oras_has_packed_is_unpacked(
    pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes]
) -> None:
    packed = gzip.compress(tar_of({f"llama/{name}": content for name, content in tiny.items()}))
    notes = {"org.opencontainers.image.title": "llama", "io.deis.oras.content.unpack": "true"}
    folder = fetched(pusher.push([Layer(packed, f"{TAR}+gzip", notes)], config="application/vnd.x+json"))
    assert {path.name for path in folder.iterdir()} == tiny.keys() - {"README.md"}


def test_an_index_gives_this_machines_image(pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes]) -> None:
    pusher.push([Layer(tar_of(in_models(tiny)))], "ours")
    pusher.push([Layer(tar_of(in_models({"config.json": b"{}"})))], "theirs")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    rows = []
    for tag, architecture in (("theirs", "s390x"), ("ours", machine)):
        with httpx2.Client() as client:
            url = f"http://{pusher.address}/v2/{pusher.repository}/manifests/{tag}"
            content = client.get(url, headers={"accept": MANIFEST}).content
        platform = {"architecture": architecture, "os": "linux"}
        rows.append(
            {"mediaType": MANIFEST, "digest": digest_of(content), "size": len(content), "platform": platform}
        )
    pusher.manifest({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}, "all")
    folder = fetched(RegistryModel(pusher.address, pusher.repository, "all"))
    assert (folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]


def test_a_digest_needs_no_network_once_it_is_there(
    pusher: Pusher, tiny: dict[str, bytes], headway: Any
) -> None:
    model = pusher.push(artifact(tiny), config="application/vnd.x+json")
    with closing(Registry(model)) as registry:
        listing = registry.listing()
    pinned = f"oci://{pusher.address}/{pusher.repository}@sha256:{listing.identity}"
    assert parse(pinned) == replace(model, reference=f"sha256:{listing.identity}")
    done = headway("fetch", pinned)
    assert done.returncode == 0, done.stderr
    again = headway("fetch", pinned)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ([Layer(tar_of({"etc/config.json": b"{}"}))], "none of its layers holds a config.json"),
        ([Layer(b"no archive at all" * 100)], "is no tar archive that can be read"),
        ([Layer(gzip.compress(tar_of({"models/config.json": b"{}" * 9999}))[:-100])], "is no tar archive"),
        (
            [Layer(zstd_of(tar_of({"models/config.json": b"{}"}), 31))],
            r"layer 0: zstd cannot unpack the layer \(.*too much memory.*; pack it .*--long=27",
        ),
        ([Layer(zstandard.compress(tar_of({}))[:9] + bytes(99))], "layer 0: zstd cannot unpack the layer"),
        (
            [Layer(tar_of({}, models__config_json="../etc/passwd"))],
            r"models/config.json -> ../etc/passwd is a link; build the image with the files themselves",
        ),
        (
            [Layer(tar_of({"models/a/config.json": b"{}", "models/b/config.json": b"{}"}))],
            "holds several models, in models/a, models/b",
        ),
    ],
    ids=["no model", "no archive", "cut archive", "zstd --long=31", "damaged zstd", "link", "two models"],
)
def test_what_holds_no_model_is_told(pusher: Pusher, fetched: Fetch, layers: list[Layer], want: str) -> None:
    with pytest.raises(ModelFetchError, match=want):
        fetched(pusher.push(layers))


def test_paths_that_leave_the_archive_are_passed_over(
    pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    evil = {"../../config.json": b"evil", "models/../../tokenizer.json": b"evil"}
    fetched(pusher.push([Layer(tar_of({**in_models(tiny), **evil}))]))
    assert not any(path.read_bytes() == b"evil" for path in tmp_path.rglob("*") if path.is_file())


def test_what_is_not_there_is_named(pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes]) -> None:
    model = pusher.push(artifact(tiny), config="application/vnd.x+json")
    with pytest.raises(ModelFetchError, match=r"there is no 'team/\w+' with 'v9' at 127"):
        fetched(replace(model, reference="v9"))
    with pytest.raises(ModelFetchError, match=r"there is no 'team/none' with 'v1'"):
        fetched(replace(model, repository="team/none"))


def test_broken_connections_are_gone_on_from_where_they_broke(
    pusher: Pusher, fetched: Fetch, make_files: Any, holds: Any, proxy: Any, cut: Any, watcher: Any
) -> None:
    files = make_files(num_shards=1, shard_bytes=4_000_000)
    model = pusher.push(artifact(files), config="application/vnd.x+json")
    between = proxy(pusher.address)
    between.cuts = [cut(after=1_500_000), cut(after=1_200_000)]
    holds(fetched(replace(model, host=between.address)), files)
    assert between.cuts == []
    assert watcher.arrived_bytes == watcher.expected


def test_a_registry_that_is_gone_leaves_what_is_cached(
    pusher: Pusher, fetched: Fetch, tiny: dict[str, bytes], proxy: Any
) -> None:
    between = proxy(pusher.address)
    model = replace(pusher.push(artifact(tiny), config="application/vnd.x+json"), host=between.address)
    folder = fetched(model)
    between.close()
    assert fetched(model) == folder


# Logins


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
