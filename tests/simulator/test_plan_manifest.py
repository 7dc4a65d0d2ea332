"""What `headway plan --trace -f` takes of a manifest, and what flags change of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.conftest import MODEL

from headway_runtime.fit.plan_command import main


def test_a_manifest_brings_its_promise_and_a_measured_step_model_its_speed(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec:\n  model: {source: /model}\n  slo: {ttftMilliseconds: 900, percentile: 90}\n"
    )
    measured = tmp_path / "measured.json"
    numbers = {"base_milliseconds": 8.3, "prefill_token_milliseconds": 0.05, "decode_milliseconds": 0.25}
    measured.write_text(json.dumps({"name": "own", "kv_cache_tokens": 90_000, **numbers}))
    load = plan("--service", str(service), "--step-model", str(measured))["load"]
    assert load["objective"] == 0.9
    assert load["targets"] == {"ttft_milliseconds": 900.0, "tpot_milliseconds": None}
    plain, *others = load["levers"]
    assert plain["step_model"]["base_milliseconds"] == 8.3
    assert plain["usd_per_day"] is None
    fp8 = next(one for one in others if one["flags"] == "--quantization fp8")
    assert fp8["step_model"]["base_milliseconds"] == pytest.approx(4.15, abs=0.1)


def test_a_manifest_brings_its_model_and_replicas_too(
    minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n  quantization: fp8\n"
        "  tensorParallelSize: 2\n  kvCacheDtype: fp8\n  slo: {ttftMilliseconds: 900, percentile: 90}\n"
    )
    load = ["--gpu", "h100-80g", "--trace", str(minute), "--price", "3"]

    def planned(*flags: str) -> dict[str, Any]:
        assert main(["-f", str(service), *load, *flags, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = planned("--slo", "ttft=800")
    assert found["load"]["targets"] == {"ttft_milliseconds": 800.0, "tpot_milliseconds": None}
    levers = [one["flags"].split("'")[0].strip() for one in found["load"]["levers"]]
    # What the manifest pulls already is no lever.
    assert "--quantization fp8" not in levers
    assert "--kv-cache-dtype fp8" not in levers
    assert "--tensor-parallel-size 4" in levers
    assert found["load"]["levers"][0]["step_model"]["gpus"] == 2
    # Flags go before the manifest.
    assert planned("--tensor-parallel-size", "1")["load"]["levers"][0]["step_model"]["gpus"] == 1
    # Another model is served as the manifest has it.
    other = planned(str(MODEL))["load"]["levers"]
    assert [one["flags"] for one in other] == [one["flags"] for one in found["load"]["levers"]]
    assert other[0]["step_model"] == found["load"]["levers"][0]["step_model"]


def test_a_service_that_guesses_is_planned_with_its_guesses(
    minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n  slo: {{ttftMilliseconds: 900}}\n"
    )
    where = ["--gpu", "h100-80g", "--trace", str(minute), "--acceptance", "0.9", "--json"]

    def tpots(spec: str, *flags: str) -> dict[str, float]:
        service.write_text(manifest + spec)
        assert main(["-f", str(service), *where, *flags]) == 0
        levers = json.loads(capsys.readouterr().out)["load"]["levers"]
        return {
            one["flags"].partition("'")[0].strip(): one["measures"]["tpot_milliseconds"] for one in levers
        }

    plain = tpots("")
    guessing = tpots("  speculative: {method: ngram, numSpeculativeTokens: 3}\n")
    assert guessing["as it is"] == plain["--speculative-config"]
    assert guessing.keys() == plain.keys() - {"--speculative-config"}
    assert all(guessing[name] < 0.7 * plain[name] for name in guessing), "each lever keeps the guesses"
    one = '{"method": "ngram", "num_speculative_tokens": 1}'
    fewer = tpots("  speculative: {method: ngram}\n", "--speculative-config", one)
    assert guessing["as it is"] < fewer["as it is"] < plain["as it is"], "a flag goes before the manifest"


def test_a_manifest_without_replicas_or_promise_is_planned_with_the_flags(
    minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(minute)]
    service.write_text(manifest)
    assert main(where) == 2
    assert "set slo.ttftMilliseconds" in capsys.readouterr().err
    assert main([*where, "--slo", "ttft=800"]) == 0
    assert "P95 TTFT 800 ms; simulated" in capsys.readouterr().out
    service.write_text(f"{manifest}  replicas: 0\n")
    assert main([*where, "--slo", "ttft=800"]) == 0
    shown = capsys.readouterr().out
    assert "none of these attains the objective" in shown
    assert "spec.replicas=0 stays with every lever" in shown
    service.write_text(f"{manifest}  replicas: 1\n")
    assert main([*where, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "nothing promised; simulated" in shown
    assert "attain the objective: as it is, " in shown
    service.write_text(f"{manifest}  suspend: true\n")
    assert main([*where, "--slo", "ttft=800"]) == 2
    assert "spec.suspend=true: nothing would be served; leave it out" in capsys.readouterr().err


def test_replicas_have_the_limits_of_the_flags_or_else_of_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thirty answers of 200 tokens at once: with few in a step they wait for each other."""
    crowd = tmp_path / "crowd.jsonl"
    row = {"prompt_tokens": 500, "output_tokens": 200}
    crowd.write_text("".join(json.dumps({**row, "at_seconds": i / 100}) + "\n" for i in range(30)))
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 8192}}\n  replicas: 1\n"
        "  slo: {ttftMilliseconds: 900}\n"
        "  batching: {maxNumSeqs: {min: 8, initial: 16, max: 32}, maxNumBatchedTokens: {max: 1024}}\n"
    )
    where = ["--gpu", "h100-80g", "--trace", str(crowd), "--json"]

    def ttft(*flags: str) -> float:
        assert main([*flags, *where]) == 0
        as_it_is = json.loads(capsys.readouterr().out)["load"]["levers"][0]
        return float(as_it_is["measures"]["ttft_milliseconds"])

    of_manifest = ttft("-f", str(service))
    assert ttft("-f", str(service), "--max-num-seqs", "4") > 2 * of_manifest
    assert ttft("-f", str(service), "--max-num-batched-tokens", "32") > 1.3 * of_manifest
    alone = [str(MODEL), "--max-model-len", "8192", "--max-replicas", "1"]
    assert ttft(*alone, "--max-num-seqs", "2", "--max-num-batched-tokens", "8") > 2 * ttft(*alone)


def test_fields_of_a_manifest_that_are_not_simulated_are_named(
    minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 8192}}\n  kvCacheMemory: 4Gi\n"
        "  quantization: fp8\n  slo: {ttftMilliseconds: 900, endToEndMilliseconds: 9000}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(minute)]
    assert main([*where, "--json"]) == 0
    want = ["slo.endToEndMilliseconds", "kvCacheMemory"]
    assert json.loads(capsys.readouterr().out)["load"]["not_simulated"] == want
    assert main(where) == 0
    assert "not simulated: slo.endToEndMilliseconds, kvCacheMemory of the manifest" in capsys.readouterr().out


def test_flags_bring_the_targets_that_a_manifest_lacks(
    minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec: {{model: {{source: 'file://{MODEL}', maxModelLen: 8192}}}}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(minute), "--json"]
    assert main([*where, "--slo", "ttft=800"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["targets"]["ttft_milliseconds"] == 800
    assert main([*where, "--slo-factor", "3"]) == 0
    assert None not in json.loads(capsys.readouterr().out)["load"]["targets"].values()
    assert main(where) == 2
    assert "or give --slo ttft=500,tpot=50 or --slo-factor 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "num_listed", "want"),
    [
        ("", 0, 8),
        ("", 3, 8),
        ("", 12, 12),
        ("maxLoras: 4, ", 3, 4),
        ("maxLoras: 4, ", 6, 6),
        ("maxCpuLoras: 20, ", 12, 20),
    ],
)
def test_a_manifests_adapters_take_the_room_that_its_replicas_keep_for_them(
    fields: str, num_listed: int, want: int, minute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    listed = ", ".join(f"{{name: a{number}, source: /adapters/a{number}}}" for number in range(num_listed))
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n"
        f"  lora: {{{fields}maxLoraRank: 32, adapters: [{listed}]}}\n  slo: {{ttftMilliseconds: 900}}\n"
    )
    where = ["--gpu", "h100-80g", "--trace", str(minute), "--json"]

    def adapter_bytes(*flags: str) -> int:
        assert main([*flags, *where]) == 0
        return int(json.loads(capsys.readouterr().out)["adapter_bytes"])

    told = ("--enable-lora", "--max-lora-rank", "32", "--max-model-len", "4096")
    one = adapter_bytes(str(MODEL), *told, "--max-loras", "1", "--max-cpu-loras", "1")
    assert adapter_bytes("-f", str(service)) == want * one
