"""Step times: the published anchors met, a file's fields checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway_simulator.errors import OptionsError
from headway_simulator.step_model import (
    PROFILES,
    idle_tpot_milliseconds,
    idle_ttft_milliseconds,
    read_step_model,
)

EIGHT_B, SEVENTY_B = PROFILES["llama-3.1-8b-a100-tp2"], PROFILES["llama-2-70b-h100-tp8"]
OWN = {
    "name": "mine",
    "base_milliseconds": 5,
    "prefill_token_milliseconds": 0.05,
    "decode_milliseconds": 0.2,
    "kv_cache_tokens": 10_000,
}


@pytest.mark.parametrize(("tokens", "want"), [(1024, 54), (2048, 131), (4096, 234), (8192, 542)])
def test_the_published_prefills_are_met_within_fifteen_percent(tokens: int, want: float) -> None:
    assert idle_ttft_milliseconds(EIGHT_B, tokens, 8192) == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("num_sequences", [1, 32, 64])
def test_the_published_decodes_are_met(num_sequences: int) -> None:
    assert 1000 * EIGHT_B.seconds(0, 0, num_sequences, 0) == pytest.approx(8.3 + 0.25 * num_sequences)


@pytest.mark.parametrize(("num_sequences", "want"), [(1, 30.5), (64, 50.0)])
def test_the_larger_models_published_decodes_are_met(num_sequences: int, want: float) -> None:
    assert 1000 * SEVENTY_B.seconds(0, 0, num_sequences, 0) == pytest.approx(want, abs=0.01)


def test_smaller_chunks_pay_for_more_steps() -> None:
    whole, halves = (idle_ttft_milliseconds(EIGHT_B, 4096, budget) for budget in (4096, 2048))
    assert halves - whole == pytest.approx(EIGHT_B.base_milliseconds)
    assert idle_tpot_milliseconds(EIGHT_B, 1000) == pytest.approx(8.55)


def test_a_file_brings_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**OWN, "gpus": 4, "decode_context_milliseconds": 0.001}))
    model = read_step_model(str(path))
    assert (model.name, model.gpus) == ("mine", 4)
    assert 1000 * model.seconds(10, 0, 2, 100) == pytest.approx(5 + 0.5 + 0.4 + 0.1)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"decode_milliseconds": None}, "decode_milliseconds=None"),
        ({"decode_milliseconds": -1}, "decode_milliseconds=-1"),
        ({"base_milliseconds": 0}, "base_milliseconds=0"),
        ({"kv_cache_tokens": 1.5}, "kv_cache_tokens=1.5"),
        ({"gpus": 0}, "gpus=0"),
        ({"name": 3}, "name=3"),
        ({"speed": 3}, "speed is unknown"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], want: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**OWN, **change}))
    with pytest.raises(OptionsError, match=want):
        read_step_model(str(path))


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({name: value for name, value in OWN.items() if name != "base_milliseconds"}))
    with pytest.raises(OptionsError, match="base_milliseconds is missing"):
        read_step_model(str(path))
    with pytest.raises(OptionsError, match="neither a file nor one of llama"):
        read_step_model("gpt")
    path.write_text("[]")
    with pytest.raises(OptionsError, match="no JSON object"):
        read_step_model(str(path))
