"""OCI registries: images and artifacts pushed to a real one, and what faults on the way do."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import zstandard
from tests.sources.registry_pushes import (
    IMAGE_CONFIG,
    MANIFEST,
    TAR,
    Fetch,
    Layer,
    Pusher,
    artifact,
    digest_of,
    fetch_image,
)

from headway_runtime.errors import ModelFetchError
from headway_runtime.fit.headers import read_headers
from headway_runtime.sources import resolve_adapter
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import RegistryModel, parse
from headway_runtime.sources.registry import Registry

RAW_WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
INDEX = "application/vnd.oci.image.index.v1+json"


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


@pytest.fixture
def pusher(registry_server: str, request: pytest.FixtureRequest) -> Iterator[Pusher]:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    with closing(Pusher(registry_server, f"team/{name}")) as pusher:
        yield pusher


@pytest.fixture
def fetched(tmp_path: Path, impatient: Patience, watcher: Any) -> Fetch:
    return lambda model: fetch_image(model, tmp_path / "cache", impatient, watcher)


def in_models(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"models/{name}": content for name, content in files.items()}


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
