"""The Hugging Face Hub: what is fetched of a repository, what refusals become, and what faults do to it."""

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session
from tests.sources.hub_model import MODEL, SHARD, Fetch, holds_of, storage_path

from headway_runtime.errors import ModelFetchError, ModelLoadError
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.sources.adopt import offline
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import HubModel
from headway_runtime.sources.store import Store

OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


def test_fetches_what_makes_a_model_and_nothing_else(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, watcher: Any, tmp_path: Path
) -> None:
    files = make_files()
    hub.add("org/name", files)
    folder = fetched()
    holds(folder, files)
    commit = hub.revisions["main"]
    assert folder == tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / commit
    asked = {one.path for one in hub.asked}
    assert not any(name in path for path in asked for name in (".py", ".bin", "consolidated", "README"))
    # No name of an agent or machine is asked for, or told.
    assert all(path.startswith(("/api/models/org/name", "/org/name/resolve/")) for path in asked)
    assert {one.headers["user-agent"].partition("/")[0] for one in hub.asked} == {"headway"}
    sizes = sum(len(content) for content in holds_of(folder).values())
    assert (watcher.expected, watcher.arrived_bytes, watcher.files) == (sizes, sizes, 8)


def test_what_is_there_is_not_fetched_again(hub: Any, fetched: Fetch, make_files: Any, watcher: Any) -> None:
    hub.add("org/name", make_files())
    first = fetched()
    arrived, num_asked = watcher.arrived_bytes, len(hub.asked)
    assert fetched() == first
    assert watcher.arrived_bytes == arrived
    assert [one.path for one in hub.asked[num_asked:]] == ["/api/models/org/name/revision/main"]


def test_a_branch_that_moves_is_followed_and_its_unchanged_files_are_kept(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, watcher: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    first = fetched()
    hub.revisions |= {"main": OTHER_COMMIT, OTHER_COMMIT: OTHER_COMMIT}
    newer = {**files, "model-00001-of-00003.safetensors": os.urandom(1_000_000)}
    hub.add("org/name", newer)
    before = watcher.arrived_bytes
    second = fetched()
    holds(second, newer)
    holds(first, files)
    assert watcher.arrived_bytes - before == 1_000_000


def test_a_single_file_needs_no_index(hub: Any, fetched: Fetch, tiny: dict[str, bytes]) -> None:
    hub.add("org/name", {**tiny, "original/config.json": b"{}", "consolidated.safetensors": b"x"})
    folder = fetched()
    assert {path.name for path in folder.iterdir()} == tiny.keys() - {"README.md"}


def test_the_token_goes_to_the_hub_and_not_to_its_storage(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files()
    hub.add("org/name", files)
    hub.private.add("org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    holds(fetched(), files)
    assert {one.headers.get("authorization") for one in hub.asked} == {"Bearer hf_good"}
    assert hub.storage.asked
    assert not any("authorization" in one.headers for one in hub.storage.asked)


@pytest.mark.parametrize(
    ("model", "setting", "token", "want"),
    [
        (HubModel("org/nothing", "main"), "", None, "no such repository.*no token was given.*set HF_TOKEN"),
        (MODEL, "private", None, "or it is private and no token was given"),
        (MODEL, "private", "hf_bad", "the token of HF_TOKEN does not open it"),
        (MODEL, "gated", None, "granted by its owner, and no token was given; ask for access"),
        (MODEL, "gated", "hf_bad", "granted by its owner, and the token of HF_TOKEN does not open it"),
        (HubModel("org/name", "v9"), "", None, "no revision 'v9'; name a branch, tag or commit"),
    ],
)
def test_refusals_say_what_to_do(
    hub: Any,
    fetched: Fetch,
    tiny: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    model: HubModel,
    setting: str,
    token: str | None,
    want: str,
) -> None:
    hub.add("org/name", tiny)
    if setting:
        getattr(hub, setting).add("org/name")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelFetchError, match=want):
        fetched(model)


@pytest.mark.parametrize(
    ("left_out", "want"),
    [
        ("config.json", "there is no config.json"),
        ("model.safetensors", "neither model.safetensors nor .*'pytorch_model.bin', which is never fetched"),
    ],
)
def test_a_repository_without_a_model_is_told(
    hub: Any, fetched: Fetch, tiny: dict[str, bytes], left_out: str, want: str
) -> None:
    hub.add(
        "org/name", {name: c for name, c in tiny.items() if name != left_out} | {"pytorch_model.bin": b"x"}
    )
    with pytest.raises(ModelFetchError, match=want):
        fetched()


def test_an_index_that_names_what_is_not_there_is_told(hub: Any, fetched: Fetch, make_files: Any) -> None:
    files = make_files()
    del files["model-00002-of-00003.safetensors"]
    hub.add("org/name", files)
    with pytest.raises(ModelFetchError, match=r"names 'model-00002-of-00003.safetensors', which is no"):
        fetched()
    hub.add(
        "org/name", {**files, "model.safetensors.index.json": b'{"weight_map": {"x": "../../x.safetensors"}}'}
    )
    with pytest.raises(ModelFetchError, match=r"names '\.\./\.\./x.safetensors', which is no"):
        fetched()


def test_a_model_that_the_engine_lacks_is_refused_before_its_weights_come(
    hub: Any, fetched: Fetch, make_files: Any
) -> None:
    files = make_files()
    config = files["config.json"].replace(b"LlamaForCausalLM", b"FancyForCausalLM")
    hub.add("org/name", {**files, "config.json": config})
    with pytest.raises(ModelLoadError, match=r"hf://org/name@main: config.json: .*FancyForCausalLM"):
        fetched()
    assert hub.storage.asked == []


@pytest.mark.parametrize(
    ("quantization", "want"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method='modelopt'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (None, "hf_quant_config.json: quantization of that tool is not supported"),
    ],
    ids=["bitsandbytes", "mxfp4", "modelopt", "nvfp4", "a file of its own"],
)
def test_a_quantization_that_the_engine_cannot_read_is_refused_before_the_weights_come(
    hub: Any, fetched: Fetch, make_files: Any, tmp_path: Path, quantization: dict[str, Any] | None, want: str
) -> None:
    files = make_files()
    if quantization is None:
        files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "NVFP4"}}'
    else:
        config = json.loads(files["config.json"]) | {"quantization_config": quantization}
        files["config.json"] = json.dumps(config).encode()
    hub.add("org/name", files)
    with pytest.raises(ModelLoadError) as refused:
        fetched()
    assert hub.storage.asked == []
    # In the engine's own words.
    for name in files.keys() & {"config.json", "hf_quant_config.json"}:
        (tmp_path / name).write_bytes(files[name])
    with pytest.raises(ModelLoadError) as told:
        choose_quantization("auto", tmp_path)
    assert str(refused.value) == f"hf://org/name@main: {told.value}"
    assert want in str(told.value)


# Faults


def ranges_of(hub: Any, path: str) -> list[str | None]:
    return [one.headers.get("range") for one in hub.storage.asked if one.path.endswith(path)]


def test_a_broken_connection_is_gone_on_from_where_it_broke(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, watcher: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    path = storage_path(files)
    hub.storage.faults[path] = [fault(after=1_000_000), fault(after=700_000)]
    holds(fetched(), files)
    first, second, third = ranges_of(hub, path)
    assert (first, second, third) == (None, "bytes=1000000-", "bytes=1700000-")
    assert watcher.arrived_bytes == watcher.expected


def test_an_interrupted_fetch_is_gone_on_with_by_the_next(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, impatient: Patience, store: Store
) -> None:
    files = make_files()
    hub.add("org/name", files)
    path = storage_path(files)
    hub.storage.faults[path] = [fault(after=1_200_000), *[fault(status=503)] * 9]
    with pytest.raises(ModelFetchError, match=r"answers 503; given up after .*What has come is kept"):
        fetched()
    assert store.complete(hub.revisions["main"]) is None
    assert not store.snapshot(hub.revisions["main"]).exists()
    hub.storage.faults.clear()
    hub.storage.asked.clear()
    holds(fetched(), files)
    assert ranges_of(hub, path) == ["bytes=1200000-"]


def test_a_storage_that_knows_no_ranges_is_begun_anew(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, watcher: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    hub.storage.faults[storage_path(files)] = [fault(after=1_000_000), fault(ignores_range=True)]
    holds(fetched(), files)
    assert watcher.arrived_bytes == watcher.expected


def test_damaged_bytes_are_thrown_away(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, watcher: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    hub.storage.faults[storage_path(files)] = [fault(damage=True)]
    holds(fetched(), files)
    assert watcher.arrived_bytes == watcher.expected


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_bytes_that_stay_damaged_are_an_error_and_are_never_used(
    hub: Any, fetched: Fetch, make_files: Any, fault: Any, store: Store, name: str
) -> None:
    files = make_files()
    hub.add("org/name", files)
    where = hub.storage.faults if name == SHARD else hub.faults
    where[storage_path(files) if name == SHARD else name] = [fault(damage=True)] * 9
    with pytest.raises(ModelFetchError, match=rf"{name}: its checksum is .* where the source says"):
        fetched()
    assert store.complete(hub.revisions["main"]) is None


def test_a_mirror_with_other_files_than_it_lists_is_told_before_they_come(
    hub: Any, fetched: Fetch, make_files: Any
) -> None:
    files = make_files()
    hub.add("org/name", files)
    listing = hub._listing("org/name", hub.revisions["main"])
    hub._listing = lambda *_: listing
    hub.add("org/name", {**files, SHARD: b"another"})
    with pytest.raises(ModelFetchError, match=r"has the etag .* where the Hub's list says"):
        fetched()


def test_limits_of_the_hub_are_kept(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, impatient: Patience
) -> None:
    pauses: list[float] = []
    files = make_files()
    hub.add("org/name", files)
    hub.faults["revision/main"] = [fault(status=429, headers={"Retry-After": "7"}), fault(status=502)]
    hub.faults["config.json"] = [fault(status=429, headers={"Retry-After": "11"})]
    holds(fetched(patience=replace(impatient, sleep=pauses.append)), files)
    assert sorted(pauses)[1:] == [7.0, 11.0] or sorted(pauses)[-2:] == [7.0, 11.0]
    assert len(pauses) == 3


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529])
def test_what_may_go_better_in_a_moment_is_asked_for_again(
    hub: Any, fetched: Fetch, tiny: Any, holds: Any, fault: Any, impatient: Patience, status: int
) -> None:
    hub.add("org/name", tiny)
    hub.faults["revision/main"] = [fault(status=status)]
    holds(fetched(patience=impatient), tiny)


@pytest.mark.parametrize("status", [501, 505, 525, 526])
def test_what_stays_as_it_is_is_not_asked_for_again(
    hub: Any, fetched: Fetch, tiny: Any, fault: Any, status: int
) -> None:
    hub.add("org/name", tiny)
    hub.faults["revision/main"] = [fault(status=status)]
    with pytest.raises(ModelFetchError, match=str(status)):
        fetched()


def test_a_pause_that_nobody_would_wait_for_is_an_error(
    hub: Any, fetched: Fetch, tiny: Any, fault: Any
) -> None:
    hub.add("org/name", tiny)
    hub.faults["config.json"] = [fault(status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(ModelFetchError, match="asks to come again in 3600 s"):
        fetched()


def test_a_hub_that_fails_is_given_up_after_growing_pauses(
    hub: Any, fetched: Fetch, tiny: Any, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/name", tiny)
    hub.faults["revision/main"] = [fault(status=500)] * 99
    pauses: list[float] = []
    ways_out = r"HTTPS_PROXY .* HF_ENDPOINT .* a folder .* hf://\.\.\., HEADWAY_OFFLINE=1 .*docs/sources\.md"
    with pytest.raises(ModelFetchError, match=f"answers 500; given up after 5 tries.*{ways_out}"):
        fetched(patience=Patience(num_tries=5, sleep=pauses.append))
    assert len(hub.asked) == 5
    # Each twice the last, and up to a quarter more: many who fail together shall not all come again at once.
    assert len(pauses) == 4
    assert all(2**number <= pause <= 1.25 * 2**number for number, pause in enumerate(pauses))
    # Each line says which try it was of how many, and when there will be no more.
    told = [record.getMessage() for record in caplog.records if "failed, the next in" in record.getMessage()]
    assert len(told) == 4
    for number, (line, pause) in enumerate(zip(told, pauses, strict=True), start=1):
        assert f"; try {number} of 5 failed, the next in {pause:.1f} s, given up after " in line
        found = re.search(r"given up after (\d+) s of pauses", line)
        assert found
        assert round(sum(pauses[number - 1 :])) <= int(found[1]) <= 1.25 * 2**4
    assert re.search(ways_out, told[0])
    assert "ways out" not in told[1]


def test_a_hub_that_is_gone_leaves_what_is_cached(
    hub: Any, fetched: Fetch, tiny: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/name", tiny)
    folder = fetched()
    hub.close()
    close_session()  # with a connection that the server still has
    caplog.set_level(logging.WARNING)
    assert fetched() == folder
    assert "using what was fetched of it before" in caplog.text
    with pytest.raises(ModelFetchError, match="cannot be reached"):
        fetched(HubModel("org/other", "main"), into=Store(folder / "other", ""))


def test_a_hub_that_falls_silent_is_asked_again(
    hub: Any, fetched: Fetch, make_files: Any, holds: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx2

    monkeypatch.setattr("headway_runtime.sources.hub.TIMEOUT", httpx2.Timeout(0.3))
    files = make_files()
    hub.add("org/name", files)
    path = storage_path(files)
    hub.storage.faults[path] = [fault(after=500_000, stall=True)]
    holds(fetched(), files)
    assert ranges_of(hub, path) == [None, "bytes=500000-"]


# What other tools have fetched


def test_the_hubs_library_uses_what_was_fetched_here(
    hub: Any, fetched: Fetch, make_files: Any, tmp_path: Path
) -> None:
    import huggingface_hub

    hub.add("org/name", make_files())
    folder = fetched()
    found = huggingface_hub.snapshot_download(
        "org/name", cache_dir=tmp_path / "hf" / "hub", local_files_only=True
    )
    assert Path(found) == folder
    (repository,) = huggingface_hub.scan_cache_dir(tmp_path / "hf" / "hub").repos
    assert repository.repo_id == "org/name"
    assert repository.nb_files == 8


def test_offline_nothing_is_invented(store: Store, watcher: Any) -> None:
    with pytest.raises(
        ModelFetchError, match=r"stay offline; fetch it once .*: headway fetch hf://org/name@main"
    ):
        offline(MODEL, store, watcher)
