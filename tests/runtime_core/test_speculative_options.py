"""`--speculative-config`: what it may say, and what is said of what it may not."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from headway_runtime.config import SpeculativeConfig
from headway_runtime.errors import ConfigError
from headway_runtime.sources import resolve
from headway_runtime.speculative_options import speculative_options

if TYPE_CHECKING:
    from pathlib import Path

MODEL = resolve("bundled://headway-tiny")
DRAFT = "bundled://headway-tiny-draft"


@pytest.mark.parametrize(
    ("text", "want", "number"),
    [
        pytest.param('{"method": "ngram"}', SpeculativeConfig("ngram", None, 2, 5), 4, id="prompt lookup"),
        pytest.param(
            '{"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 1}',
            SpeculativeConfig("ngram", None, 1, 1),
            3,
            id="as older vLLM says it",
        ),
        pytest.param(
            '{"method": "ngram", "adaptive": false}',
            SpeculativeConfig("ngram", None, 2, 5, adaptive=False),
            4,
            id="always",
        ),
        pytest.param(
            f'{{"model": "{DRAFT}"}}',
            SpeculativeConfig("draft_model", str(resolve(DRAFT))),
            4,
            id="a model that guesses",
        ),
    ],
)
def test_what_is_asked_for(text: str, want: SpeculativeConfig, number: int) -> None:
    found = speculative_options(text, MODEL)
    assert found is not None
    assert (found.config, found.num_speculative_tokens) == (want, number)
    assert speculative_options(json.loads(text), MODEL) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "want an object"),
        ("{}", "method=None"),
        ('{"method": "eagle"}', "method='eagle'"),
        ('{"method": "draft_model"}', "model=None"),
        ('{"method": "ngram", "model": "x"}', "model='x'"),
        ('{"method": "ngram", "quantization": "fp8"}', "quantization='fp8'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens=0"),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "num_speculative_tokens=17"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens=True"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_min=4"),
        (f'{{"model": "{DRAFT}", "prompt_lookup_max": 3}}', "prompt_lookup_max=3"),
        ('{"method": "ngram", "adaptive": 1}', "adaptive=1"),
        ('{"model": "bundled://nobody"}', "bundled://nobody"),
        ('{"model": "/nowhere"}', "config.json"),
    ],
)
def test_what_is_refused_names_field_and_value(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculative_options(text, MODEL)
    assert "--speculative-config" in str(caught.value)
    assert says in str(caught.value)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve(DRAFT), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    config = json.dumps({"model": str(tmp_path)})
    # Written in another way, it still is the same.
    path.write_text(json.dumps(tokenizer, indent=1), encoding="utf-8")
    assert speculative_options(config, MODEL) is not None
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match="its vocabulary is another one: token"):
        speculative_options(config, MODEL)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"added_tokens": [{"content": "x"}]}, "added_tokens[0].id=None: want an integer"),
        ({"added_tokens": [5]}, "added_tokens[0]=5: want an object with content and id"),
        ({"added_tokens": [{"content": 1, "id": 1}]}, "want an object with content and id"),
        ({"added_tokens": {}}, "added_tokens={}: want a list of objects"),
        ({"model": {"vocab": [1, 2]}}, "model.vocab[0]=1: want a pair of token and score"),
        ({"model": {"vocab": {"a": "1"}}}, "model.vocab['a']='1': want an integer"),
        ({"model": {"vocab": 3}}, "model.vocab=3: want an object or a list of tokens"),
    ],
)
def test_a_drafts_damaged_tokenizer_is_named(fields: dict[str, object], says: str, tmp_path: Path) -> None:
    shutil.copytree(resolve(DRAFT), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        speculative_options({"model": str(tmp_path)}, MODEL)
    assert str(caught.value).startswith(f"--speculative-config: model: {path}: ")
    assert says in str(caught.value)


def test_a_draft_without_the_tokenizer_that_the_model_has_is_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve(DRAFT), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json .* copy the model's there"):
        speculative_options({"model": str(tmp_path)}, MODEL)
    assert speculative_options({"model": str(tmp_path)}, MODEL, headers_only=True) is not None


def test_without_tokenizers_the_sizes_must_agree(tmp_path: Path) -> None:
    for name, size in (("model", 64), ("same", 64), ("other", 65)):
        folder = tmp_path / name
        folder.mkdir()
        fields = json.loads((MODEL / "config.json").read_text(encoding="utf-8")) | {"vocab_size": size}
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert speculative_options({"model": str(tmp_path / "same")}, tmp_path / "model") is not None
    with pytest.raises(ConfigError, match="vocab_size is 65, the model's 64"):
        speculative_options({"model": str(tmp_path / "other")}, tmp_path / "model")
