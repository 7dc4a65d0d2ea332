"""`headway plan --trace` as users run it: what each lever comes to over a load."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway_runtime.fit.gpu_kinds import GPU_KINDS
from headway_runtime.fit.plan_command import main
from headway_simulator.cluster import Simulation
from headway_simulator.plan_over_load import Cost, best_of

MODEL = Path(__file__).parents[1] / "fit" / "fixtures" / "llama-3.1-8b"
WEIGHTS = 8_030_261_248 - 525_336_576  # all but the embedding, a row of which is read
KV_BYTES = 131_072


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A minute, a request each second."""
    path = tmp_path / "trace.jsonl"
    row = {"prompt_tokens": 500, "output_tokens": 20}
    path.write_text("".join(json.dumps({**row, "at_seconds": i}) + "\n" for i in range(60)))
    return path


@pytest.fixture
def plan(trace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*flags: str) -> dict[str, Any]:
        fixed = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "8192", "--trace", str(trace)]
        status = main([*fixed, *flags, "--json"])
        assert status == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_each_lever_changes_the_step_model_by_its_bytes_and_arithmetic(
    plan: Callable[..., dict[str, Any]],
) -> None:
    found = plan("--price-per-gpu-hour", "3", "--efficiency", "0.5")
    levers = {one["flags"].partition("'")[0].strip(): one for one in found["load"]["levers"]}
    assert list(levers) == [
        *("as it is", "--quantization fp8", "--quantization int8", "--quantization int4"),
        *("--kv-cache-dtype fp8", "--tensor-parallel-size 2", "--speculative-config"),
    ]
    models = {name: one["step_model"] for name, one in levers.items()}
    plain, kind = models["as it is"], GPU_KINDS["h100-80g"]
    assert plain["base_milliseconds"] == pytest.approx(
        2 * WEIGHTS / kind.bytes_per_second / 0.5 * 1000, rel=0.001
    )
    assert plain["decode_context_milliseconds"] == pytest.approx(
        KV_BYTES / kind.bytes_per_second / 0.5 * 1000
    )
    # Of 8-bit weights the embedding alone stays as it is, and is not read; fp8 multiplies twice as fast.
    fp8 = models["--quantization fp8"]
    assert fp8["base_milliseconds"] / plain["base_milliseconds"] == pytest.approx(0.5, abs=0.01)
    assert fp8["prefill_token_milliseconds"] == pytest.approx(plain["prefill_token_milliseconds"] / 2)
    int4 = models["--quantization int4"]
    assert 0.25 < int4["base_milliseconds"] / plain["base_milliseconds"] < 0.33
    assert int4["prefill_token_milliseconds"] == pytest.approx(plain["prefill_token_milliseconds"])
    kv = models["--kv-cache-dtype fp8"]
    assert kv["decode_context_milliseconds"] / plain["decode_context_milliseconds"] == pytest.approx(
        0.5, abs=0.02
    )
    assert kv["base_milliseconds"] == plain["base_milliseconds"]
    two = models["--tensor-parallel-size 2"]
    assert two["gpus"] == 2
    assert two["decode_milliseconds"] == pytest.approx(plain["decode_milliseconds"] / 2, rel=0.01)


def test_costs_are_of_the_simulated_replicas_over_a_day(plan: Callable[..., dict[str, Any]]) -> None:
    load = plan("--price", "3")["load"]
    assert load["duration_seconds"] == pytest.approx(60.0)
    assert load["objective"] == 0.95
    plain = load["levers"][0]
    assert plain["measures"]["joint_attainment"] >= 0.95
    # One replica of one GPU, around the clock.
    assert plain["gpu_hours_per_day"] == pytest.approx(24.0)
    assert plain["usd_per_day"] == pytest.approx(72.0)
    assert load["cheapest"] == "as it is"


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
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n  quantization: fp8\n"
        "  tensorParallelSize: 2\n  kvCacheDtype: fp8\n  slo: {ttftMilliseconds: 900, percentile: 90}\n"
    )
    load = ["--gpu", "h100-80g", "--trace", str(trace), "--price", "3"]

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


def test_a_service_that_guesses_is_planned_with_its_guesses(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n  slo: {{ttftMilliseconds: 900}}\n"
    )
    where = ["--gpu", "h100-80g", "--trace", str(trace), "--acceptance", "0.9", "--json"]

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
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    manifest = (
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(trace)]
    service.write_text(manifest)
    assert main(where) == 2
    assert "set slo.ttftMilliseconds" in capsys.readouterr().err
    assert main([*where, "--slo", "ttft=800"]) == 0
    assert "P95 TTFT 800 ms; simulated" in capsys.readouterr().out
    service.write_text(f"{manifest}  replicas: 0\n")
    assert main([*where, "--slo", "ttft=800"]) == 0
    assert "none of these attains the objective" in capsys.readouterr().out


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
    assert ttft("-f", str(service), "--max-num-batched-tokens", "64") > 1.3 * of_manifest
    alone = [str(MODEL), "--max-model-len", "8192", "--max-replicas", "1"]
    assert ttft(*alone, "--max-num-seqs", "2", "--max-num-batched-tokens", "8") > 2 * ttft(*alone)


def test_fields_of_a_manifest_that_are_not_simulated_are_named(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 8192}}\n  kvCacheMemory: 4Gi\n"
        "  quantization: fp8\n  slo: {ttftMilliseconds: 900, endToEndMilliseconds: 9000}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(trace)]
    assert main([*where, "--json"]) == 0
    want = ["slo.endToEndMilliseconds", "kvCacheMemory"]
    assert json.loads(capsys.readouterr().out)["load"]["not_simulated"] == want
    assert main(where) == 0
    assert "not simulated: slo.endToEndMilliseconds, kvCacheMemory of the manifest" in capsys.readouterr().out


def test_what_the_context_has_no_room_for_is_rejected_or_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.jsonl"
    sizes = [(500, 20)] * 6 + [(1000, 100)] * 2 + [(1024, 1)] * 2
    mixed.write_text(
        "".join(
            json.dumps({"at_seconds": i, "prompt_tokens": prompt, "output_tokens": output}) + "\n"
            for i, (prompt, output) in enumerate(sizes)
        )
    )
    where = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "1024", "--trace", str(mixed)]
    assert main([*where, "--json"]) == 0
    load = json.loads(capsys.readouterr().out)["load"]
    assert (load["max_model_len"], load["num_too_long"], load["num_cut_short"]) == (1024, 2, 2)
    assert [one["measures"]["num_rejected"] for one in load["levers"]] == [2] * len(load["levers"])
    assert load["levers"][0]["measures"]["joint_attainment"] == pytest.approx(0.8)
    assert main(where) == 0
    assert "context of 1024 tokens: 2 requests rejected" in capsys.readouterr().out


def test_a_service_that_fits_with_a_lever_only_has_a_row_that_says_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(MODEL), "--gpu", "t4", "--max-model-len", "4096", "--trace", str(trace)]
    assert main([*flags, "--json"]) == 1
    levers = {
        one["flags"].partition("'")[0].strip(): one
        for one in json.loads(capsys.readouterr().out)["load"]["levers"]
    }
    assert levers["as it is"]["why_not"] == "does not fit the GPU"
    assert levers["--quantization int8"]["why_not"] == ""
    assert levers["--quantization int8"]["step_model"]["kv_cache_tokens"] > 4096
    assert main(flags) == 1
    assert "as it is" in capsys.readouterr().out


def test_flags_bring_the_targets_that_a_manifest_lacks(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec: {{model: {{source: 'file://{MODEL}', maxModelLen: 8192}}}}\n"
    )
    where = ["-f", str(service), "--gpu", "h100-80g", "--trace", str(trace), "--json"]
    assert main([*where, "--slo", "ttft=800"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["targets"]["ttft_milliseconds"] == 800
    assert main([*where, "--slo-factor", "3"]) == 0
    assert None not in json.loads(capsys.readouterr().out)["load"]["targets"].values()
    assert main(where) == 2
    assert "or give --slo ttft=500,tpot=50 or --slo-factor 3" in capsys.readouterr().err


def test_a_draft_takes_its_time_for_each_guess(plan: Callable[..., dict[str, Any]]) -> None:
    config = json.dumps({"model": str(MODEL), "num_speculative_tokens": 2})
    found = plan("--speculative-config", config, "--efficiency", "0.5")["load"]["levers"]
    models = [one["step_model"] for one in found if one["step_model"]]
    # A draft as large as the model takes as long; it is whole on one GPU, however many the model is on.
    base = models[0]["base_milliseconds"]
    assert [one["draft_milliseconds"] for one in models] == [pytest.approx(base)] * len(models)


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
    fields: str, num_listed: int, want: int, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tmp_path / "service.yaml"
    listed = ", ".join(f"{{name: a{number}, source: /adapters/a{number}}}" for number in range(num_listed))
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        f"spec:\n  model: {{source: 'file://{MODEL}', maxModelLen: 4096}}\n"
        f"  lora: {{{fields}maxLoraRank: 32, adapters: [{listed}]}}\n  slo: {{ttftMilliseconds: 900}}\n"
    )
    where = ["--gpu", "h100-80g", "--trace", str(trace), "--json"]

    def adapter_bytes(*flags: str) -> int:
        assert main([*flags, *where]) == 0
        return int(json.loads(capsys.readouterr().out)["adapter_bytes"])

    told = ("--enable-lora", "--max-lora-rank", "32", "--max-model-len", "4096")
    one = adapter_bytes(str(MODEL), *told, "--max-loras", "1", "--max-cpu-loras", "1")
    assert adapter_bytes("-f", str(service)) == want * one


def test_without_a_model_and_a_manifest_there_is_no_plan(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--gpu", "h100-80g", "--trace", str(trace)]) == 2
    assert "MODEL: a plan is of a model; give one, or a manifest with -f FILE" in capsys.readouterr().err


def test_a_measured_step_model_is_of_the_gpus_of_the_plan(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [str(MODEL), "--max-model-len", "8192", "--trace", str(trace)]
    measured = ["--step-model", "llama-3.1-8b-a100-tp2"]
    assert main([*where, *measured, "--gpu", "a100-80g"]) == 2
    told = capsys.readouterr().err
    assert "measured with gpus=2 a replica, and the plan is of --tensor-parallel-size=1" in told
    two = ["--tensor-parallel-size", "2"]
    assert main([*where, *measured, *two, "--gpu", "h100-80g"]) == 2
    assert "measured with gpu='a100-80g', and the plan is of --gpu='h100-80g'" in capsys.readouterr().err
    assert main([*where, *measured, *two, "--gpu", "a100-80g", "--json"]) == 0
    levers = json.loads(capsys.readouterr().out)["load"]["levers"]
    gpus = {one["flags"]: one["step_model"]["gpus"] for one in levers}
    assert gpus["as it is"] == 2
    assert gpus["--tensor-parallel-size 4"] == 4


def test_a_made_up_load_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    where = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "16384"]
    load = ["--generate", "poisson", "--rate", "1", "--duration-seconds", "60"]
    assert main([*where, *load, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["trace"] == "poisson 1/s"
    assert main([str(MODEL), "--generate=poisson"]) == 2
    assert "--generate: how long steps take" in capsys.readouterr().err


def test_what_ends_a_plan_is_told_in_a_line(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "8192", "--trace", str(trace)]

    def fails(error: BaseException) -> int:
        def result(simulation: Simulation[Any]) -> Any:
            raise error

        monkeypatch.setattr(Simulation, "result", result)
        return main(flags)

    assert fails(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""
    assert fails(ZeroDivisionError("no steps")) == 2
    assert "headway plan: broke off: ZeroDivisionError: no steps" in capsys.readouterr().err


def test_the_table_names_what_does_not_fit(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "l4", "--max-model-len", "32768", "--trace", str(trace), "--price-per-gpu-hour", "1"]
    assert main([str(MODEL), *flags]) in (0, 1)
    shown = capsys.readouterr().out
    assert "over trace.jsonl: 60 requests" in shown
    assert "--quantization int4" in shown
    assert "USD a day" in shown


def test_a_target_is_a_millisecond_at_least(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three times what a token of the bundled model takes on such a GPU is next to nothing."""
    assert main(["bundled://headway-tiny", "--gpu", "l4", "--trace", str(trace), "--json"]) == 0
    targets = json.loads(capsys.readouterr().out)["load"]["targets"]
    assert targets["tpot_milliseconds"] == 1
    assert targets["ttft_milliseconds"] >= 1


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ([], "--trace: how long steps take hangs on the kind of GPU; give --gpu"),
        (
            ["--gpu", "h100-80g", "--acceptance", "2"],
            "--acceptance: '2' is out of range; give a number from 0 to 1",
        ),
        (["--gpu", "h100-80g", "--step-model", "none"], "step model 'none' is neither"),
        (["--gpu", "h100-80g", "--rate", "3"], "--rate=3.0 is of --generate and of CSVs of rates"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    assert main([str(MODEL), "--max-model-len", "8192", "--trace", str(trace), *flags]) == 2
    assert want in capsys.readouterr().err


def test_the_cheapest_is_of_those_that_attain_the_objective(build: Any) -> None:
    assert best_of([Cost("as it is", "does not fit the GPU")], None) == []  # type: ignore[arg-type]


def test_levers_that_cost_the_same_are_all_told() -> None:
    target: Any = SimpleNamespace(percentile=95)
    kept, missed = (SimpleNamespace(joint_attainment=share) for share in (0.99, 0.5))

    def cost(flags: str, measures: Any, hours: float) -> Cost:
        return Cost(flags, "", None, measures, hours, None)

    costs = [
        cost("as it is", kept, 44.0),
        cost("--quantization fp8", kept, 24.0),
        cost("--quantization int4", missed, 20.0),
        cost("--kv-cache-dtype fp8", kept, 24.000000000000001),
    ]
    assert [one.flags for one in best_of(costs, target)] == ["--quantization fp8", "--kv-cache-dtype fp8"]
