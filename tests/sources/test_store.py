"""The cache: what counts as there, what does not, and what several processes do to each other in it."""

import json
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources.cache_folders import hub_cache, store_of
from headway_runtime.sources.checksums import Checksum
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import BucketModel, HubModel, RegistryModel, RemoteModel
from headway_runtime.sources.remote import Listing, RemoteFile, Stream
from headway_runtime.sources.store import Store
from headway_runtime.sources.transfer import Transfer

FILE = RemoteFile("config.json", 5, "key-1", "config.json", None)
WEIGHTS = RemoteFile("model.safetensors", 3, "key-2", "model.safetensors", None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "model", "choose another")
    made.prepare()
    return made


def published(store: Store) -> Path:
    for file, content in ((FILE, b"hello"), (WEIGHTS, b"abc")):
        store.partial(file.key).write_bytes(content)
        store.place(file)
    return store.publish("one", "hf://a/b", {file.path: file for file in (FILE, WEIGHTS)})


def test_what_is_published_is_complete(store: Store) -> None:
    folder = published(store)
    assert store.complete("one") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"hello",
        "model.safetensors": b"abc",
    }
    assert store.complete("two") is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda store: (store.path / ".headway" / "one.json").unlink(),
        lambda store: (store.path / ".headway" / "one.json").write_text("{"),
        lambda store: (store.path / ".headway" / "one.json").write_text("[]"),
        lambda store: (store.path / ".headway" / "one.json").write_text('{"version": 2, "files": []}'),
        lambda store: (store.path / ".headway" / "one.json").write_text('{"version": 1, "files": []}'),
        lambda store: (store.snapshot("one") / "model.safetensors").unlink(),
        lambda store: store.blob("key-2").unlink(),
        lambda store: store.blob("key-2").write_bytes(b"ab"),
    ],
    ids=["no manifest", "cut manifest", "list", "newer", "empty", "no link", "no blob", "short blob"],
)
def test_what_is_not_all_there_is_not_complete(store: Store, harm: Callable[[Store], object]) -> None:
    published(store)
    harm(store)
    assert store.complete("one") is None


def test_publishing_again_repairs(store: Store) -> None:
    folder = published(store)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("another")
    assert published(store) == folder
    assert (folder / "config.json").read_bytes() == b"hello"
    assert not [path for path in store.path.rglob(".*") if path.is_file() or path.is_symlink()]


def test_a_file_gives_way_to_a_link_only_where_the_blob_is_there(store: Store) -> None:
    folder = published(store)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("the only copy")
    store.blob("key-1").unlink()
    with pytest.raises(ModelFetchError, match=r"key-1: was removed while the model was fetched; fetch it"):
        store.publish("one", "hf://a/b", {"config.json": FILE, "model.safetensors": WEIGHTS})
    assert (folder / "config.json").read_text() == "the only copy"


def test_what_was_adopted_is_complete_only_for_who_takes_that(store: Store) -> None:
    folder = published(store)
    store.note("one", "hf://a/b", {"config.json": FILE}, is_adopted=True)
    assert store.complete("one") is None
    assert store.complete("one", or_adopted=True) == folder
    published(store)
    assert store.complete("one") == folder


def test_file_systems_without_links_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    folder = published(store)
    assert not (folder / "config.json").is_symlink()
    assert store.complete("one") == folder
    monkeypatch.setattr(os, "link", refuse)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    assert published(store) == folder == store.complete("one")
    assert not store.blob("key-1").exists()


def test_a_blob_that_changed_since_it_was_checked_is_not(store: Store) -> None:
    published(store)
    assert store.is_checked(FILE)
    store.blob("key-1").write_bytes(b"HELLO")
    os.utime(store.blob("key-1"), ns=(0, 0))
    assert not store.is_checked(FILE)


def test_refs_are_remembered_where_that_is_possible(store: Store, tmp_path: Path) -> None:
    store.remember("refs/pr/1", "one")
    assert store.known("refs/pr/1") == "one"
    store.remember("refs/pr/1", "two")
    assert store.known("refs/pr/1") == "two"
    assert store.known("main") is None
    (tmp_path / "file").write_text("")
    unwritable = Store(tmp_path / "file" / "below", "")
    unwritable.remember("main", "one")
    assert unwritable.known("main") is None


def hold(path: str, seconds: float, said: Any) -> None:
    with Store(Path(path), "").lock("a model"):
        said.set()
        time.sleep(seconds)


def test_one_process_at_a_time_fetches(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    context = multiprocessing.get_context("spawn")
    said = context.Event()
    process = context.Process(target=hold, args=(str(store.path), 1.0, said))
    process.start()
    assert said.wait(60)
    with store.lock("a model"):
        process.join(60)
        assert process.exitcode == 0
    assert f"a model: waiting for process {process.pid}, which fetches it" in caplog.text
    # Who is killed holds nothing any more.
    again = context.Event()
    killed = context.Process(target=hold, args=(str(store.path), 600.0, again))
    killed.start()
    assert again.wait(60)
    killed.kill()
    with store.lock("a model"):
        pass
    killed.join(60)


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hubs_cache_is_where_the_hubs_library_has_it(environment: dict[str, str], want: str) -> None:
    assert str(hub_cache(environment)) == want


def test_folders_are_readable_and_apart() -> None:
    models: list[RemoteModel] = [
        HubModel("org/name", "main"),
        BucketModel("bucket", "a/b"),
        BucketModel("bucket", "a--b"),
        RegistryModel("r.example:5000", "a/b", "v1"),
    ]
    names = [store_of(one, "/cache", {}).path.name for one in models]
    assert names[0] == "models--org--name"
    assert names[1].startswith("s3--bucket--a--b--")
    assert names[3].startswith("oci--r.example--5000--a--b--")
    assert len(set(names)) == 4


# Transfers, of a source that is a dictionary


class Shelf:
    """A source without a network."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.offsets: list[int] = []

    def listing(self) -> Listing:
        raise NotImplementedError

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        self.offsets.append(offset)
        yield Stream(offset, iter([self.contents[file.key][offset:]]))

    def close(self) -> None:
        """Nothing."""


def test_a_disk_without_room_is_told_before_anything_comes(
    store: Store, impatient: Patience, watcher: Any
) -> None:
    shelf = Shelf({})
    huge = RemoteFile("model.safetensors", 10**18, "key", "x", Checksum("sha256", "0" * 64))
    with pytest.raises(
        ModelFetchError, match=r"a: 1000000000.00 GB are still to come, but .* choose another"
    ):
        Transfer(shelf, store, impatient, watcher).bring([huge], "a")
    assert shelf.offsets == []


def test_a_file_without_a_checksum_is_begun_anew(store: Store, impatient: Patience, watcher: Any) -> None:
    shelf = Shelf({"key-1": b"hello"})
    store.partial("key-1").write_bytes(b"HEL")
    Transfer(shelf, store, impatient, watcher).bring([FILE], "a")
    assert shelf.offsets == [0]
    assert store.blob("key-1").read_bytes() == b"hello"


def test_a_beginning_that_is_too_long_is_thrown_away(store: Store, impatient: Patience, watcher: Any) -> None:
    shelf = Shelf({"key-1": b"hello"})
    checksum = Checksum("md5", "5d41402abc4b2a76b9719d911017c592")
    store.partial("key-1").write_bytes(b"hello and more")
    file = RemoteFile("config.json", 5, "key-1", "config.json", checksum)
    Transfer(shelf, store, impatient, watcher).bring([file], "a")
    assert shelf.offsets == [0]
    # One that is complete needs no question.
    store.blob("key-1").rename(store.partial("key-1"))
    Transfer(shelf, store, impatient, watcher).bring([file], "a")
    assert shelf.offsets == [0]
    assert store.blob("key-1").read_bytes() == b"hello"


def test_more_bytes_than_there_should_be_are_no_file(store: Store, impatient: Patience, watcher: Any) -> None:
    shelf = Shelf({"key-1": b"hello world"})
    with pytest.raises(ModelFetchError, match="more bytes come than its size, 5; given up"):
        Transfer(shelf, store, impatient, watcher).bring([FILE], "a")
    assert not store.blob("key-1").exists()


def test_files_are_readable_as_the_umask_says(store: Store) -> None:
    before = os.umask(0o027)
    try:
        folder = published(store)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o640
    assert json.loads((store.path / ".headway" / "one.json").read_text())["source"] == "hf://a/b"
