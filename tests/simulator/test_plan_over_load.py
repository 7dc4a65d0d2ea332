"""`headway plan --trace` as users run it: what each lever comes to over a load."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulator.conftest import MODEL

from headway_runtime.fit.gpu_kinds import GPU_KINDS
from headway_runtime.fit.plan_command import main
from headway_simulator import plan_over_load
from headway_simulator.cluster import Simulation
from headway_simulator.levers import levers
from headway_simulator.plan_over_load import Cost, best_of

WEIGHTS = 8_030_261_248 - 525_336_576  # all but the embedding, a row of which is read
KV_BYTES = 131_072


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
    minute: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(MODEL), "--gpu", "t4", "--max-model-len", "4096", "--trace", str(minute)]
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


def test_a_draft_takes_its_time_for_each_guess(plan: Callable[..., dict[str, Any]]) -> None:
    config = json.dumps({"model": str(MODEL), "num_speculative_tokens": 2})
    found = plan("--speculative-config", config, "--efficiency", "0.5")["load"]["levers"]
    models = [one["step_model"] for one in found if one["step_model"]]
    # A draft as large as the model takes as long; it is whole on one GPU, however many the model is on.
    base = models[0]["base_milliseconds"]
    assert [one["draft_milliseconds"] for one in models] == [pytest.approx(base)] * len(models)


def test_without_a_model_and_a_manifest_there_is_no_plan(
    minute: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--gpu", "h100-80g", "--trace", str(minute)]) == 2
    assert "MODEL: a plan is of a model; give one, or a manifest with -f FILE" in capsys.readouterr().err


def test_a_measured_step_model_is_of_the_gpus_of_the_plan(
    minute: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [str(MODEL), "--max-model-len", "8192", "--trace", str(minute)]
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
    minute: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "8192", "--trace", str(minute)]

    def fails(error: BaseException) -> int:
        def result(simulation: Simulation[Any]) -> Any:
            raise error

        monkeypatch.setattr(Simulation, "result", result)
        return main(flags)

    assert fails(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""
    assert fails(ZeroDivisionError("no steps")) == 2
    assert "headway plan: broke off: ZeroDivisionError: no steps" in capsys.readouterr().err


def test_the_table_names_what_does_not_fit(minute: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "l4", "--max-model-len", "32768", "--trace", str(minute), "--price-per-gpu-hour", "1"]
    assert main([str(MODEL), *flags]) in (0, 1)
    shown = capsys.readouterr().out
    assert "over minute.jsonl: 60 requests in 60 s, P95 TTFT" in shown
    assert "a day is taken to be this load's mean hour, 24 times: it is of no whole days" in shown
    assert "--quantization int4" in shown
    assert "USD a day" in shown


def test_a_load_of_hours_names_its_busiest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = tmp_path / "hours.jsonl"
    row = {"prompt_tokens": 500, "output_tokens": 20}
    hours.write_text("".join(json.dumps({**row, "at_seconds": at}) + "\n" for at in (0, 4000, 4100, 4500)))
    monkeypatch.setattr(plan_over_load, "levers", lambda *given: itertools.islice(levers(*given), 1))
    flags = [str(MODEL), "--gpu", "h100-80g", "--max-model-len", "4096", "--trace", str(hours)]
    flags += ["--interval-seconds", "60", "--slo", "ttft=900"]
    assert main([*flags, "--json"]) == 0
    (plain,) = json.loads(capsys.readouterr().out)["load"]["levers"]
    assert [(one["at_seconds"], one["replicas"]) for one in plain["hours"]] == [(0.0, 1.0), (3600.0, 1.0)]
    assert [one["joint_attainment"] for one in plain["hours"]] == [1.0, 1.0]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "over hours.jsonl: 4 requests in 100 minutes, P95 TTFT 900 ms, TPOT" in shown
    assert "as it is, most replicas in hour 1 of 2: 1.0 on average, for 0.00 requests/s" in shown


def test_a_target_is_a_millisecond_at_least(minute: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three times what a token of the bundled model takes on such a GPU is next to nothing."""
    assert main(["bundled://headway-tiny", "--gpu", "l4", "--trace", str(minute), "--json"]) == 0
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
        (["--gpu", "h100-80g", "--max-num-seqs", "5000"], "the flags: --max-num-seqs: Input should be less"),
        (
            ["--gpu", "h100-80g", "--step-model", "llama-3.1-8b-a100-tp2", "--efficiency", "0.5"],
            "--efficiency=0.5 does nothing beside --step-model without --price-per-gpu-hour",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    minute: Path, capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    assert main([str(MODEL), "--max-model-len", "8192", "--trace", str(minute), *flags]) == 2
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
