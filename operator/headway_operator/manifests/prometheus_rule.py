"""The PrometheusRule: alerts on a service's promises. For clusters that have the kind.

The promise is that a percentile of requests meets its target; the others are the error budget. An alert looks
at the rate at which that budget is burnt in two windows, a long one that says it matters and a short one that
says it still goes on. Method and factors: Google, The Site Reliability Workbook, chapter 5, "Multiwindow,
Multi-Burn-Rate Alerts".

A budget of 5%, as P95 has, cannot be burnt 20 times faster than it should, and one of 50% not even three
times: where a factor asks for more misses than there are requests, the alert asks for nearly all of them.
"""

from dataclasses import dataclass
from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.manifests.pod_monitor import monitoring_labels
from headway_operator.spec import Service
from headway_operator.state import Manifest, Site

KIND = "PrometheusRule"
# As Prometheus writes the label that `pod_monitor` has it take from the pods.
SERVICE_SERIES_LABEL = names.SERVICE_LABEL.translate(str.maketrans("./", "__"))
LATENCY_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "Time of whole answers",
}

# Of docs/operations.md.
RUNBOOK_SECTION = "alerts-on-the-operator"
SHORT_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end"}


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair of windows. most: the largest share of misses that is asked for."""

    severity: str
    factor: float
    long_window: str
    short_window: str
    pending: str
    most: float


BURNS = (
    Burn("critical", 14.4, "1h", "5m", "2m", 0.9),
    Burn("warning", 6.0, "6h", "30m", "15m", 0.75),
)


def prometheus_rule(service: Service, site: Site) -> Manifest | None:
    """NAME, or None without a target, where there is to be none, or where the cluster has no such kind."""
    told, slo = service.spec.monitoring, service.spec.slo
    if not told.enabled or slo is None or KIND not in site.optional_kinds:
        return None
    targets = {
        "ttft": slo.ttft_milliseconds,
        "tpot": slo.tpot_milliseconds,
        "e2e": slo.end_to_end_milliseconds,
    }
    rules = [
        _alert(service, target, milliseconds, burn, _runbook(site))
        for target, milliseconds in targets.items()
        if milliseconds is not None
        for burn in BURNS
    ]
    if not rules:
        return None
    return {
        "apiVersion": names.OPTIONAL_KINDS[KIND],
        "kind": KIND,
        "metadata": metadata(service, names.safeguard(service.name), monitoring_labels(service, site)),
        "spec": {"groups": [{"name": f"headway.{service.key.namespace}.{service.name}", "rules": rules}]},
    }


def missed_share(percentile: int, burn: Burn) -> float:
    """The share of requests that must have missed for the alert."""
    return min(burn.factor * (100 - percentile) / 100, burn.most)


def _runbook(site: Site) -> dict[str, str]:
    return {"runbook_url": f"{site.runbook_url}#{RUNBOOK_SECTION}"} if site.runbook_url else {}


def _alert(
    service: Service, target: str, milliseconds: int, burn: Burn, runbook: dict[str, str]
) -> dict[str, Any]:
    assert service.spec.slo is not None, "alerts are on targets"
    percentile = service.spec.slo.percentile
    share = missed_share(percentile, burn)
    key = service.key
    sentence = (
        f"{LATENCY_NAMES[target]} of {key.namespace}/{key.name}: P{percentile} is promised to be at most "
        f"{milliseconds} ms, so {100 - percentile}% of requests may take longer; over the last "
        f"{burn.long_window} it was {{{{ $value | humanizePercentage }}}}."
    )
    return {
        "alert": "HeadwaySLOBurn",
        "expr": " and ".join(
            f"({_missed(service, target, window)} > {share:.4g})"
            for window in (burn.long_window, burn.short_window)
        ),
        "for": burn.pending,
        "labels": {
            "severity": burn.severity,
            "namespace": key.namespace,
            "inferenceservice": key.name,
            "target": target,
        },
        "annotations": {
            "summary": f"{key.namespace}/{key.name} misses its {SHORT_NAMES[target]} target",
            "description": f"{sentence} `kubectl describe inferenceservice {key.name} --namespace "
            f"{key.namespace}` says why, and what is being done about it.",
            **runbook,
        },
    }


def _missed(service: Service, target: str, window: str) -> str:
    """PromQL: the share of a window's requests that missed the target; no series while there are none."""
    series = f'namespace="{service.key.namespace}",{SERVICE_SERIES_LABEL}="{service.name}",target="{target}"'
    missed = f'sum(rate(headway_target_total{{{series},result="missed"}}[{window}]))'
    return f"{missed} / sum(rate(headway_target_total{{{series}}}[{window}]))"
