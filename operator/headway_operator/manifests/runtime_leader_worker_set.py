"""The LeaderWorkerSet of one revision whose replicas span several nodes: a group of pods is one replica.

Pod 0 of a group, the leader, is node 0: it has the engine and answers requests, so that it alone is labelled
as a replica. The others, the workers, hold their share of the model. Every pod is the same template, the
user's changes included, and is told by the variables that LeaderWorkerSet gives it which one it is and where
its leader is. If a pod of a group ends, all of them are made anew: a rank that comes back alone could join
nothing. Like the Deployment it states no replicas: those go through the scale subresource alone.

Fields as in https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/.
"""

from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import Service
from headway_operator.state import Manifest

# How a pod learns which one it is; the names are LeaderWorkerSet's.
NODE_RANK, LEADER_ADDRESS = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"


def node_arguments(num_nodes: int) -> list[str]:
    """Flags of `headway serve` in each pod of a group; the same text in all of them."""
    return ["--nnodes", str(num_nodes), "--node-rank", NODE_RANK, "--master-addr", LEADER_ADDRESS]


def runtime_leader_worker_set(service: Service, template: dict[str, Any], template_hash: str) -> Manifest:
    """The LeaderWorkerSet NAME-HASH around a pod template."""
    labels = names.component_labels(service.name, names.RUNTIME_COMPONENT)
    labels[names.REVISION_LABEL] = template_hash
    leader = _labelled(template, {names.REVISION_LABEL: template_hash})
    worker = _labelled(leader, {names.COMPONENT_LABEL: names.WORKER_COMPONENT})
    # Spread is of replicas: a worker belongs near its leader, wherever that is.
    worker["spec"] = {
        key: value for key, value in worker["spec"].items() if key != "topologySpreadConstraints"
    }
    return {
        "apiVersion": names.OPTIONAL_KINDS[names.LEADER_WORKER_SET],
        "kind": names.LEADER_WORKER_SET,
        "metadata": metadata(service, names.revision(service.name, template_hash), labels),
        "spec": {
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": service.spec.nodes_per_replica,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _labelled(template: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    pod_metadata = template["metadata"]
    return {**template, "metadata": {**pod_metadata, "labels": {**pod_metadata["labels"], **labels}}}
