"""What `headway simulate --service` takes of a manifest, and what flags change of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.conftest import ROW

from headway_simulator.simulate_command import main


def test_a_manifest_brings_promise_and_bounds(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  replicas: 3\n  slo: {ttftMilliseconds: 900, percentile: 90}\n"
    )
    report = simulated("--trace", trace, "--service", service, "--no-oracle")
    assert report["objective"] == 0.9
    assert report["targets"] == {"ttft_milliseconds": 900.0, "tpot_milliseconds": None}
    assert report["mean_replicas"] == pytest.approx(3.0)
    # What flags say goes before it.
    other = simulated("--trace", trace, "-f", service, "--slo", "ttft=700ms,percentile=99", "--no-oracle")
    assert other["objective"] == 0.99
    assert other["targets"] == {"ttft_milliseconds": 700.0, "tpot_milliseconds": None}
    made = simulated("--trace", trace, "-f", service, "--slo", "2", "--no-oracle")
    assert made["objective"] == 0.9
    assert None not in made["targets"].values()


def test_what_the_context_has_no_room_for_is_rejected_or_cut(
    tmp_path: Path, simulated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.jsonl"
    sizes = [(300, 40)] * 36 + [(1020, 40), (1023, 40), (1024, 40), (9000, 1)]
    mixed.write_text(
        "".join(
            json.dumps({"at_seconds": i, "prompt_tokens": prompt, "output_tokens": output}) + "\n"
            for i, (prompt, output) in enumerate(sizes)
        )
    )
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model, maxModelLen: %d}\n  slo: {ttftMilliseconds: 9000}\n"
    )
    service.write_text(manifest % 1024)
    flags = ("--trace", mixed, "-f", service)
    report = simulated(*flags)
    assert report["num_arrivals"] == 40
    assert report["num_rejected"] == report["num_too_long"] == 2
    assert report["num_cut_short"] == 2
    assert report["joint_attainment"] == pytest.approx(38 / 40)
    # The oracle serves what can be served.
    assert report["oracle"]["measures"]["num_arrivals"] == 38
    shown = capsys.readouterr().out
    assert "context of 1024 tokens: 2 requests rejected" in shown
    assert "these alone are more than the 5% that may miss" not in shown
    service.write_text(manifest % 16384)
    report = simulated(*flags)
    assert report["num_rejected"] == report["num_cut_short"] == 0
    assert "context of" not in capsys.readouterr().out
    service.write_text(manifest % 100)
    assert main([*map(str, flags)]) == 2
    assert "has room for none of the 40 prompts; raise model.maxModelLen" in capsys.readouterr().err


def test_fields_of_a_manifest_that_are_not_simulated_are_named(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  waiting: {maxRequests: 9}\n"
    )
    report = simulated("--trace", trace, "--no-oracle")
    assert report["not_simulated"] == report["told_by_step_model"] == [], "no manifest says anything"
    assert "manifest" not in capsys.readouterr().out
    service.write_text(manifest + "  slo: {ttftMilliseconds: 900}\n  quantization: auto\n")
    report = simulated("--trace", trace, "-f", service, "--no-oracle")
    assert report["not_simulated"] == report["told_by_step_model"] == []
    assert "not simulated" not in capsys.readouterr().out
    service.write_text(
        manifest + "  slo: {ttftMilliseconds: 900, endToEndMilliseconds: 9000}\n  quantization: fp8\n"
        "  tensorParallelSize: 2\n  kvCacheMemory: 4Gi\n  kvOffload: {hostMemory: 8Gi}\n"
        "  lora: {adapters: [{name: a, source: /a}]}\n  gateway: {replicas: 2}\n"
        "  rollout: {canary: {steps: [10]}}\n"
        "  scaling: {schedule: [{start: '0 8 * * *', end: '0 18 * * *', minReplicas: 2}]}\n"
    )
    report = simulated("--trace", trace, "-f", service, "--no-oracle")
    assert report["not_simulated"] == ["slo.endToEndMilliseconds", "kvOffload", "lora", "rollout", "gateway"]
    assert report["told_by_step_model"] == ["quantization", "tensorParallelSize", "kvCacheMemory"]
    shown = capsys.readouterr().out
    assert "not simulated: slo.endToEndMilliseconds, kvOffload, lora, rollout, gateway of the mani" in shown
    assert "as --step-model has it, not the manifest: quantization, tensorParallelSize, kvCacheM" in shown


@pytest.mark.parametrize("slo", ["", "  slo: null\n", "  slo: {percentile: 90}\n"])
def test_flags_bring_the_targets_that_a_manifest_lacks(
    slo: str,
    trace: Path,
    tmp_path: Path,
    simulated: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: /model}}\n{slo}"
    )
    flags = ("--trace", trace, "-f", service, "--no-oracle")
    made = simulated(*flags, "--slo-factor", 2)["targets"]
    assert None not in made.values()
    assert simulated(*flags, "--slo", "tpot=33")["targets"] == {
        "ttft_milliseconds": None,
        "tpot_milliseconds": 33.0,
    }
    assert main([*map(str, flags)]) == 2
    assert "or give --slo ttft=500,tpot=50 or --slo-factor 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--initial-replicas", "2"), ("--min-replicas", "1"), ("--max-replicas", "9")),
        ("--controller", "hpa-utilisation"),
    ],
)
def test_what_a_fixed_number_of_replicas_leaves_without_effect_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  replicas: 3\n  slo: {ttftMilliseconds: 900}\n"
    )
    assert main(["--trace", str(trace), "-f", str(service), flag, value]) == 2
    want = f"{flag}={value} does nothing beside spec.replicas=3 of the manifest; leave one of them out"
    assert want in capsys.readouterr().err


def test_a_manifest_brings_its_guesses_and_flags_go_before_it(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  slo: {ttftMilliseconds: 900}\n"
        "  speculative: {method: ngram, numSpeculativeTokens: 3}\n"
    )
    flags = ("--trace", trace, "--no-oracle", "--end-seconds", 30)
    plain = simulated(*flags)
    assert plain["speculation"] is None
    capsys.readouterr()
    guessed = simulated(*flags, "-f", service, "--acceptance", 0.9)
    assert guessed["speculation"] == {"num_speculative_tokens": 3, "acceptance": 0.9, "is_adaptive": True}
    assert guessed["tpot_milliseconds"] < 0.7 * plain["tpot_milliseconds"]
    assert "up to 3 guesses, each true with probability 0.9 (--acceptance)" in capsys.readouterr().out
    assert simulated(*flags, "-f", service)["speculation"]["acceptance"] == 0.6
    fewer = simulated(*flags, "-f", service, "--num-speculative-tokens", 1)
    assert fewer["speculation"]["num_speculative_tokens"] == 1
    without = simulated(*flags, "-f", service, "--num-speculative-tokens", 0)
    assert without["speculation"] is None
    assert without["tpot_milliseconds"] == plain["tpot_milliseconds"]


def test_what_a_manifest_turns_off_is_off(
    tmp_path: Path, trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    shared = tmp_path / "shared.jsonl"
    rows = [{**ROW, "prompt_tokens": 600, "at_seconds": i / 2, "hash_ids": [0, 1]} for i in range(60)]
    shared.write_text("".join(json.dumps(one) + "\n" for one in rows))
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  slo: {ttftMilliseconds: 900}\n  prefixCaching: false\n"
        "  speculative: {method: ngram, numSpeculativeTokens: 2, adaptive: false}\n"
    )
    assert simulated("--trace", shared, "--no-oracle")["cached_share"] > 0.5
    report = simulated("--trace", shared, "-f", service, "--no-oracle")
    assert report["cached_share"] == 0
    assert report["speculation"]["is_adaptive"] is False
    never = simulated("--trace", trace, "-f", service, "--no-oracle", "--acceptance", 0)
    adaptive = simulated(
        *("--trace", trace, "--no-oracle", "--slo", "ttft=900", "--acceptance", 0),
        *("--num-speculative-tokens", 2),
    )
    assert never["tpot_milliseconds"] > adaptive["tpot_milliseconds"], "guesses that never come true go on"
