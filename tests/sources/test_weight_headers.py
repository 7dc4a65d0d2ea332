"""A plan of a remote model fetches small files and the weights' headers, whatever kind of source it is."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.errors import ModelFetchError
from headway_runtime.fit.headers import read_headers
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.reference import parse

SHARD_BYTES = 3_000_000


def shards_of(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.startswith("model-0"))


def test_a_plan_needs_no_more_of_a_repository_than_headers(
    hub: Any, headway: Any, make_safetensors: Any, fault: Any, holds: Any, tmp_path: Path
) -> None:
    files = make_safetensors()
    hub.add("org/name", files)
    # After a little more than the headers nothing comes any more: who waits for the rest waits in vain.
    for path, content in hub.storage.blobs.items():
        if len(content) > SHARD_BYTES:
            hub.storage.faults[path] = [fault(after=500, stall=True)]
    cache = ("--download-dir", str(tmp_path / "cache"))
    done = headway("plan", "hf://org/name", *cache, "--gpu", "l4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file_bytes"] == 2 * SHARD_BYTES
    held = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert max(held) < SHARD_BYTES
    # Again without another look at the weights; and what is served later is the whole model.
    num_asked = len(hub.storage.asked)
    again = headway("plan", "hf://org/name", *cache, "--gpu", "l4", "--json")
    assert (again.stdout, len(hub.storage.asked)) == (done.stdout, num_asked)
    fetched = headway("fetch", "hf://org/name", *cache)
    assert fetched.returncode == 0, fetched.stderr
    holds(Path(fetched.stdout.strip()), files)


def test_a_draft_is_planned_by_its_headers_too(
    hub: Any, headway: Any, make_safetensors: Any, fault: Any
) -> None:
    hub.add("org/draft", make_safetensors())
    for path, content in hub.storage.blobs.items():
        if len(content) > SHARD_BYTES:
            hub.storage.faults[path] = [fault(after=500, stall=True)]
    draft = json.dumps({"model": "hf://org/draft"})
    done = headway("plan", "bundled://headway-tiny", "--gpu", "l4", "--speculative-config", draft, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["draft_weights"]


def test_a_plan_does_not_forget_the_model_that_is_there_in_full(
    hub: Any, headway: Any, make_safetensors: Any
) -> None:
    hub.add("org/name", make_safetensors())
    first = headway("fetch", "hf://org/name")
    assert first.returncode == 0, first.stderr
    hub.revisions["main"] = hub.revisions["f" * 40] = "f" * 40
    assert headway("plan", "hf://org/name", "--gpu", "l4").returncode == 0
    offline = headway("fetch", "hf://org/name", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, first.stdout)


def test_weights_that_are_no_safetensors_are_named(hub: Any, headway: Any, make_safetensors: Any) -> None:
    files = make_safetensors()
    (first, second) = shards_of(files)
    for name, content, want in (
        (first, b"\xff" * 100, "no safetensors file, by its first bytes"),
        (second, b"1234567", "its 7 bytes hold no header"),
    ):
        hub.add("org/name", files | {name: content})
        commit = name[:20].encode().hex()
        hub.revisions |= {"main": commit, commit: commit}
        done = headway("plan", "hf://org/name", "--gpu", "l4")
        assert done.returncode == 2
        assert f"hf://org/name@main: {name}: " in done.stderr
        assert want in done.stderr


@pytest.fixture
def looked_at(tmp_path: Path, impatient: Any, watcher: Any) -> Any:
    """The folder with the headers of a source, asked for as its own process does."""

    def run(source: str, remote: Any) -> Path:
        model = parse(source)
        store = store_of(model, str(tmp_path / "cache"), os.environ)  # type: ignore[arg-type]
        with closing(remote):
            return fetch(model, remote, store, impatient, watcher, check_config, headers_only=True)  # type: ignore[arg-type]

    return run


def holds_headers(folder: Path, files: dict[str, bytes]) -> None:
    found = read_headers(folder)
    assert found is not None
    assert (found.num_files, found.num_bytes) == (2, 2 * SHARD_BYTES)
    assert (folder / "config.json").read_bytes() == files["config.json"]
    assert all((folder / name).stat().st_size < 1000 for name in shards_of(files))


def test_a_connection_that_breaks_within_a_header_is_made_again(
    hub: Any, headway: Any, make_safetensors: Any, fault: Any
) -> None:
    files = make_safetensors()
    hub.add("org/name", files)
    (path, *_) = [path for path, content in hub.storage.blobs.items() if len(content) > SHARD_BYTES]
    hub.storage.faults[path] = [fault(after=20)]
    done = headway("plan", "hf://org/name", "--gpu", "l4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file_bytes"] == 2 * SHARD_BYTES


def test_too_many_failures_are_an_error(hub: Any, make_safetensors: Any, fault: Any, looked_at: Any) -> None:
    from headway_runtime.sources.hub import Hub

    hub.add("org/name", make_safetensors())
    for path in hub.storage.blobs:
        hub.storage.faults[path] = [fault(after=20)] * 50
    model = parse("hf://org/name")
    with pytest.raises(ModelFetchError, match=r"it ended after|the connection to"):
        looked_at("hf://org/name", Hub(model, hub.url))  # type: ignore[arg-type]
