"""What the chart has for Prometheus and Grafana: alerts and queries as the real promtool sees them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import CHART, CHECKOUT, Render, of_kind

from headway_operator.cache_metrics import CacheMetrics
from headway_operator.commands.operator import _parser as operator_parser
from headway_operator.manifests.prometheus_rule import prometheus_rule
from headway_operator.names import MONITORING_KINDS
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.spec import parse
from headway_operator.state import Site

RULES = CHART / "rules" / "headway.yaml"
DASHBOARD = CHART / "dashboards" / "headway.json"
RULES_TEST = Path(__file__).parent / "rules_test.yaml"
PROMETHEUS = ("monitoring.coreos.com/v1",)

# The first test to need helm or promtool may have to compile it.
pytestmark = pytest.mark.timeout(960)


def checked(promtool: Path, *arguments: str | Path) -> str:
    answer = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def expressions() -> dict[str, str]:
    """Every query of the dashboard, with its variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "5m")
        .replace("$namespace", "team")
        .replace("$service", "demo")
        for panel in panels
        for target in panel["targets"]
    }


@pytest.mark.parametrize(
    ("settings", "versions", "want"),
    [
        ((), (), 0),
        ((), PROMETHEUS, 1),
        (("monitoring.enabled=true",), (), 1),
        (("monitoring.enabled=false",), PROMETHEUS, 0),
    ],
    ids=["without its kinds", "with its kinds", "wanted", "unwanted"],
)
def test_monitors_are_made_where_the_cluster_has_their_kinds(
    render: Render, settings: tuple[str, ...], versions: tuple[str, ...], want: int
) -> None:
    objects = render(*settings, api_versions=versions)
    assert len(of_kind(objects, "ServiceMonitor")) == len(of_kind(objects, "PrometheusRule")) == want
    rights = [rule for role in of_kind(objects, "ClusterRole") for rule in role.get("rules") or ()]
    may_write = any("podmonitors" in rule["resources"] for rule in rights)
    assert may_write == ("monitoring.enabled=false" not in settings)


def test_the_monitor_finds_the_metrics_of_the_operators_pod(render: Render) -> None:
    objects = render("monitoring.labels.release=stack", api_versions=PROMETHEUS)
    [monitor], [rule] = of_kind(objects, "ServiceMonitor"), of_kind(objects, "PrometheusRule")
    [service], [deployment] = of_kind(objects, "Service"), of_kind(objects, "Deployment")
    assert monitor["metadata"]["labels"]["release"] == rule["metadata"]["labels"]["release"] == "stack"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    [port] = service["spec"]["ports"]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] in {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
    assert endpoint["honorLabels"] is True
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    container = pod["spec"]["containers"][0]
    assert "--monitoring-label=release=stack" in container["args"]


def test_alerts_on_the_operator_look_at_their_own_installation(helm: Path) -> None:
    text = subprocess.check_output(
        [helm, "template", "second", CHART, "--namespace=team-b", "--set=monitoring.enabled=true"],
        text=True,
        timeout=60,
    )
    objects = [document for document in yaml.safe_load_all(text) if document]
    [rule], [monitor] = of_kind(objects, "PrometheusRule"), of_kind(objects, "ServiceMonitor")
    [service] = of_kind(objects, "Service")
    own = f'headway_operator_leading{{namespace="team-b", job="{service["metadata"]["name"]}"}}'
    expressions = [one["expr"] for one in rule["spec"]["groups"][0]["rules"]]
    asked = [one for one in expressions if "headway_operator_leading" in one or "absent(" in one]
    assert asked == [f"absent({own})", f"max by (namespace, job) ({own}) == 0"]
    # The Prometheus operator writes a Service's name as the job, unless the monitor says otherwise.
    assert "jobLabel" not in monitor["spec"]


def test_the_dashboard_lies_where_grafanas_sidecar_looks(render: Render) -> None:
    [config_map] = of_kind(render(), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["headway.json"]) == json.loads(DASHBOARD.read_text())
    assert not of_kind(render("monitoring.dashboard.enabled=false"), "ConfigMap")


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_alerts_are_what_their_unit_tests_say(promtool: Path) -> None:
    checked(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    checked(promtool, "test", "rules", RULES_TEST)


def test_every_alert_is_on_the_operators_page() -> None:
    page = (CHECKOUT / "docs" / "operations.md").read_text()
    section = page.partition("## Alerts on the operator")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(Headway\w+)`", section)) == sorted([*chart_alerts(), "HeadwaySLOBurn"])


def chart_alerts() -> list[str]:
    return [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]


def test_every_alert_has_a_case_in_which_it_comes_and_one_in_which_it_does_not() -> None:
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for scenario in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for case in scenario["alert_rule_test"]
    ]
    assert set(cases) == {(alert, comes) for alert in chart_alerts() for comes in (True, False)}


def test_alerts_lead_to_their_runbook_where_it_is_published(render: Render) -> None:
    url = "https://docs.example/headway/operations.html?v=$1"
    objects = render(f"monitoring.runbookURL={url}", api_versions=PROMETHEUS)
    [rule], [deployment] = of_kind(objects, "PrometheusRule"), of_kind(objects, "Deployment")
    flags = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert operator_parser().parse_args([one for one in flags if one != "operator"]).runbook_url == url
    alerts = rule["spec"]["groups"][0]["rules"]
    assert {one["annotations"].pop("runbook_url") for one in alerts} == {f"{url}#alerts-on-the-operator"}
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    headings = re.findall(r"^#+ (.*)$", (CHECKOUT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert "alerts-on-the-operator" in {heading.lower().replace(" ", "-") for heading in headings}


def test_every_query_of_the_dashboard_is_one(promtool: Path, tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query{index}", "expr": expression}
        for index, expression in enumerate(expressions().values())
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in checked(promtool, "check", "rules", path)


def test_every_series_that_is_asked_for_exists() -> None:
    table = (CHECKOUT / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(headway_\w+)`", table, re.MULTILINE))
    metrics = OperatorMetrics()
    CacheMetrics(metrics)
    known |= {metric.name for metric in metrics.registry.collect()}
    alerts = [rule["expr"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
    asked = set(re.findall(r"\bheadway_\w+", " ".join([*alerts, *expressions().values()])))
    assert len(asked) > 15
    for name in asked:
        assert name in known or re.sub(r"_(total|bucket|count|sum)$", "", name) in known, name


@pytest.mark.parametrize(
    ("percentile", "missed", "want"),
    [
        pytest.param(95, 4, set(), id="within the budget"),
        pytest.param(95, 40, {"warning"}, id="six times as fast"),
        pytest.param(95, 80, {"critical", "warning"}, id="fifteen times as fast"),
        pytest.param(50, 60, set(), id="a wide budget, burnt a little too fast"),
        pytest.param(50, 95, {"critical", "warning"}, id="a wide budget, all missed"),
    ],
)
def test_a_services_own_alerts_follow_its_budget(
    promtool: Path, tmp_path: Path, percentile: int, missed: int, want: set[str]
) -> None:
    """missed: of 100 requests a minute, for seven hours."""
    site = Site("kubernetes", "", "", "", (), 8000, optional_kinds=frozenset(MONITORING_KINDS))
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "team"},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "slo": {"ttftMilliseconds": 300, "percentile": percentile},
        },
    }
    rule = prometheus_rule(parse(manifest), site)
    assert rule is not None
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    labels = 'namespace="team",serving_headway_dev_service="demo",target="ttft"'
    series = f'headway_target_total{{{labels},result="%s"}}'
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series % "missed", "values": f"0+{missed}x420"},
                    {"series": series % "met", "values": f"0+{100 - missed}x420"},
                ],
                "alert_rule_test": [
                    {
                        "eval_time": "7h",
                        "alertname": "HeadwaySLOBurn",
                        "exp_alerts": [
                            alert(one, missed)
                            for one in rule["spec"]["groups"][0]["rules"]
                            if one["labels"]["severity"] in want
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    checked(promtool, "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yaml")
    checked(promtool, "test", "rules", tmp_path / "test.yaml")


def alert(rule: dict[str, Any], missed: int) -> dict[str, Any]:
    """As it is sent, with the measured share in its sentence."""
    shown = rule["annotations"]["description"].replace("{{ $value | humanizePercentage }}", f"{missed}%")
    return {
        "exp_labels": rule["labels"],
        "exp_annotations": {**rule["annotations"], "description": shown},
    }
