"""What is committed: sizes, shapes, and that transformers takes it as it is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bundled_model.export import export, load_exported
from bundled_model.judging import Judged
from bundled_model.network import TARGET_NAME, Network, shape_of
from bundled_model.tokenizer import load_bundled_tokenizer, train_tokenizer

FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
TRAINED_WITH_SEED = 1


def num_parameters(judged: Judged) -> int:
    return sum(parameter.numel() for parameter in judged.model.parameters())


def test_both_models_together_stay_within_ten_megabytes(
    target_directory: Path, draft_directory: Path
) -> None:
    sizes = [
        (directory / name).stat().st_size
        for directory in (target_directory, draft_directory)
        for name in FILES
    ]
    assert sum(sizes) <= 10_000_000


def test_transformers_loads_the_target_as_a_grouped_query_llama_in_bfloat16(target: Judged) -> None:
    assert type(target.model).__name__ == "LlamaForCausalLM"
    assert 3_000_000 <= num_parameters(target) <= 4_000_000
    assert target.model.config.num_key_value_heads < target.model.config.num_attention_heads
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    assert len(target.tokenizer) <= 2048


def test_the_draft_is_about_a_tenth_and_shares_the_tokenizer(
    target: Judged, draft: Judged, target_directory: Path, draft_directory: Path
) -> None:
    assert 0.05 <= num_parameters(draft) / num_parameters(target) <= 0.15
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target_directory / name).read_bytes() == (draft_directory / name).read_bytes(), name


def test_the_committed_tokenizer_is_what_its_script_makes(target_directory: Path) -> None:
    made = json.loads(train_tokenizer(TRAINED_WITH_SEED).to_str())
    assert made == json.loads((target_directory / "tokenizer.json").read_text())


def test_the_model_card_states_accuracies_and_the_command(
    target_directory: Path, draft_directory: Path
) -> None:
    for directory in (target_directory, draft_directory):
        card = (directory / "README.md").read_text()
        assert "python -m bundled_model.train" in card
        assert "| recall at 1000 tokens |" in card


def test_an_exported_network_gives_transformers_logits(tmp_path: Path) -> None:
    torch.manual_seed(3)
    network = Network(shape_of(TARGET_NAME, 1536))
    export(network, load_bundled_tokenizer(), tmp_path)
    token_ids = torch.randint(0, 1536, (2, 200))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(token_ids).logits
        ours = load_exported(tmp_path)(token_ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
