"""What other tools have put into the Hub's cache: compared, used as it is, and completed."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session
from tests.sources.hub_model import MODEL, SHARD, Fetch, holds_of, storage_path

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources.adopt import offline
from headway_runtime.sources.store import Store


@pytest.fixture
def theirs(hub: Any, make_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The Hub's own library has fetched the repository into its cache."""
    import huggingface_hub
    from huggingface_hub import constants

    files: dict[str, bytes] = make_files()
    hub.add("org/name", files)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    for name in files:
        huggingface_hub.hf_hub_download("org/name", name, cache_dir=tmp_path / "hf" / "hub")
    hub.asked.clear()
    hub.storage.asked.clear()
    return files


def test_what_the_hubs_library_fetched_is_used(
    hub: Any, fetched: Fetch, theirs: dict[str, bytes], store: Store
) -> None:
    folder = fetched()
    assert folder == store.snapshot(hub.revisions["main"])
    assert [one.path for one in hub.asked] == ["/api/models/org/name/revision/main"]
    assert hub.storage.asked == []


@pytest.mark.usefixtures("theirs")
def test_what_the_hubs_library_fetched_is_used_offline(hub: Any, store: Store, watcher: Any) -> None:
    folder = offline(MODEL, store, watcher)
    commit = hub.revisions["main"]
    assert folder == store.snapshot(commit) == store.complete(commit, or_adopted=True)
    assert watcher.arrived_bytes == watcher.expected > 9_000_000
    assert hub.asked == []


@pytest.mark.usefixtures("theirs")
def test_a_damaged_or_missing_file_is_not_used_offline(hub: Any, store: Store, watcher: Any) -> None:
    shard = store.snapshot(hub.revisions["main"]) / SHARD
    content = shard.read_bytes()
    shard.resolve().write_bytes(content[:-1] + b"?")
    with pytest.raises(ModelFetchError, match="is not what its name says"):
        offline(MODEL, store, watcher)
    shard.unlink()
    with pytest.raises(ModelFetchError, match=f"names '{SHARD}', which is no"):
        offline(MODEL, store, watcher)


@pytest.mark.usefixtures("theirs")
def test_a_damaged_file_of_another_tool_is_fetched_anew(
    hub: Any, fetched: Fetch, store: Store, theirs: dict[str, bytes]
) -> None:
    blob = store.blob(storage_path(theirs))
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    assert (fetched() / SHARD).read_bytes() == theirs[SHARD]


@pytest.fixture
def real_files(theirs: dict[str, bytes], hub: Any, store: Store) -> dict[str, bytes]:
    """The same, where the snapshot holds the files themselves, as `cp -rL` or an image's COPY leaves it."""
    snapshot = store.snapshot(hub.revisions["main"])
    for path in snapshot.iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    shutil.rmtree(store.path / "blobs")
    return theirs


def test_a_snapshot_of_real_files_stays_as_it_is(
    hub: Any, fetched: Fetch, store: Store, watcher: Any, real_files: dict[str, bytes]
) -> None:
    folder = store.snapshot(hub.revisions["main"])
    for _ in range(2):
        assert offline(MODEL, store, watcher) == folder
        assert holds_of(folder) == real_files
        assert not any(path.is_symlink() for path in folder.iterdir())
    # With a network they are compared with what the Hub says, and not fetched again.
    for _ in range(2):
        assert fetched() == folder
        assert holds_of(folder) == real_files
    assert store.complete(hub.revisions["main"]) == folder
    assert {one.path for one in hub.asked} == {"/api/models/org/name/revision/main"}
    assert hub.storage.asked == []


def test_a_real_file_that_is_not_right_is_fetched_anew(
    hub: Any, fetched: Fetch, store: Store, real_files: dict[str, bytes]
) -> None:
    folder = store.snapshot(hub.revisions["main"])
    (folder / SHARD).write_bytes(real_files[SHARD][:-1] + b"?")
    (folder / "config.json").write_bytes(b"{}")
    assert holds_of(fetched()) == real_files
    assert [one.path for one in hub.storage.asked] == [f"/{storage_path(real_files)}"]


@pytest.mark.parametrize("lost", ["tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["theirs", "real_files"])
def test_what_a_snapshot_lacks_is_fetched_when_there_is_a_network_again(
    request: pytest.FixtureRequest,
    hub: Any,
    fetched: Fetch,
    store: Store,
    watcher: Any,
    kind: str,
    lost: str,
) -> None:
    files = request.getfixturevalue(kind)
    folder = store.snapshot(hub.revisions["main"])
    (folder / lost).resolve().unlink()
    (folder / lost).unlink(missing_ok=True)
    for _ in range(2):
        assert offline(MODEL, store, watcher) == folder
    assert fetched() == folder
    assert holds_of(folder) == files
    asked = [one.path for one in (*hub.asked, *hub.storage.asked)]
    assert asked == [
        "/api/models/org/name/revision/main",
        f"/org/name/resolve/{hub.revisions['main']}/{lost}",
    ]
    # Now it is known to be all there: offline it is not compared again.
    arrived = watcher.arrived_bytes
    assert offline(MODEL, store, watcher) == folder
    assert watcher.arrived_bytes == arrived


def test_a_hub_that_is_gone_leaves_what_was_adopted(
    hub: Any,
    fetched: Fetch,
    store: Store,
    watcher: Any,
    theirs: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = offline(MODEL, store, watcher)
    hub.close()
    close_session()
    caplog.set_level(logging.WARNING)
    assert fetched() == folder
    assert holds_of(folder) == theirs
    assert "using what was fetched of it before" in caplog.text


def test_an_adopted_model_is_asked_for_even_by_its_commit(
    headway: Any, hub: Any, store: Store, theirs: dict[str, bytes], tmp_path: Path
) -> None:
    pinned = f"hf://org/name@{hub.revisions['main']}"
    folder = store.snapshot(hub.revisions["main"])
    (folder / "tokenizer.json").unlink()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        done = headway("fetch", pinned, HF_HOME=str(tmp_path / "hf"), **environment)
        assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert holds_of(folder) == theirs
