"""What `headway simulate` refuses: values that no service has, and loads that would never end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.conftest import ROW

from headway_simulator.flags import build_parser
from headway_simulator.options import load_of, setting_of
from headway_simulator.simulate_command import main


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--rate-scale", "1e9"], "--rate-scale=1e+09: 2.4e+11 requests are more than 10,000,000; lower"),
        (["--end-seconds", "1e-300"], "the load lasts 1e-300 s, less than 0.001; take more of it"),
        (["--interval-seconds", "1e-300"], "or raise --interval-seconds=1e-300"),
        (["--initial-replicas", "3", "--most-pods", "2"], "--initial-replicas=3 is more than --most-pods=2"),
        (["--json", "."], "--json='.' is a folder; name a file in it"),
    ],
)
def test_what_would_never_end_or_mean_nothing_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    assert main(["--trace", str(trace), "--no-oracle", *flags]) == 2
    assert want in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "want"),
    [
        ("--step-time-error", "1e300", "give a number from 0.01 to 100"),
        ("--step-time-error", "1e-300", "give a number from 0.01 to 100"),
        ("--initial-replicas", "1000000", "give from 1 to 1000"),
        ("--max-replicas", "1001", "give from 1 to 1000"),
        ("--slo-factor", "1e300", "give a number from 1 to 1000"),
        ("--variation", "1e-200", "give a number from 0.01 to 100"),
        ("--ttft-milliseconds", "600001", "give from 1 to 600000"),
        ("--num-speculative-tokens", "17", "give from 0 to 16"),
    ],
)
def test_what_no_service_has_is_out_of_a_flags_range(
    trace: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, want: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trace", str(trace), flag, value])
    assert ended.value.code == 2
    assert f"{flag}: {value!r} is out of range; {want}" in capsys.readouterr().err


def test_a_load_of_ages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ages.jsonl"
    path.write_text("".join(json.dumps({**ROW, "at_seconds": at}) + "\n" for at in (0, 1e300)))
    assert main(["--trace", str(path)]) == 2
    want = "4e+299 passes of the controller, more than 12,096,000; take a part of it by --end-seconds"
    assert want in capsys.readouterr().err
    assert main(["--generate", "poisson", "--duration-seconds", "1e300"]) == 2
    assert "--duration-seconds=1e+300 is more than 1e+07; choose less" in capsys.readouterr().err
    assert main(["--generate", "poisson", "--rate", "1e300"]) == 2
    assert "requests are more than 10,000,000; lower the rate" in capsys.readouterr().err


def test_nodes_have_room_for_so_many_from_the_beginning_on(
    trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    report = simulated("--trace", trace, "--no-oracle", "--min-replicas", 4, "--most-pods", 2)
    assert report["most_replicas"] == 2


def test_a_manifest_without_a_promise_takes_that_of_the_flags(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(
        "apiVersion: serving.headway.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: demo}\n"
        "spec: {model: {source: /model}, slo: null}\n"
    )
    report = simulated("--trace", trace, "-f", service, "--slo", "ttft=700", "--no-oracle")
    assert report["targets"] == {"ttft_milliseconds": 700.0, "tpot_milliseconds": None}


def test_a_cache_holds_whole_blocks_and_no_more_than_there_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "one.jsonl", tmp_path / "model.json"
    path.write_text(json.dumps(ROW))
    step = {"name": "x", "base_milliseconds": 1, "prefill_token_milliseconds": 0, "decode_milliseconds": 0}
    model.write_text(json.dumps({**step, "kv_cache_tokens": 350}))
    assert main(["--trace", str(path), "--step-model", str(model)]) == 2
    assert "has 341 tokens, and the KV cache of step model 'x' holds 336" in capsys.readouterr().err
    model.write_text(json.dumps({**step, "kv_cache_tokens": 10**20}))
    assert main(["--trace", str(path), "--step-model", str(model)]) == 2
    assert "is no whole number from 1 to 1e+08; correct it" in capsys.readouterr().err


def test_a_factor_whose_target_is_beyond_its_range_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "one.jsonl", tmp_path / "model.json"
    path.write_text(json.dumps(ROW))
    step = {"name": "x", "prefill_token_milliseconds": 0, "decode_milliseconds": 0}
    model.write_text(json.dumps({**step, "base_milliseconds": 700, "kv_cache_tokens": 400}))
    assert main(["--trace", str(path), "--step-model", str(model), "--slo-factor", "900"]) == 2
    want = "--slo-factor=900 makes a target of 630000 ms, more than 600000; lower it, or give --ttft"
    assert want in capsys.readouterr().err


def test_a_load_begins_with_what_must_do_until_others_can_come() -> None:
    """It is four times as high after 80 s, which a start of ten seconds is there for and one of 60 is not."""

    def initial(seconds: int) -> int:
        flags = ["--generate", "step", "--rate", "20", "--factor", "4", "--duration-seconds", "240"]
        options = build_parser().parse_args([*flags, "--cold-start-seconds", str(seconds)])
        return setting_of(options, load_of(options)).conditions.initial_replicas

    assert initial(60) > 1.3 * initial(10) >= 2
