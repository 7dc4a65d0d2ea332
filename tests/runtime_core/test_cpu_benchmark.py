"""The CPU benchmark's own arithmetic: how visits add up, what a failed one leaves, what its table says."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cpu import run
from benchmarks.cpu.conditions import conditions
from benchmarks.cpu.lever_folders import make_for_levers
from benchmarks.cpu.model_folder import CONFIG, make_model_folder
from benchmarks.cpu.peers import ServedPeer
from benchmarks.cpu.report import table
from benchmarks.cpu.servers import (
    ADAPTER,
    CHECKPOINTS,
    DRAFT,
    LEVERS,
    ServerError,
    checkpoint_folder,
    command_of,
    draft_folder,
)
from benchmarks.cpu.workload import QUICK, Answer, BatchResult, percentile
from safetensors.torch import load_file

from headway_runtime.layers.quantized_weights import Fp8Weight, Int4Weight
from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.quantization.choice import Online, choose_quantization

MACHINE = {"read_gigabytes_per_second": 40.0, "products_tokens_per_second": 50.0}


def peer(tokens_per_second: float, *starts: float) -> dict[str, Any]:
    batches = {
        str(size): {
            "tokens_per_second": tokens_per_second * size,
            "decode_tokens_per_second": 45.0,
            "ttft_p95_milliseconds": 1000.0,
        }
        for size in (1, 4, 16, 64)
    }
    prefix = {"hit_milliseconds": 50.0, "miss_milliseconds": 1000.0, "ratio": 20.0}
    return {
        "start_seconds": list(starts),
        "batches": batches,
        "prefix": prefix,
        "machine": [MACHINE, MACHINE],
    }


def results(**peers: dict[str, Any]) -> dict[str, Any]:
    where = {"processor": "x", "cpus": 2, "load_average": 0.1, "python": "3", "torch": "2"}
    return {
        "environment": where | {"commit": "c", "command": "run"},
        "model": {"parameters": 1e6},
        "workload": {"prompt_tokens": 128, "output_tokens": 64},
        "seconds": 1.0,
        "peers": peers,
    }


def test_goals_are_ratios_of_one_run_and_each_start_counts() -> None:
    page = table(results(headway=peer(30.0, 9.0, 4.0), vllm=peer(20.0, 90.0)))
    assert "| headway | 9.0, 4.0 | 30 |" in page
    assert "| vllm | 90.0 | 20 (1.50x) |" in page
    assert "- output tokens/s over vLLM's, 1 at once: 1.50 (goal 1.5: met)" in page
    assert "- decode over bare products of the weights in 16 bits, 1 at once: 0.90 (goal 0.85: met)" in page
    assert "- 5 s over the first start to first token: 0.56 (goal 1: missed)" in page
    assert "- 5 s over a later start to first token: 1.25 (goal 1: met)" in page


def test_a_peer_that_failed_is_a_row_that_says_so_and_no_goal() -> None:
    failed = peer(20.0, 90.0) | {"error": "ServerError: it\nended"}
    page = table(results(headway=peer(30.0, 4.0), vllm=failed))
    assert "| vllm | failed: ServerError: it ended |" in page
    assert "vLLM's" not in page


def test_levers_are_rows_over_our_own_plain_weights() -> None:
    sixteen_bits = peer(28.0, 4.0)
    sixteen_bits["batches"]["1"]["decode_tokens_per_second"] = 20.0
    page = table(
        results(
            headway=peer(30.0, 4.0),
            **{
                "headway, int4 weights": peer(75.0, 9.0),
                "headway, 16-bit weights": sixteen_bits,
                "headway, int8 weights": peer(24.0, 5.0),
            },
        )
    )
    plain, _, levers = page.partition("| lever |")
    assert "int4" not in plain
    assert "| headway, int4 weights | 9.0 | 75 (2.50x; 1.00x) |" in levers
    assert "- decoding over 16-bit weights, headway, int4 weights, 1 at once: 2.25 (goal 2: met)" in levers
    assert "- decoding over plain, headway, int8 weights, 16 at once: 1.00 (goal 0.97: met)" in levers
    assert "- answers over plain, headway, int8 weights, 16 at once: 0.80 (goal 0.97: missed)" in levers
    assert len({line.count("|") for line in levers.splitlines() if "headway, " in line and "|" in line}) == 1


def test_every_lever_is_a_command_and_is_visited_between_ours(tmp_path: Path) -> None:
    assert run.VISITS.index("headway") < min(run.VISITS.index(name) for name in LEVERS)
    assert max(run.VISITS.index(name) for name in LEVERS) < len(run.VISITS) - 1 - run.VISITS[::-1].index(
        "headway"
    )
    plain, _ = command_of("headway", tmp_path, 1)
    for name, flags in LEVERS.items():
        command = command_of(name, tmp_path, 1)[0]
        if name in CHECKPOINTS:
            served = str(checkpoint_folder(tmp_path, CHECKPOINTS[name]))
            command = [str(tmp_path) if part == served else part for part in command]
        assert command[: len(plain)] == [
            "base" if "LoRA" in name and part == "benchmark" else part for part in plain
        ]
        assert len(command) == len(plain) + len(flags)
        assert not any(ADAPTER in part or DRAFT in part for part in command)


def test_quantized_copies_and_drafts_are_what_the_engine_reads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    config = make_model_folder(model, is_quick=True)
    make_for_levers([*CHECKPOINTS, "headway, draft model"], model)
    plain = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    losses: dict[Online, float] = {"fp8": 0.04, "int4": 0.12}
    for kind, most_lost in losses.items():
        folder = checkpoint_folder(model, kind)
        weights = CheckpointWeights(
            folder, torch.bfloat16, torch.device("cpu"), choose_quantization("auto", folder)
        )
        weight = weights.take_linear("model.layers.1.mlp.down_proj", *plain.shape)
        assert isinstance(weight, Fp8Weight if kind == "fp8" else Int4Weight)
        lost = (weight.dequantized(torch.float32) - plain.float()).norm() / plain.float().norm()
        assert 0.01 < float(lost) < most_lost
    draft = load_file(draft_folder(model) / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert config["vocab_size"] == CONFIG["vocab_size"]
    assert torch.equal(draft, plain)


def test_results_name_commit_machine_and_date() -> None:
    found = conditions()
    assert found.keys() == {"commit", "date", "processor", "cpus", "load_average"}
    assert found["commit"]
    assert found["processor"]
    assert date.fromisoformat(str(found["date"])).year >= 2024
    assert found.items() <= (run.environment() | {"load_average": found["load_average"]}).items()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_visit_is_not_covered_by_another_one(
    failing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    visits = run.Visits(tmp_path, {}, QUICK, tmp_path)
    monkeypatch.setattr(run, "measure_machine", lambda _: MACHINE)
    calls = []

    def visit(*_: object) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == failing:
            raise ServerError("it ended")
        return {"start_seconds": [1.0]}

    monkeypatch.setattr(ServedPeer, "visit", visit)
    visits.visit("vllm")
    result = visits.visit("vllm")
    assert result["error"] == "ServerError: it ended"
    assert result["start_seconds"] == [1.0]
    assert len(result["machine"]) == 4


def test_decode_speed_is_that_of_the_time_when_all_decode() -> None:
    result = BatchResult()
    result.add([Answer(0.0, 1.0, 11.0, 11), Answer(0.0, 2.0, 12.0, 11)])
    summary = result.summary()
    assert summary["tokens_per_second"] == pytest.approx(22 / 12)
    assert summary["decode_tokens_per_second"] == pytest.approx(2.0)
    assert summary["ttft_p50_milliseconds"] == pytest.approx(1500)
    assert percentile([1.0, 2.0, 3.0], 75) == pytest.approx(2.5)
