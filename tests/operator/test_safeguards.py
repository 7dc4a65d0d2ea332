"""What stands around a service's pods: each kind against golden YAML, when it is there, and for whom.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_safeguards.py, then read the diff.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import names
from headway_operator.commands.operator import _parser
from headway_operator.manifests import render
from headway_operator.manifests.prometheus_rule import BURNS, RUNBOOK_SECTION, missed_share
from headway_operator.spec import parse
from headway_operator.state import ChildKey, Manifest, Rendered

GOLDEN = Path(__file__).parent / "golden"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
KINDS = ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "PrometheusRule")
EVERYTHING = {
    "operator_namespace": "headway-system",
    "monitoring_namespace": "monitoring",
    "optional_kinds": frozenset(names.MONITORING_KINDS),
}
SPEC = {
    "model": {"source": "hf://org/name"},
    "slo": {"ttftMilliseconds": 300, "tpotMilliseconds": 40},
    "scaling": {"minReplicas": 2, "maxReplicas": 4},
    "monitoring": {"labels": {"release": "stack"}, "scrapeIntervalSeconds": 30},
}


def rendered(build: Any, spec: dict[str, Any], status: dict[str, Any] | None = None, **site: Any) -> Rendered:
    service = parse({**build.manifest(spec), "status": status or {}})
    return render(service, build.site(**{**EVERYTHING, **site}), "a public key", frozenset())


def safeguards(result: Rendered) -> dict[str, Manifest]:
    return {manifest["kind"]: manifest for manifest in result.manifests if manifest["kind"] in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_the_golden_one(build: Any, kind: str) -> None:
    manifest = safeguards(rendered(build, SPEC))[kind]
    path = GOLDEN / f"{kind}.yaml"
    got = yaml.safe_dump(manifest, sort_keys=True)
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        path.write_text(got)
    assert yaml.safe_load(got) == yaml.safe_load(path.read_text())


def test_they_are_owned_labelled_and_kept(build: Any) -> None:
    result = rendered(build, SPEC)
    for kind, manifest in safeguards(result).items():
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == "0000-uid"
        assert names.service_labels("demo").items() <= manifest["metadata"]["labels"].items()
        assert ChildKey(kind, "demo") in result.keep


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"networkPolicy": {"enabled": False}}, {"NetworkPolicy"}),
        ({"disruptionBudget": {"enabled": False}}, {"PodDisruptionBudget"}),
        ({"monitoring": {"enabled": False}}, {"PodMonitor", "PrometheusRule"}),
        ({"slo": None, "replicas": 2}, {"PrometheusRule"}),
    ],
    ids=["no policy", "no budget", "no monitoring", "no promise to alert on"],
)
def test_what_is_switched_off_is_left_to_be_pruned(
    build: Any, change: dict[str, Any], missing: set[str]
) -> None:
    result = rendered(build, SPEC | change)
    assert set(KINDS) - set(safeguards(result)) == missing
    assert not {child.kind for child in result.keep} & missing


@pytest.mark.parametrize(
    ("site", "missing"),
    [
        ({"optional_kinds": frozenset()}, {"PodMonitor", "PrometheusRule"}),
        ({"optional_kinds": frozenset(("PodMonitor",))}, {"PrometheusRule"}),
        ({"operator_namespace": ""}, {"NetworkPolicy"}),
        ({"kind": "local"}, set(KINDS)),
    ],
    ids=["no Prometheus operator", "half of it", "an operator outside", "one machine"],
)
def test_what_the_cluster_cannot_have_is_left_out(
    build: Any, site: dict[str, Any], missing: set[str]
) -> None:
    assert set(KINDS) - set(safeguards(rendered(build, SPEC, **site))) == missing


def test_switches_never_make_a_new_revision(build: Any) -> None:
    off = {name: {"enabled": False} for name in ("networkPolicy", "disruptionBudget", "monitoring")}
    assert rendered(build, SPEC | off).revision == rendered(build, SPEC).revision


@pytest.mark.parametrize(
    ("spec", "status", "want"),
    [
        ({"replicas": 1}, {"desiredReplicas": 4}, 0),
        ({"replicas": 2}, {}, 1),
        ({"replicas": 0}, {}, 0),
        ({}, {}, 0),
        ({}, {"desiredReplicas": 2}, 1),
        ({}, {"desiredReplicas": 1}, 0),
        ({"scaling": {"minReplicas": 2}}, {"desiredReplicas": 1}, 1),
    ],
)
def test_a_single_replica_has_no_budget(
    build: Any, spec: dict[str, Any], status: dict[str, Any], want: int
) -> None:
    assert len(safeguards(rendered(build, spec, status)).keys() & {"PodDisruptionBudget"}) == want


def test_who_comes_in_is_named(build: Any) -> None:
    policy = safeguards(rendered(build, SPEC))["NetworkPolicy"]["spec"]
    [rule] = policy["ingress"]
    gateway, operator, prometheus = rule["from"]
    assert gateway == {"podSelector": {"matchLabels": names.component_selector("demo", "gateway")}}
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "headway-operator"}}
    assert prometheus["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    without: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"monitoring": {"enabled": False}}, {}),
        ({}, {"monitoring_namespace": ""}),
    ]
    for change, site in without:
        policy = safeguards(rendered(build, SPEC | change, **site))["NetworkPolicy"]["spec"]
        assert policy["ingress"][0]["from"] == [gateway, operator]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({"model": {"source": "bundled://headway-tiny"}}, None),
        ({"model": {"source": "pvc://claim/llama"}}, None),
        ({"model": {"source": "hf://org/name"}}, [443]),
        ({"model": {"source": "oci://r.example/a:1"}}, [443]),
        ({"model": {"source": "oci://r.example:5000/a:1"}}, [443, 5000]),
        ({"model": {"source": "s3://bucket/a"}}, [None]),
        (
            {"lora": {"adapters": [{"name": "a", "source": "oci://localhost:5000/a"}]}},
            [443, 5000],
        ),
        ({"quality": {"baseline": {"source": "hf://org/name"}}}, [443]),
    ],
    ids=["bundled", "claim", "hub", "registry", "registry's port", "bucket", "adapter", "baseline"],
)
def test_out_goes_what_sources_need(build: Any, spec: dict[str, Any], want: list[int | None] | None) -> None:
    policy = safeguards(rendered(build, SPEC | {"model": {"source": "/a"}} | spec))["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    if want is None:
        assert policy["egress"] == []
        return
    names_, sources = policy["egress"]
    assert {(one["port"], one["protocol"]) for one in names_["ports"]} >= {(53, "UDP"), (53, "TCP")}
    assert [one.get("port") for one in sources["ports"]] == want
    assert {one["protocol"] for one in sources["ports"]} == {"TCP"}


@pytest.mark.parametrize("percentile", [50, 75, 90, 95, 99])
def test_an_alert_is_possible_and_asks_for_more_than_the_budget(percentile: int) -> None:
    shares = [missed_share(percentile, burn) for burn in BURNS]
    assert shares == sorted(shares, reverse=True)
    for share in shares:
        assert (100 - percentile) / 100 < share < 1


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({}, []),
        ({"gateway": {"replicas": 2}}, ["demo-gateway"]),
        ({"gateway": {"replicas": 2}, "disruptionBudget": {"enabled": False}}, []),
    ],
    ids=["one", "two", "no budgets"],
)
def test_several_gateways_are_evicted_one_at_a_time(
    build: Any, spec: dict[str, Any], want: list[str]
) -> None:
    budgets = [
        manifest
        for manifest in rendered(build, SPEC | spec).manifests
        if manifest["kind"] == "PodDisruptionBudget" and manifest["metadata"]["name"] != "demo"
    ]
    assert [one["metadata"]["name"] for one in budgets] == want
    for one in budgets:
        assert one["spec"]["maxUnavailable"] == 1
        selector = names.component_selector("demo", names.GATEWAY_COMPONENT)
        assert one["spec"]["selector"] == {"matchLabels": selector}


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_labels_of_every_monitor_are_the_administrators_then_the_services_own(build: Any, kind: str) -> None:
    told = (("release", "stack-of-all"), ("team", "platform"), (names.SERVICE_LABEL, "another"))
    manifest = safeguards(rendered(build, SPEC, monitoring_labels=told))[kind]
    labels = manifest["metadata"]["labels"]
    assert labels == {"release": "stack", "team": "platform", **names.service_labels("demo")}


def test_alerts_lead_to_their_runbook_where_it_is_published(build: Any) -> None:
    url = "https://docs.example/headway/operations.html"
    rule = safeguards(rendered(build, SPEC, runbook_url=url))["PrometheusRule"]
    alerts = rule["spec"]["groups"][0]["rules"]
    assert {one["annotations"]["runbook_url"] for one in alerts} == {f"{url}#{RUNBOOK_SECTION}"}
    assert f"\n## {RUNBOOK_SECTION.replace('-', ' ').capitalize()}\n" in OPERATIONS.read_text()


@pytest.mark.parametrize("url", ["docs.example", "https://docs.example/#x", "https://docs.example/{{x}}"])
def test_a_runbook_that_is_no_page_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--runtime-image=r", "--gateway-image=g"]
    assert _parser().parse_args([*flags, "--runbook-url=https://docs.example/x?v=$1"]).runbook_url
    with pytest.raises(SystemExit):
        _parser().parse_args([*flags, f"--runbook-url={url}"])
    assert f"{url!r} is not the address of a page" in " ".join(capsys.readouterr().err.split())


def test_a_flag_gives_one_label_and_a_wrong_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--runtime-image=r", "--gateway-image=g", "--monitoring-label=a.b/release=stack"]
    assert _parser().parse_args([*flags, "--monitoring-label=empty="]).monitoring_label == [
        ("a.b/release", "stack"),
        ("empty", ""),
    ]
    with pytest.raises(SystemExit):
        _parser().parse_args([*flags, "--monitoring-label=no value"])
    assert "'no value' is not a label; give KEY=VALUE" in " ".join(capsys.readouterr().err.split())
