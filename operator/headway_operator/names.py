"""Every name, label and annotation that Headway writes, each built in one place.

Owns the keys of objects too. Knows nothing of what the objects hold.
"""

from dataclasses import dataclass

GROUP = "serving.headway.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
SINGULAR = "inferenceservice"
SHORT_NAME = "hisvc"
CATEGORY = "headway"
FIELD_MANAGER = "headway-operator"
# What is fetched once and shared by services; in the same group and version.
CACHE_KIND = "ModelCache"
CACHE_PLURAL = "modelcaches"
CACHE_SINGULAR = "modelcache"
CACHE_SHORT_NAME = "hmc"

RUNTIME_COMPONENT = "runtime"
# Pods of a replica on several nodes, but for the one that answers requests.
WORKER_COMPONENT = "worker"
GATEWAY_COMPONENT = "gateway"
EVALUATION_COMPONENT = "evaluation"
FETCH_COMPONENT = "fetch"
RUNTIME_CONTAINER = "runtime"
GATEWAY_CONTAINER = "gateway"
HTTP_PORT_NAME = "http"
HTTP_PORT = 8000
SERVICE_PORT = 80

NAME_LABEL = "app.kubernetes.io/name"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SERVICE_LABEL = f"{GROUP}/service"
CACHE_LABEL = f"{GROUP}/model-cache"
COMPONENT_LABEL = f"{GROUP}/component"
REVISION_LABEL = f"{GROUP}/revision"
# Labels that others write: the pods of the chart, every namespace.
OPERATOR_POD_LABELS = {NAME_LABEL: "headway-operator"}
NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
# By which a Deployment tells its ReplicaSets apart, each of which is named after it.
POD_TEMPLATE_HASH_LABEL = "pod-template-hash"
CLAIM = "PersistentVolumeClaim"
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# On the objects of revisions and gateways: what was applied of them.
LAST_APPLIED_ANNOTATION = f"{GROUP}/last-applied"
# On checkpoints: the namespace of their writer's Lease, and the time until which that counts.
OPERATOR_LABEL = f"{GROUP}/operator"
OPERATOR_UNTIL_ANNOTATION = f"{GROUP}/operator-until"

# Kinds that a cluster may lack, with where they are served.
MONITORING_API_VERSION = "monitoring.coreos.com/v1"
MONITORING_KINDS = {"PodMonitor": MONITORING_API_VERSION, "PrometheusRule": MONITORING_API_VERSION}
LEADER_WORKER_SET = "LeaderWorkerSet"
OPTIONAL_KINDS = {**MONITORING_KINDS, LEADER_WORKER_SET: "leaderworkerset.x-k8s.io/v1"}
# What a revision may be: pods one by one, or groups of them.
REVISION_KINDS = ("Deployment", LEADER_WORKER_SET)
# Labels that LeaderWorkerSet puts on each pod of a group.
GROUP_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
# How `headway serve` and `headway fetch` end when a model could not be fetched (docs/contract.md).
EXIT_STATUS_FETCH = 3
EXIT_STATUS_DOES_NOT_FIT = 4

OPERATOR_KEY_SECRET = "headway-admin-key"
PUBLIC_KEY_FILE = "public.pem"
# The longest child name, NAME-HASH-<10 of a ReplicaSet>-<5 of a pod>, must fit into 63 characters.
MAX_NAME_LENGTH = 37
HASH_LENGTH = 8


@dataclass(frozen=True, slots=True, order=True)
class ServiceKey:
    """Names one InferenceService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class CacheKey(ServiceKey):
    """Names one ModelCache; never equal to the service of the same name."""


@dataclass(frozen=True, slots=True, order=True)
class ChildKey:
    """Names one child object within the service's namespace."""

    kind: str
    name: str


def service(name: str) -> str:
    """The Service that clients talk to; it points at the gateway."""
    return name


def replicas_service(name: str) -> str:
    """The headless Service whose EndpointSlices list the runtime pods for the gateway."""
    return f"{name}-replicas"


def gateway(name: str) -> str:
    """The gateway's Deployment, ServiceAccount, Role, RoleBinding and PodDisruptionBudget."""
    return f"{name}-gateway"


def revision(name: str, template_hash: str) -> str:
    """The runtime Deployment, or LeaderWorkerSet, of one revision."""
    return f"{name}-{template_hash}"


def revision_children(revision_name: str) -> frozenset[ChildKey]:
    """The object of this revision, whichever kind it is of."""
    return frozenset(ChildKey(kind, revision_name) for kind in REVISION_KINDS)


def evaluation(name: str, judged_hash: str) -> str:
    """The Job that judges what has this hash; the name of its pod, six characters longer, still fits."""
    return f"{name}-quality-{judged_hash}"


def fetch_job(cache_name: str, fetch_hash: str) -> str:
    """The Job that fetches what has this hash; the name of its pod, six characters longer, still fits."""
    return f"{cache_name}-fetch-{fetch_hash}"


def fetch_policy(cache_name: str) -> str:
    """The NetworkPolicy of a ModelCache's Jobs."""
    return f"{cache_name}-fetch"


def cache_claim(cache_name: str) -> str:
    """The PersistentVolumeClaim that a ModelCache makes."""
    return f"{cache_name}-model-cache"


def admin_config_map(name: str) -> str:
    """The ConfigMap with the operator's public key."""
    return f"{name}-admin"


def memory_config_map(name: str) -> str:
    """The ConfigMap with the controller's checkpoint."""
    return f"{name}-memory"


def safeguard(name: str) -> str:
    """The PodDisruptionBudget, NetworkPolicy, PodMonitor and PrometheusRule of a service."""
    return name


def audience(key: ServiceKey) -> str:
    """The `aud` claim of admin tokens for this service."""
    return f"{key.namespace}/{key.name}"


def service_labels(name: str) -> dict[str, str]:
    """On every child of the service."""
    return {NAME_LABEL: "headway", MANAGED_BY_LABEL: FIELD_MANAGER, SERVICE_LABEL: name}


def component_selector(name: str, component: str) -> dict[str, str]:
    """Selects the pods of one component of one service, whatever their revision."""
    return {SERVICE_LABEL: name, COMPONENT_LABEL: component}


def component_labels(name: str, component: str) -> dict[str, str]:
    """On the objects and pods of one component."""
    return {**service_labels(name), COMPONENT_LABEL: component}


def revision_selector(name: str, template_hash: str) -> dict[str, str]:
    """Selects the pods of one revision."""
    return {**component_selector(name, RUNTIME_COMPONENT), REVISION_LABEL: template_hash}


def cache_labels(cache_name: str) -> dict[str, str]:
    """On every child of a ModelCache."""
    return {NAME_LABEL: "headway", MANAGED_BY_LABEL: FIELD_MANAGER, CACHE_LABEL: cache_name}


def fetch_selector(cache_name: str) -> dict[str, str]:
    """Selects the pods that fetch for a ModelCache."""
    return {CACHE_LABEL: cache_name, COMPONENT_LABEL: FETCH_COMPONENT}


def selector_text(labels: dict[str, str]) -> str:
    """A label selector as one string (`a=b,c=d`), as the scale subresource wants it."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
