"""From what the API server has under a service's labels to what is observed of the service. Pure.

Whose object is whose is decided by owner: what merely carries the labels of a child is none of it. Of a pod
that is a ReplicaSet or a StatefulSet, which nobody reads here: at a thousand services they would be as much
again to keep. It counts where it has the name that the controller of one of our own children gives to it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway_operator.cluster import kubernetes_causes as causes
from headway_operator.cluster import kubernetes_jobs as jobs
from headway_operator.cluster import kubernetes_pods as pods
from headway_operator.names import (
    CACHE_KIND,
    COMPONENT_LABEL,
    GATEWAY_COMPONENT,
    GROUP_INDEX_LABEL,
    GROUP_SET_LABEL,
    KIND,
    LEADER_WORKER_SET,
    POD_TEMPLATE_HASH_LABEL,
    REVISION_KINDS,
    REVISION_LABEL,
    RUNTIME_COMPONENT,
    WORKER_COMPONENT,
)
from headway_operator.state import ChildKey, Observed, Replica, Revision, ServiceKey

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Objects with a service's labels.

    children: by kind. scalers: of its namespace. events: by the uid of their pod.
    """

    children: Mapping[str, Sequence[Json]]
    pods: Sequence[Json]
    scalers: Sequence[Json] = ()
    events: Mapping[str, Sequence[Json]] = field(default_factory=dict)

    def owners(self) -> dict[ChildKey, str]:
        """The uid of the service that owns each child, "" where none does."""
        return {
            ChildKey(kind, item["metadata"]["name"]): owner_uid(item)
            for kind, items in self.children.items()
            for item in items
        }

    def of_service(self, uid: str) -> "Found":
        """Without the pods that no child of the service with this uid has made."""
        made_by = {
            kind: {
                one["metadata"]["uid" if kind == "Job" else "name"]
                for one in self.children.get(kind, ())
                if owner_uid(one) == uid
            }
            for kind in (*REVISION_KINDS, "Job")
        }
        return replace(self, pods=[pod for pod in self.pods if _is_made_by(pod, made_by)])

    def runtime_pods(self) -> list[Json]:
        """Pods of replicas that answer requests, ended ones included."""
        return [pod for pod in self.pods if label_of(pod, COMPONENT_LABEL) == RUNTIME_COMPONENT]

    def workers(self) -> list[Json]:
        """The other pods of replicas that span nodes."""
        return [pod for pod in self.pods if label_of(pod, COMPONENT_LABEL) == WORKER_COMPONENT]

    def engine_pods(self) -> list[Json]:
        """Both."""
        return [*self.runtime_pods(), *self.workers()]

    def other_pods(self) -> list[Json]:
        """Those of gateways and of Jobs that judge."""
        engines = (RUNTIME_COMPONENT, WORKER_COMPONENT)
        return [pod for pod in self.pods if label_of(pod, COMPONENT_LABEL) not in engines]


def observed(key: ServiceKey, uid: str, found: Found) -> Observed:
    """What is observed of the service with this uid. found: with its own pods alone (`of_service`)."""
    own = {
        kind: [
            one
            for one in found.children.get(kind, ())
            if owner_uid(one) == uid and not one["metadata"].get("deletionTimestamp")
        ]
        for kind in REVISION_KINDS
    }
    made = {kind: [one for one in several if not _is_gateway(one)] for kind, several in own.items()}
    deployments = made["Deployment"]
    runtime = found.runtime_pods()
    replicas = [_replica(pod, found) for pod in runtime if pods.is_live(pod)]
    for deployment in deployments:
        num_pods = sum(replica.revision == label_of(deployment, REVISION_LABEL) for replica in replicas)
        if (uncreated := pods.uncreated_replica(deployment, num_pods)) is not None:
            replicas.append(uncreated)
    losses = [loss for loss in map(causes.loss, runtime) if loss is not None]
    return Observed(
        revisions=tuple(_revision(kind, one) for kind, several in made.items() for one in several),
        replicas=tuple(sorted(replicas, key=lambda replica: replica.name)),
        gateway=pods.gateway(
            (pod for pod in found.pods if pods.is_live(pod) and _is_gateway(pod)),
            next((one for one in own["Deployment"] if _is_gateway(one)), None),
            found.events,
        ),
        children=frozenset(child for child, owner in found.owners().items() if owner == uid),
        evaluations=tuple(
            jobs.evaluation(job, found.pods, found.events)
            for job in found.children.get("Job", ())
            if owner_uid(job) == uid and not job["metadata"].get("deletionTimestamp")
        ),
        url=f"http://{key.name}.{key.namespace}.svc",
        other_scaler=_other_scaler(
            key, found.scalers, {one["metadata"]["name"] for several in made.values() for one in several}
        ),
        losses=tuple(sorted(losses, key=lambda loss: (-loss.at, loss.name))),
    )


def _replica(pod: Json, found: Found) -> Replica:
    """A replica; one that spans nodes and is not ready has the cause from a pod that knows one.

    Its server runs in each of its pods, so that each one's restarts are the replica's.
    """
    replica = pods.replica(pod, pods.events_of(pod, found.events))
    group = _group_of(pod)
    if not group[0]:
        return replica
    workers = [one for one in found.workers() if _group_of(one) == group]
    num_restarts = replica.num_restarts + sum(pods.num_restarts(one) for one in workers)
    replica = replace(replica, num_restarts=num_restarts, start=None if num_restarts else replica.start)
    if replica.phase in ("ready", "draining") or replica.reason:
        return replica
    for worker in workers:
        phase, reason, message = pods.judge(worker, pods.events_of(worker, found.events))
        if reason and phase != "draining":
            told = f"{worker['metadata']['name']}: {message or reason}"
            return replace(replica, phase=phase, reason=reason, message=told)
    return replica


def _group_of(pod: Json) -> tuple[str, str]:
    """Which pods are one replica; two empty words of a pod that is one by itself."""
    return label_of(pod, GROUP_SET_LABEL), label_of(pod, GROUP_INDEX_LABEL)


def owner_uid(item: Json) -> str:
    """The uid of the InferenceService or ModelCache that controls the object, or ""."""
    owners = item["metadata"].get("ownerReferences") or ()
    ours = (one for one in owners if one["kind"] in (KIND, CACHE_KIND) and one.get("controller"))
    return next((str(one["uid"]) for one in ours), "")


def _is_made_by(pod: Json, children: Mapping[str, set[str]]) -> bool:
    """children: of the service, their names by kind, and of Jobs their uids.

    A ReplicaSet is DEPLOYMENT-POD_TEMPLATE_HASH. LeaderWorkerSet has the leaders made by a StatefulSet of its
    own name, and the workers of a group by one with the name of their leader, SET-GROUP_INDEX.
    """
    owners = pod["metadata"].get("ownerReferences") or ()
    owner = next((one for one in owners if one.get("controller")), None)
    if owner is None:
        return False
    match owner["kind"]:
        case "ReplicaSet":
            deployment, _, template_hash = owner["name"].rpartition("-")
            is_known = deployment in children["Deployment"]
            return is_known and template_hash == label_of(pod, POD_TEMPLATE_HASH_LABEL)
        case "StatefulSet":
            group_set, group_index = _group_of(pod)
            is_known = group_set in children[LEADER_WORKER_SET]
            return is_known and owner["name"] in (group_set, f"{group_set}-{group_index}")
        case "Job":
            return owner["uid"] in children["Job"]
    return False


def label_of(item: Json, label: str) -> str:
    """The value of a label, or ""."""
    return str((item["metadata"].get("labels") or {}).get(label, ""))


def _is_gateway(item: Json) -> bool:
    return label_of(item, COMPONENT_LABEL) == GATEWAY_COMPONENT


def _revision(kind: str, made: Json) -> Revision:
    metadata = made["metadata"]
    return Revision(
        name=metadata["name"],
        hash=label_of(made, REVISION_LABEL),
        replicas=_replicas(made),
        created_at=causes.seconds_of(metadata["creationTimestamp"]),
        kind=kind,
    )


def _replicas(made: Json) -> int:
    return int(made["spec"].get("replicas", 1))


def _other_scaler(key: ServiceKey, scalers: Iterable[Json], revisions: set[str]) -> str:
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        is_service = target["kind"] == KIND and target["name"] == key.name
        if is_service or (target["kind"] in REVISION_KINDS and target["name"] in revisions):
            return f"HorizontalPodAutoscaler/{scaler['metadata']['name']}"
    return ""
