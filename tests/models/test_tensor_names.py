"""Under which names a checkpoint may hold a model's tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_runtime.errors import ModelLoadError

NESTED = "gemma3 within another model"


@pytest.fixture
def changed(checkpoint: Any, tmp_path: Path) -> Any:
    """changed(shape, change): a copy of a checkpoint whose tensors, by name, went through `change`."""

    def make(shape: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
        folder = checkpoint(shape).folder
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(change(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.fixture
def tokens_of(start_engine: Any) -> Callable[[Path], list[int]]:
    def run(folder: Path) -> list[int]:
        driver = start_engine(folder)
        driver.add("a", range(10, 50), max_tokens=24)
        driver.run()
        tokens: list[int] = driver.tokens("a")
        return tokens

    return run


def names_of(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe"])
def test_experts_lie_in_one_tensor_or_in_many(family: str, checkpoint: Any, tokens_of: Any) -> None:
    """The tests of all shapes read both kinds; here, that they are of both kinds."""
    many = names_of(checkpoint(family).folder)
    one = names_of(checkpoint(f"{family}, window, one tensor for all experts").folder)
    assert "model.layers.0.mlp.experts.gate_up_proj" in one - many
    expert = "block_sparse_moe.experts.0.w1" if family == "mixtral" else "mlp.experts.0.gate_proj"
    assert f"model.layers.0.{expert}.weight" in many - one


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_text_model_within_another_one_is_found_under_either_prefix(
    head: str, checkpoint: Any, changed: Any, tokens_of: Any
) -> None:
    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old, new = "language_model.model.", "model.language_model."
        text = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        assert text.keys() != tensors.keys()
        # Tied, so it is the same tensor and is passed over.
        return text | {head: text[f"{new}embed_tokens.weight"].clone()}

    assert tokens_of(changed(NESTED, renamed)) == tokens_of(checkpoint(NESTED).folder)


def test_tensor_of_no_known_part_is_named(changed: Any, tokens_of: Any) -> None:
    folder = changed(NESTED, lambda tensors: tensors | {"audio_tower.weight": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"1 tensors.*'audio_tower\.weight'"):
        tokens_of(folder)


def test_missing_expert_is_named(changed: Any, tokens_of: Any) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors[name]
        return tensors

    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        tokens_of(changed("qwen3 moe", without))


def test_experts_of_another_number_are_told_by_their_tensor(changed: Any, tokens_of: Any) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    shape = "qwen3 moe, window, one tensor for all experts"
    folder = changed(shape, lambda tensors: tensors | {name: tensors[name][:-1].clone()})
    with pytest.raises(ModelLoadError, match=r"experts\.down_proj' has shape \(7, .*asks for \(8, "):
        tokens_of(folder)


@pytest.mark.parametrize("is_same", [True, False], ids=["the embedding", "another"])
def test_a_tied_checkpoint_may_carry_its_head_if_it_is_the_embedding(
    changed: Any,
    tokens_of: Any,
    *,
    is_same: bool,
) -> None:
    """transformers takes another one, and ties no more: to pass over it would be to answer otherwise."""

    def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        if not is_same:
            head[7, 3] += 1.0
        return {**tensors, "lm_head.weight": head}

    folder = changed("llama", with_head)
    if is_same:
        assert len(tokens_of(folder)) == 24
        return
    with pytest.raises(ModelLoadError, match=r"tie_word_embeddings=true, .*lm_head\.weight.* to false"):
        tokens_of(folder)


def test_a_config_nested_without_end_is_named(changed: Any, tokens_of: Any) -> None:
    folder = changed("llama", dict)
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        tokens_of(folder)
