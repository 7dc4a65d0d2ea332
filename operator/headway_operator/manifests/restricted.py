"""Whether a pod keeps to the pod security standard "restricted", and has no token for the API.

Who may write an InferenceService need not have the right to make pods: what the operator makes for them gives
them no more of nodes or of the API. A namespace may enforce the standard itself; this holds where none does.
An administrator may switch it off for all services (`--allow-unrestricted-templates`).

It says nothing of what the namespace holds: a pod may mount each of its Secrets, so whoever may write an
InferenceService can read those, an account's token in one of them included. Only the operator's own key is
refused, by `operator_key`.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/ (restricted includes baseline).
Stricter than that: no sysctl at all, no more time to end than the longest drain takes, and nothing that gives
the pod a token for the API or a certificate in its own name, but for the token that a gateway has, which may
list and watch the EndpointSlices of its namespace. Of what a projected volume joins, those kinds that are
known to give neither are allowed, and no later one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headway_operator.manifests.pod import GRACE_MARGIN_SECONDS
from headway_operator.spec.fields import LONGEST_DRAIN_SECONDS

Fault = tuple[str, str]
Fields = Mapping[str, Any]

CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")
HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
VOLUME_SOURCES = frozenset(
    (
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    )
)
PROJECTED_SOURCES = frozenset(("clusterTrustBundle", "configMap", "downwardAPI", "secret"))
ADDABLE_CAPABILITY = "NET_BIND_SERVICE"
CONFINED_TYPES = ("RuntimeDefault", "Localhost")
SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
APPARMOR_VALUES = ("runtime/default", "localhost/")
HOOKS = ("postStart", "preStop")
HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")
# As long as pods have whose spec asks for the longest drain: no template has a node's drain wait for longer.
MAX_GRACE_SECONDS = LONGEST_DRAIN_SECONDS + GRACE_MARGIN_SECONDS


def faults(template: Fields, account: str | None = None) -> list[Fault]:
    """What is not allowed in a pod template, as (path below the template, what to write instead).

    account: the ServiceAccount whose token the pod is to have, and no other's; None: it is to have none.
    """
    pod = template["spec"]
    return [
        *_annotation_faults(template["metadata"]),
        *_account_faults(pod, account),
        *_pod_faults(pod),
        *_volume_faults(pod.get("volumes") or ()),
        *(
            (f"spec.{name}[name={container.get('name')}].{path}", remedy)
            for name in CONTAINER_LISTS
            for container in pod.get(name) or ()
            for path, remedy in _container_faults(container, pod.get("securityContext") or {})
        ),
    ]


def _annotation_faults(metadata: Fields) -> Iterator[Fault]:
    for name, value in (metadata.get("annotations") or {}).items():
        if name.startswith(APPARMOR_ANNOTATION) and not str(value).startswith(APPARMOR_VALUES):
            yield f"metadata.annotations[{name}]", "write runtime/default or localhost/PROFILE"


def _account_faults(pod: Fields, account: str | None) -> Iterator[Fault]:
    if account is None:
        if pod.get("automountServiceAccountToken") is not False:
            yield "spec.automountServiceAccountToken", "leave it false"
        return
    if pod.get("serviceAccountName") != account:
        yield "spec.serviceAccountName", "remove it"
    if "serviceAccount" in pod:  # its name of before
        yield "spec.serviceAccount", "remove it"


def _pod_faults(pod: Fields) -> Iterator[Fault]:
    for name in HOST_NAMESPACES:
        if pod.get(name):
            yield f"spec.{name}", "remove it"
    seconds = pod.get("terminationGracePeriodSeconds") or 0
    if seconds > MAX_GRACE_SECONDS:
        remedy = f"write at most {MAX_GRACE_SECONDS} for {seconds}: the drain of its node waits that long"
        yield "spec.terminationGracePeriodSeconds", remedy
    for path, remedy in _context_faults(pod.get("securityContext") or {}):
        yield f"spec.securityContext.{path}", remedy


def _volume_faults(volumes: Any) -> Iterator[Fault]:
    for volume in volumes:
        where = f"spec.volumes[name={volume.get('name')}]"
        for source in sorted(set(volume) - {"name"} - VOLUME_SOURCES):
            yield f"{where}.{source}", f"use one of {', '.join(sorted(VOLUME_SOURCES))}"
        for projected in (volume.get("projected") or {}).get("sources") or ():
            for source in sorted(set(projected) - PROJECTED_SOURCES):
                remedy = f"use one of {', '.join(sorted(PROJECTED_SOURCES))}"
                yield f"{where}.projected.sources[].{source}", remedy


def _container_faults(container: Fields, pod_context: Fields) -> Iterator[Fault]:
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield "securityContext.privileged", "remove it"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation", "write false"
    if context.get("procMount", "Default") != "Default":
        yield "securityContext.procMount", "remove it"
    for path, remedy in _capability_faults(context.get("capabilities") or {}):
        yield f"securityContext.capabilities.{path}", remedy
    if context.get("runAsNonRoot", pod_context.get("runAsNonRoot")) is not True:
        yield "securityContext.runAsNonRoot", "write true"
    profile = context.get("seccompProfile") or pod_context.get("seccompProfile") or {}
    if profile.get("type") not in CONFINED_TYPES:
        yield "securityContext.seccompProfile.type", f"write {' or '.join(CONFINED_TYPES)}"
    for path, remedy in _context_faults(context):
        yield f"securityContext.{path}", remedy
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"ports[containerPort={port.get('containerPort')}].hostPort", "remove it"
    for name, handler in _handlers(container):
        if any((handler.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield f"{name}.host", "remove it: the pod's own address is asked"


def _capability_faults(capabilities: Fields) -> Iterator[Fault]:
    if "ALL" not in (capabilities.get("drop") or ()):
        yield "drop", "write [ALL]"
    if set(capabilities.get("add") or ()) - {ADDABLE_CAPABILITY}:
        yield "add", f"add {ADDABLE_CAPABILITY} alone"


def _handlers(container: Fields) -> Iterator[tuple[str, Fields]]:
    for name in HANDLERS:
        yield name, container.get(name) or {}
    for name in HOOKS:
        yield f"lifecycle.{name}", (container.get("lifecycle") or {}).get(name) or {}


def _context_faults(context: Fields) -> Iterator[Fault]:
    """Of what the security contexts of pods and of containers have in common."""
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot", "write true"
    if context.get("runAsUser") == 0:
        yield "runAsUser", "write another one than 0"
    if (context.get("seccompProfile") or {}).get("type") == "Unconfined":
        yield "seccompProfile.type", f"write {' or '.join(CONFINED_TYPES)}"
    if (context.get("appArmorProfile") or {}).get("type", CONFINED_TYPES[0]) not in CONFINED_TYPES:
        yield "appArmorProfile.type", f"write {' or '.join(CONFINED_TYPES)}"
    labels = context.get("seLinuxOptions") or {}
    if labels.get("user") or labels.get("role") or labels.get("type", "") not in SELINUX_TYPES:
        yield "seLinuxOptions", "leave user and role out, and choose a type of containers"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "windowsOptions.hostProcess", "remove it"
    if context.get("sysctls"):
        yield "sysctls", "remove them"
