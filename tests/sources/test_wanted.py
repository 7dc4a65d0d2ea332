"""Which files of a source make a model, and what is said where there is none."""

import json

import pytest

from headway_runtime.errors import ModelFetchError
from headway_runtime.quantization.choice import OLD_FILES, OTHER_FILES
from headway_runtime.sources import wanted

INDEX = "model.safetensors.index.json"


def index_of(*shards: object) -> bytes:
    return json.dumps({"weight_map": {f"tensor.{n}": shard for n, shard in enumerate(shards)}}).encode()


def test_what_quantization_tools_write_beside_the_config_is_wanted() -> None:
    assert {*OLD_FILES, *OTHER_FILES} <= wanted.SMALL_FILES


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("config.json", True),
        ("models/tokenizer.json", True),
        ("a/b/model-00001-of-00002.safetensors", True),
        ("chat_template.jinja", True),
        ("modeling_x.py", False),
        ("pytorch_model.bin", False),
        ("model.gguf", False),
        ("model.safetensors.py", False),
        (".hidden config.json", False),
        ("README.md", False),
    ],
)
def test_code_and_pickles_are_never_wanted(path: str, want: bool) -> None:  # noqa: FBT001 - a row of a table
    assert wanted.may_be_wanted(path) is want


def test_the_weights_are_those_that_the_index_names() -> None:
    names = ["config.json", INDEX, "a.safetensors", "b.safetensors", "consolidated.safetensors"]
    assert wanted.weight_files(names, index_of("b.safetensors", "a.safetensors"), "x") == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert wanted.weight_files(["model.safetensors", "a.safetensors"], None, "x") == ["model.safetensors"]


def test_the_weights_may_have_the_name_that_autogptq_gives_them() -> None:
    named = "gptq_model-4bit-128g.safetensors"
    assert wanted.may_be_wanted(named)
    assert wanted.weight_files(["config.json", named, "other.safetensors"], None, "x") == [named]
    assert wanted.weight_files([named, "model.safetensors"], None, "x") == ["model.safetensors"]
    with pytest.raises(ModelFetchError, match="each of which may be the model"):
        wanted.weight_files([named, "gptq_model-4bit--1g.safetensors"], None, "x")


def test_shards_may_be_named_by_the_index_that_autogptq_writes() -> None:
    index = "gptq_model-4bit-128g.safetensors.index.json"
    shards = [f"gptq_model-4bit-128g-0000{n}-of-00002.safetensors" for n in (1, 2)]
    names = ["config.json", index, *shards]
    assert all(map(wanted.may_be_wanted, names))
    assert wanted.small_files(names, "x") == ["config.json", index]
    assert wanted.index_file(names) == index
    assert wanted.weight_files(names, index_of(*shards), "x") == shards
    with pytest.raises(ModelFetchError, match=f"x: {index} names 'gone.safetensors', which is no"):
        wanted.weight_files(names, index_of("gone.safetensors"), "x")
    # A usual name hides it.
    assert wanted.index_file([*names, INDEX]) == INDEX
    assert wanted.index_file([*names, "model.safetensors"]) is None
    with pytest.raises(ModelFetchError, match="each of which may be the model"):
        wanted.weight_files([*names, "gptq_model-8bit-32g.safetensors"], None, "x")


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (b"{", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"weight_map": []}', "cannot be read"),
        (b'{"weight_map": {"a": ["b"]}}', "cannot be read"),
        (index_of("gone.safetensors"), "names 'gone.safetensors', which is no"),
        (index_of("../a.safetensors"), "names '../a.safetensors', which is no"),
        (index_of("a.bin"), "names 'a.bin', which is no"),
        (index_of(7), "names '7', which is no"),
    ],
)
def test_an_index_that_names_no_weights_is_told(index: bytes, complaint: str) -> None:
    with pytest.raises(ModelFetchError, match="x: model.safetensors.index.json " + complaint):
        wanted.weight_files(["a.safetensors", "../a.safetensors", "a.bin", "7"], index, "x")


@pytest.mark.parametrize(
    ("paths", "want"),
    [
        (["config.json", "model.safetensors"], ""),
        (["models/config.json"], "models"),
        (["models/config.json", "models/draft/config.json"], "models"),
        (["llama/8b/config.json"], "llama/8b"),
    ],
)
def test_the_model_lies_where_its_config_lies(paths: list[str], want: str) -> None:
    assert wanted.model_root(paths, "x") == want
