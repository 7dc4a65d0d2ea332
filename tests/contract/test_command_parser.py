"""What every command says of flags that it cannot take: one line, the flag, the value and the remedy."""

import re
from pathlib import Path

import pytest

from headway import cli
from headway_bench.flags import VLLM_NAMES, build_parser

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = "bundled://headway-tiny"
POISSON = ("simulate", "--generate", "poisson")
OPERATOR = ("operator", "--runtime-image", "a", "--gateway-image", "b")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command says."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out
    assert line.startswith(f"headway {arguments[0]}: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("bench", "--seed", "x"), "--seed: 'x' is not an integer; give at least 0"),
        (("bench", "--concurrency", "0"), "--concurrency: '0' is out of range; give at least 1"),
        (("bench", "--request-rate", "often"), "'often' is not a number; give a number above 0, or inf"),
        (("bench", "--request-rate", "nan"), "'nan' is out of range"),
        (("bench", "--ramp-seconds", "x"), "--ramp-seconds: 'x' is not a number; give 0 or more"),
        (("bench", "--duration-seconds", "inf"), "'inf' is out of range; give a number above 0"),
        (("bench", "--confidence", "x"), "'x' is not a number; give 0.5 or more and less than 1"),
        (("bench", "--temperature", "nan"), "'nan' is out of range; give a finite number"),
        (("bench", "--endpoint", "x"), "invalid choice: 'x' (choose from 'chat', 'completions')"),
        (("up", "-f", "a.yaml", "--port", "x"), "--port: 'x' is not an integer; give from 0 to 65535"),
        (("up", "-f", "a.yaml", "--interval-seconds", "inf"), "give a number above 0"),
        (("up",), "the following arguments are required: -f/--file"),
        ((*POISSON, "--seed", "x"), "--seed: 'x' is not an integer; give at least 0"),
        ((*POISSON, "--factor", "0.5"), "--factor: '0.5' is out of range; give a number from 1 to 1000"),
        ((*POISSON, "--acceptance", "x"), "--acceptance: 'x' is not a number; give a number from 0 to 1"),
        ((*POISSON, "--percentile", "100"), "--percentile: '100' is out of range; give from 50 to 99"),
        (("simulate",), "one of the arguments --trace --generate is required"),
        ((*OPERATOR, "--health-port", "x"), "--health-port: 'x' is not an integer; give from 0 to 65535"),
        (("gateway", "--port", "x"), "--port: 'x' is not an integer; give from 0 to 65535"),
        (("status", "demo", "--decisions", "x"), "--decisions: 'x' is not an integer; give at least 1"),
        (
            ("eval", BUNDLED, "--max-tokens", "x"),
            "--max-tokens: 'x' is not an integer; give from 1 to 2147483647",
        ),
        (("plan", BUNDLED, "--max-model-len", "x"), "'x' is not an integer; give at least 2"),
        (("serve", BUNDLED, "--ssl-cert-reqs", "x"), "'x' is not an integer; give from 0 to 2"),
        (("serve",), "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_value_or_a_missing_one_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], want: str
) -> None:
    line = told(capsys, *arguments)
    assert want in line
    assert line.endswith(f"; see `headway {arguments[0]} --help`")


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("serve", "--quantisation", "int4"), "unknown flag --quantisation (did you mean --quantization?)"),
        (("serve", BUNDLED, "--max-model-length=8k"), "(did you mean --max-model-len?)"),
        (("eval", BUNDLED, "--baseline-quantisation", "int4"), "(did you mean --baseline-quantization?)"),
        (("plan", BUNDLED, "--conext", "9"), "(did you mean --context?)"),
        (("plan", BUNDLED, "--trace", "a.csv", "--start-second", "9"), "(did you mean --start-seconds?)"),
        (("plan", BUNDLED, "--price-per", "2.5"), "--price-per (did you mean --price-per-gpu-hour?)"),
        (("fetch", BUNDLED, "--downlod-dir", "a"), "(did you mean --download-dir?)"),
        (
            ("bench", "--num-request", "9", "--zzz"),
            "flags --num-request (did you mean --num-requests?), --zzz;",
        ),
        (("simulate", "--generat", "poisson"), "(did you mean --generate?)"),
        (("up", "--fil", "a.yaml"), "(did you mean --file?)"),
        (("operator", "--namespaces", "a"), "(did you mean --namespace?)"),
        (("gateway", "--backend-file", "a"), "(did you mean --backends-file?)"),
        (("status", "demo", "--decision", "1"), "(did you mean --decisions?)"),
        (("crds", "--chek"), "(did you mean --check?)"),
    ],
)
def test_a_near_miss_is_told_what_it_may_have_meant(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], want: str
) -> None:
    assert want in told(capsys, *arguments)


def test_a_value_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither what has a blank in it, as argparse reads it, nor what stands behind --."""
    assert "unrecognized arguments: --not a flag" in told(capsys, "bench", "--not a flag")
    assert "unrecognized arguments: -- --file" in told(capsys, "bench", "--", "--file")


def test_names_of_vllms_benchmark_are_told_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, "bench", "--max-concurrency", "4", "--num-prompts=10")
    assert (
        "unknown flags --max-concurrency (here --concurrency), --num-prompts (here --num-requests);" in line
    )


def test_the_documents_table_of_vllms_names_is_the_commands() -> None:
    page = (ROOT / "docs" / "bench.md").read_text()
    shown = dict(re.findall(r"^\| `(--[a-z-]+)` \| `(--[a-z-]+)` \|$", page, re.MULTILINE))
    assert shown == VLLM_NAMES
    known = set(build_parser()._option_string_actions)
    assert set(VLLM_NAMES.values()) <= known
    assert not known & VLLM_NAMES.keys()
