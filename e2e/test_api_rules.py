"""The rules between fields, held by a real API server while no operator runs: dry runs, nothing is kept."""

from typing import Any

import pytest

from e2e.test_operator_api import _created_dry
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError

Json = dict[str, Any]
TARGET = {"slo": {"ttftMilliseconds": 300}}
OFFICE = {"start": "0 8 * * MON-FRI", "end": "0 18 * * MON-FRI", "minReplicas": 2}


def at_times(*changes: Json, **scaling: Any) -> Json:
    """Autoscaled by a schedule of OFFICE with changes; None leaves a field out."""
    entries = [{**OFFICE, **change} for change in changes]
    schedule = [{name: value for name, value in one.items() if value is not None} for one in entries]
    return {**TARGET, "replicas": None, "scaling": {**scaling, "schedule": schedule}}


CASES = [
    pytest.param(at_times({"timeZone": "Europe/Berlin"}, {"maxReplicas": 9}), None, id="a schedule"),
    pytest.param(at_times({"start": "0 8 * *"}), "schedule.*start", id="no time of cron"),
    pytest.param(at_times({"timeZone": "Mars/Olympus"}), "such as Europe/Berlin", id="no time zone"),
    pytest.param(at_times({"end": OFFICE["start"]}), "must differ", id="no length"),
    pytest.param(at_times({"minReplicas": None}), "set minReplicas, maxReplicas or both", id="no bound"),
    pytest.param(at_times({"maxReplicas": 1}), "lower one or raise the other", id="bounds upside down"),
    pytest.param(at_times({"minReplicas": 5}), "must not exceed scaling.maxReplicas", id="above all"),
    pytest.param(
        at_times({"minReplicas": None, "maxReplicas": 1}, minReplicas=2),
        "must not be less than scaling.minReplicas",
        id="below all",
    ),
]


@pytest.mark.parametrize(("fields", "complaint"), CASES)
async def test_the_api_server_holds_the_rules(
    bare_api: KubernetesApi, fields: Json, complaint: str | None
) -> None:
    spec = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1} | fields
    create = _created_dry(bare_api, {name: value for name, value in spec.items() if value is not None})
    if complaint is None:
        await create
        return
    with pytest.raises(ClusterError, match=complaint):
        await create
