"""Perplexity and KL divergence of random models are those that transformers' float32 logits give."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headway_runtime.sources import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "headway-tiny"
WORDS = "The code of the kite is 47. Ada lives in Paris and likes 🚀 and {curly} things. "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two random models that differ a little, with the bundled tokenizer: folders, and in transformers."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=1536,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        dtype="float32",
    )
    made = []
    model: Any = LlamaForCausalLM(config)
    model.eval()
    for name in ("baseline", "model"):
        folder = tmp_path_factory.mktemp(name)
        if name == "model":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(folder)
        for file_name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED / file_name, folder)
        reference: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        made.append((folder, reference.eval()))
    return made


def log_probabilities(model: Any, token_ids: list[int], window: int, stride: int) -> torch.Tensor:
    """Of the token after each position but the last: float64 [tokens - 1, vocab]."""
    rows: list[torch.Tensor] = []
    for start in range(0, len(token_ids), stride):
        own = token_ids[start : start + window]
        with torch.inference_mode():
            logits = model(torch.tensor([own])).logits[0, :-1].double().log_softmax(-1)
        rows += logits[len(rows) - start :]
        if start + window >= len(token_ids):
            break
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("window", "stride", "chunk"),
    [(256, 128, 256), (96, 32, 16), (64, 63, 7), (33, 16, 1)],
    ids=["one window", "chunks", "odd chunks", "token by token"],
)
def test_they_are_transformers(
    run_eval: Callable[..., Any],
    pair: list[tuple[Path, Any]],
    tmp_path: Path,
    window: int,
    stride: int,
    chunk: int,
) -> None:
    (baseline_folder, baseline), (folder, model) = pair
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 6, encoding="utf-8")
    token_ids = AutoTokenizer.from_pretrained(BUNDLED)(WORDS * 6).input_ids
    judged = run_eval(
        *(str(folder), "--against", str(baseline_folder), "--text", str(path), "--tasks", "none"),
        *("--window-tokens", str(window), "--stride-tokens", str(stride), "--chunk-tokens", str(chunk)),
    )
    own, other = (log_probabilities(one, token_ids, window, stride) for one in (model, baseline))
    following = torch.tensor(token_ids[1:]).unsqueeze(1)
    divergences = (other.exp() * (other - own)).sum(-1)
    text = judged.report["text"]
    assert text["num_tokens"] == len(token_ids) - 1
    for name, want in (
        ("model_perplexity", math.exp(-float(own.gather(1, following).mean()))),
        ("baseline_perplexity", math.exp(-float(other.gather(1, following).mean()))),
        ("mean_kl", float(divergences.mean())),
        ("largest_kl", float(divergences.max())),
        ("same_choice_share", float((own.argmax(-1) == other.argmax(-1)).double().mean())),
    ):
        assert text[name] == pytest.approx(want, rel=1e-3), name
    assert text["mean_kl"] > 0.01
