"""Adapters of the Hub: what is fetched of a repository, also of one that is a model, too."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.errors import ConfigError, ModelFetchError, ModelLoadError
from headway_runtime.sources import resolve, resolve_adapter


@pytest.fixture(autouse=True)
def endpoint(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_adapters_two_files_are_fetched_and_nothing_else(
    hub: Any, adapter_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"README.md": b"x", "tokenizer.json": b"{}", "adapter_model.bin": b"x", "train.py": b"x"}
    hub.add("org/adapter", {**adapter_files, **others})
    folder = resolve_adapter("hf://org/adapter")
    assert contents(folder) == adapter_files
    assert not any(name in one.path for name in others for one in hub.asked)
    # Without the Hub, by what is cached of it.
    monkeypatch.setenv("HEADWAY_OFFLINE", "1")
    assert resolve_adapter("hf://org/adapter") == folder


def test_a_repository_may_hold_a_model_and_an_adapter_for_it(
    hub: Any, adapter_files: dict[str, bytes], tiny: dict[str, bytes]
) -> None:
    hub.add("org/both", {**tiny, **adapter_files})
    adapter = resolve_adapter("hf://org/both@main")
    assert contents(adapter) == adapter_files
    model = resolve("hf://org/both")
    assert (
        contents(model).items() >= {name: tiny[name] for name in ("config.json", "model.safetensors")}.items()
    )
    assert (model / "config.json").is_file()
    assert resolve_adapter("hf://org/both") == adapter


def test_an_adapter_that_cannot_be_had_is_refused_before_its_weights_come(
    hub: Any, adapter_files: dict[str, bytes], tiny: dict[str, bytes]
) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 4, "use_dora": True}).encode()
    hub.add("org/dora", {**adapter_files, "adapter_config.json": config})
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json: use_dora=True"):
        resolve_adapter("hf://org/dora")
    assert not any("safetensors" in one.path for one in hub.asked if "/resolve/" in one.path)
    hub.add("org/model", tiny)
    with pytest.raises(ModelFetchError, match=r"no adapter_config\.json; name the place of a LoRA adapter"):
        resolve_adapter("hf://org/model")
    hub.add(
        "org/pickle", {"adapter_config.json": adapter_files["adapter_config.json"], "adapter_model.bin": b"x"}
    )
    with pytest.raises(ModelFetchError, match=r"adapter_model\.bin.*safe_serialization=True"):
        resolve_adapter("hf://org/pickle")
    with pytest.raises(ConfigError, match="no adapters are bundled"):
        resolve_adapter("bundled://headway-tiny")
