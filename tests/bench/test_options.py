"""What flags become, and which do not go together."""

import pytest

from headway_bench.options import DEFAULT_REQUESTS, parse_config
from headway_bench.session import points_of


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_config(list(flags))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_plain_is_one_user_and_a_hundred_requests() -> None:
    config = parse_config([])
    assert config.load.concurrencies == (1,)
    assert config.load.extent.num_requests == DEFAULT_REQUESTS
    assert config.server.address.port == 8000


def test_a_sweep_is_one_point_for_each_value() -> None:
    points = points_of(parse_config(["--request-rate", "1", "2.5", "inf", "--num-requests", "5"]))
    assert [point.request_rate for point in points] == [1, 2.5, float("inf")]
    assert [point.number for point in points] == [0, 1, 2]


def test_a_trace_is_replayed_whole_unless_told_otherwise() -> None:
    config = parse_config(["--trace", "t.csv"])
    assert config.load.concurrencies == config.load.request_rates == ()
    assert config.load.extent.num_requests is None
    assert config.load.arrivals == "gamma"
    assert parse_config(["--trace", "t.csv", "--arrivals", "poisson"]).load.arrivals == "poisson"


def test_burstiness_alone_means_gamma() -> None:
    assert parse_config(["--request-rate", "1", "--burstiness", "0.5"]).load.arrivals == "gamma"


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("http://example.test:81/v1", ("http", "example.test", 81, "")),
        ("https://example.test/proxy/v1/", ("https", "example.test", 443, "/proxy")),
        ("http://[::1]:9", ("http", "::1", 9, "")),
    ],
)
def test_a_base_url_may_end_in_v1(url: str, want: tuple[str, str, int, str]) -> None:
    address = parse_config(["--base-url", url]).server.address
    assert (address.scheme, address.host, address.port, address.path_prefix) == want


def test_the_key_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert parse_config([]).server.headers == {"Authorization": "Bearer from-environment"}
    assert parse_config(["--api-key", "given"]).server.headers == {"Authorization": "Bearer given"}


def test_no_secret_is_in_the_reported_command() -> None:
    config = parse_config(
        ["--api-key", "s3cret", "--header=X-Key: s3cret", "--header", "Y:s3cret", "--seed", "3"]
    )
    assert "s3cret" not in config.command
    assert config.command == "headway bench --api-key '***' '--header=***' --header '***' --seed 3"
    assert config.server.headers["X-Key"] == "s3cret"


def test_objectives_are_read_however_they_are_given() -> None:
    config = parse_config(["--slo", "ttft:250", "--slo", "tpot:50", "e2e:2000"])
    assert config.report.objectives == {"ttft": 250, "tpot": 50, "e2e": 2000}


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--request-rate", "1", "--concurrency", "1"], "exclude each other"),
        (["--request-rate", "0"], "'0' is out of range; give a number above 0, or inf"),
        (["--request-rate", "inf", "--duration-seconds", "5"], "--num-requests"),
        (["--request-rate", "inf", "--num-requests", "5", "--ramp-seconds", "5"], "--ramp-seconds"),
        (["--request-rate", "1", "--arrivals", "poisson", "--burstiness", "2"], "--burstiness"),
        (["--burstiness", "2"], "--request-rate"),
        (["--concurrency", "2", "--arrivals", "gamma"], "--request-rate"),
        (["--trace", "t.csv", "--concurrency", "2", "--arrivals", "gamma"], "--request-rate"),
        (["--think-seconds", "1"], "--turns"),
        (["--save-requests"], "--json"),
        (["--num-prefixes", "2"], "--prefix-length"),
        (["--prompt-lengths", "ids"], "--endpoint=completions"),
        (["--prompt-lengths", "ids", "--endpoint", "completions", "--turns", "2"], "--turns"),
        (["--prompt-lengths", "tokenizer"], "needs --tokenizer"),
        (["--trace-speed", "2"], "--trace-speed say how to replay"),
        (["--max-input-length", "9"], "--max-input-length"),
        (["--dataset", "d.json", "--input-length", "9"], "--input-length"),
        (["--slo", "ttft"], "'ttft'"),
        (["--slo", "speed:3"], "'speed:3'"),
        (["--input-length", "uniform:0:5"], "--input-length"),
        (["--extra-body", "{"], "--extra-body"),
        (["--extra-body", "[1]"], "no JSON object"),
        (["--extra-body", '{"n": 2}'], "sets n"),
        (["--header", "nonsense"], "--header='nonsense'"),
        (["--base-url", "ftp://x"], "--base-url"),
        (["--base-url", "http://x:99999"], "--base-url"),
        (["--api-key", "a\nb: c"], "--api-key"),
        (["--confidence", "1"], "0.5 or more and less than 1"),
        (["--ramp-seconds", "5", "--trace", "t"], "--ramp-seconds"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    assert want in refused(capsys, *flags)
