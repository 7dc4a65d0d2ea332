"""What a local cluster says of its replicas, and what its gateway is told of them."""

import json
from typing import Any

from headway_operator.cluster.local import LocalCluster
from headway_operator.state import Replica


async def replicas(cluster: LocalCluster, key: Any) -> tuple[Replica, ...]:
    return (await cluster.observe(key)).replicas


def backends(cluster: LocalCluster) -> dict[str, str]:
    table = json.loads(cluster.workspace.backends_file.read_text())
    assert table["version"] == 1
    return {entry["id"]: entry["state"] for entry in table["backends"]}
