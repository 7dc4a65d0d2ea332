"""What a pod template may not take: the pod security standard "restricted", and a token for the API."""

from typing import Any

import pytest

from headway_operator.errors import SpecError
from headway_operator.manifests.gateway_template import gateway_template
from headway_operator.manifests.restricted import faults
from headway_operator.manifests.runtime_template import runtime_template
from headway_operator.spec import parse

SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def runtime(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "runtime", **fields}])


def context(**fields: Any) -> dict[str, Any]:
    return runtime(securityContext=fields)


def beside(kind: str, **context: Any) -> dict[str, Any]:
    """A further container of that kind."""
    return pod(**{kind: [{"name": "more", "image": "a", "securityContext": {**SAFE, **context}}]})


def asked(kind: str = "httpGet", host: str = "10.0.0.1") -> dict[str, Any]:
    """Whom a probe or a hook asks, with nothing of what ours asks."""
    return {"httpGet": None, kind: {"port": 8000, "host": host}}


def annotated(value: str) -> dict[str, Any]:
    name = "container.apparmor.security.beta.kubernetes.io/runtime"
    return {"metadata": {"annotations": {name: value}}}


def volume(**source: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "v", **source}])


def rendered(build: Any, template: dict[str, Any], **site: Any) -> Any:
    service = parse(build.manifest({"template": template}))
    return runtime_template(service, build.site(**{"allows_unrestricted": False, **site}), "runtime:1")


@pytest.mark.parametrize(
    "template",
    [
        pytest.param({}, id="nothing"),
        pytest.param(pod(nodeSelector={"a": "b"}, runtimeClassName="nvidia"), id="placement"),
        pytest.param(volume(emptyDir={"medium": "Memory"}), id="memory"),
        pytest.param(volume(csi={"driver": "secrets.example"}), id="a driver's volume"),
        pytest.param(
            volume(
                projected={
                    "sources": [
                        {"secret": {"name": "a"}},
                        {"configMap": {"name": "a"}},
                        {"downwardAPI": {"items": []}},
                        {"clusterTrustBundle": {"name": "a", "path": "a"}},
                    ]
                }
            ),
            id="what a projected volume may join",
        ),
        pytest.param(
            context(runAsUser=1000, capabilities={"add": ["NET_BIND_SERVICE"]}), id="a user, a capability"
        ),
        pytest.param(
            pod(containers=[{"name": "sidecar", "image": "a", "securityContext": SAFE}]), id="a sidecar"
        ),
        pytest.param(
            pod(initContainers=[{"name": "init", "image": "a", "securityContext": SAFE}]), id="an init"
        ),
        pytest.param(runtime(resources={"claims": [{"name": "gpu"}]}), id="a claim"),
        *(
            pytest.param(volume(**{source: {"path": "a"}}), id=f"a volume {source}")
            for source in ("downwardAPI", "ephemeral", "persistentVolumeClaim")
        ),
        pytest.param(volume(configMap={"name": "a"}), id="a volume configMap"),
        pytest.param(volume(secret={"secretName": "a"}), id="a volume secret"),
        *(
            pytest.param(context(seLinuxOptions={"type": name, "level": "s0"}), id=f"SELinux {name}")
            for name in ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
        ),
        pytest.param(context(seLinuxOptions={"level": "s0"}), id="a level of SELinux"),
        pytest.param(
            context(appArmorProfile={"type": "Localhost"}, seccompProfile={"type": "Localhost"}),
            id="profiles of the node",
        ),
        pytest.param(annotated("runtime/default"), id="an annotation for AppArmor's default"),
        pytest.param(annotated("localhost/mine"), id="an annotation for an AppArmor profile of the node"),
        pytest.param(context(procMount="Default"), id="/proc as it comes"),
        pytest.param(pod(hostUsers=False), id="users of its own"),
        pytest.param(runtime(livenessProbe=asked(host="")), id="a probe of the pod itself"),
        pytest.param(pod(terminationGracePeriodSeconds=3615), id="as long to end as the longest drain"),
        pytest.param(pod(terminationGracePeriodSeconds=None), id="no time to end said"),
        pytest.param(pod(volumes=None), id="no volumes"),
        pytest.param({"metadata": {"annotations": {"team": "search"}}}, id="another annotation"),
        pytest.param(
            {
                "spec": {
                    "securityContext": {"seccompProfile": None, "runAsNonRoot": None},
                    "containers": [
                        {
                            "name": "runtime",
                            "securityContext": {
                                "seccompProfile": {"type": "RuntimeDefault"},
                                "runAsNonRoot": True,
                            },
                        }
                    ],
                }
            },
            id="what a container says itself",
        ),
        pytest.param(
            {
                "spec": {
                    "securityContext": None,
                    "containers": [
                        {"name": "runtime", "securityContext": {**SAFE, "runAsNonRoot": True}},
                    ],
                }
            },
            id="nothing said of the whole pod",
        ),
    ],
)
def test_what_takes_no_more_than_it_should_is_rendered(build: Any, template: dict[str, Any]) -> None:
    assert faults(rendered(build, template)) == []


CONTAINERS = "spec.containers[name=runtime]"
REFUSED = [
    pytest.param(pod(hostNetwork=True), "spec.hostNetwork", id="the host's network"),
    pytest.param(pod(hostPID=True), "spec.hostPID", id="the host's processes"),
    pytest.param(pod(hostIPC=True), "spec.hostIPC", id="the host's memory"),
    *(
        pytest.param(
            beside(kind, privileged=True),
            f"spec.{kind}[name=more].securityContext.privileged",
            id=f"privileged among {kind}",
        )
        for kind in ("containers", "initContainers", "ephemeralContainers")
    ),
    *(
        pytest.param(runtime(**{probe: asked(kind)}), f"{CONTAINERS}.{probe}.host", id=f"{probe} by {kind}")
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        for kind in ("httpGet", "tcpSocket")
    ),
    *(
        pytest.param(
            runtime(lifecycle={hook: asked(kind)}),
            f"{CONTAINERS}.lifecycle.{hook}.host",
            id=f"{hook} by {kind}",
        )
        for hook in ("postStart", "preStop")
        for kind in ("httpGet", "tcpSocket")
    ),
    *(
        pytest.param(make(**fields), f"{place}.{path}", id=f"{path} of a {kind}: {value}")
        for kind, make, place in (
            ("container", context, f"{CONTAINERS}.securityContext"),
            ("pod", lambda **fields: pod(securityContext=fields), "spec.securityContext"),
        )
        for path, value, fields in (
            ("windowsOptions.hostProcess", "true", {"windowsOptions": {"hostProcess": True}}),
            ("seLinuxOptions", "user", {"seLinuxOptions": {"user": "system_u"}}),
            ("seLinuxOptions", "role", {"seLinuxOptions": {"role": "system_r"}}),
            ("seLinuxOptions", "type", {"seLinuxOptions": {"type": "spc_t"}}),
            ("appArmorProfile.type", "unconfined", {"appArmorProfile": {"type": "Unconfined"}}),
            ("seccompProfile.type", "unconfined", {"seccompProfile": {"type": "Unconfined"}}),
            ("runAsNonRoot", "false", {"runAsNonRoot": False}),
        )
    ),
    pytest.param(
        pod(securityContext={"runAsNonRoot": None}),
        f"{CONTAINERS}.securityContext.runAsNonRoot",
        id="root not ruled out",
    ),
    pytest.param(
        pod(securityContext={"seccompProfile": None}),
        f"{CONTAINERS}.securityContext.seccompProfile.type",
        id="no profile of system calls",
    ),
    pytest.param(volume(hostPath={"path": "/"}), "spec.volumes[name=v].hostPath", id="the host's files"),
    pytest.param(
        volume(nfs={"server": "a", "path": "/"}), "spec.volumes[name=v].nfs", id="a volume in the pod"
    ),
    pytest.param(
        context(allowPrivilegeEscalation=True),
        "spec.containers[name=runtime].securityContext.allowPrivilegeEscalation",
        id="escalation",
    ),
    pytest.param(
        context(capabilities={"add": ["SYS_ADMIN"]}),
        "spec.containers[name=runtime].securityContext.capabilities.add",
        id="a capability",
    ),
    pytest.param(
        context(capabilities={"drop": ["NET_RAW"]}),
        "spec.containers[name=runtime].securityContext.capabilities.drop",
        id="capabilities kept",
    ),
    pytest.param(context(runAsUser=0), "spec.containers[name=runtime].securityContext.runAsUser", id="root"),
    pytest.param(
        pod(securityContext={"runAsUser": 0}), "spec.securityContext.runAsUser", id="root of the whole pod"
    ),
    pytest.param(
        context(procMount="Unmasked"),
        "spec.containers[name=runtime].securityContext.procMount",
        id="all of /proc",
    ),
    pytest.param(
        runtime(ports=[{"containerPort": 8000, "hostPort": 80}]),
        "spec.containers[name=runtime].ports[containerPort=8000].hostPort",
        id="a port of the host",
    ),
    pytest.param(
        pod(containers=[{"name": "sidecar", "image": "a"}]),
        "spec.containers[name=sidecar].securityContext.allowPrivilegeEscalation",
        id="a sidecar as it comes",
    ),
    pytest.param(
        annotated("unconfined"),
        "metadata.annotations[container.apparmor.security.beta.kubernetes.io/runtime]",
        id="unconfined by an annotation",
    ),
]
STRICTER = [
    pytest.param(
        pod(terminationGracePeriodSeconds=3616),
        "spec.terminationGracePeriodSeconds",
        id="more time to end than the longest drain takes",
    ),
    pytest.param(
        pod(automountServiceAccountToken=True), "spec.automountServiceAccountToken", id="a token for the API"
    ),
    pytest.param(
        volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
        "spec.volumes[name=v].projected.sources[].serviceAccountToken",
        id="a token as a file",
    ),
    pytest.param(
        volume(projected={"sources": [{"secret": {"name": "a"}}, {"podCertificate": {"signerName": "a/b"}}]}),
        "spec.volumes[name=v].projected.sources[].podCertificate",
        id="a certificate in the pod's name",
    ),
    pytest.param(
        volume(projected={"sources": [{"ofTomorrow": {}}]}),
        "spec.volumes[name=v].projected.sources[].ofTomorrow",
        id="a projected source that nobody knows yet",
    ),
    pytest.param(
        pod(securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]}),
        "spec.securityContext.sysctls",
        id="a sysctl",
    ),
]


@pytest.mark.parametrize(("template", "path"), [*REFUSED, *STRICTER])
def test_what_takes_more_is_refused_by_name(build: Any, template: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        rendered(build, template)
    assert caught.value.field == f"spec.template.{path}"
    assert caught.value.reason == "TemplateNotAllowed"
    assert "--allow-unrestricted-templates" in str(caught.value)


def test_time_to_end_is_limited_as_the_drain_is(build: Any) -> None:
    """Or the node of a pod could be drained as late as its template says."""
    longest = parse(build.manifest({"drainTimeoutSeconds": 3600}))
    own = runtime_template(longest, build.site(), "runtime:1")["spec"]["terminationGracePeriodSeconds"]
    said = pod(terminationGracePeriodSeconds=own)
    assert rendered(build, said)["spec"]["terminationGracePeriodSeconds"] == own
    with pytest.raises(SpecError, match=f"write at most {own} for 1000000000: the drain of its node"):
        rendered(build, pod(terminationGracePeriodSeconds=1_000_000_000))


@pytest.mark.parametrize("site", [{"allows_unrestricted": True}, {"kind": "local"}])
def test_an_administrator_or_ones_own_machine_allows_it(build: Any, site: dict[str, Any]) -> None:
    assert rendered(build, volume(hostPath={"path": "/"}), **site)


def gateway(build: Any, pod: dict[str, Any], **site: Any) -> Any:
    service = parse(build.manifest({"gateway": {"template": {"spec": pod}}}))
    return gateway_template(service, build.site(**{"allows_unrestricted": False, **site}), "gateway:1")


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"terminationGracePeriodSeconds": 3616}, "spec.terminationGracePeriodSeconds"),
        (
            {"initContainers": [{"name": "init", "image": "a", "securityContext": {"privileged": True}}]},
            "spec.initContainers[name=init].securityContext.privileged",
        ),
        ({"serviceAccountName": "admin"}, "spec.serviceAccountName"),
        ({"serviceAccount": "admin"}, "spec.serviceAccount"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "spec.volumes[name=v].hostPath"),
        (
            {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]},
            "spec.volumes[name=v].projected.sources[].serviceAccountToken",
        ),
        (
            {"containers": [{"name": "gateway", "securityContext": {"privileged": True}}]},
            "spec.containers[name=gateway].securityContext.privileged",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gateways_template_may_take_no_more_and_no_other_account(
    build: Any, pod: dict[str, Any], want: str
) -> None:
    with pytest.raises(SpecError) as caught:
        gateway(build, pod)
    assert (caught.value.field, caught.value.reason) == (
        f"spec.gateway.template.{want}",
        "TemplateNotAllowed",
    )
    assert gateway(build, pod, allows_unrestricted=True)["spec"]["containers"]


def test_a_gateway_keeps_its_own_account_its_container_and_its_arguments(build: Any) -> None:
    sidecar = {"name": "sidecar", "image": "a", "securityContext": SAFE}
    pod = gateway(build, {"containers": [sidecar]})["spec"]
    assert pod["serviceAccountName"] == "demo-gateway"
    assert {one["name"] for one in pod["containers"]} == {"gateway", "sidecar"}
    for change, want in (
        ({"containers": [{"name": "gateway", "$patch": "delete"}]}, "deletes the container `gateway`"),
        ({"containers": [{"name": "gateway", "args": ["serve"]}]}, "the operator writes the arguments"),
    ):
        with pytest.raises(SpecError, match=want):
            gateway(build, change)


@pytest.mark.parametrize("place", ["runtime", "gateway"])
def test_a_container_that_replaces_ours_has_the_operators_arguments(build: Any, place: str) -> None:
    containers = [{"$patch": "replace"}, {"name": place, "image": "a", "securityContext": SAFE}]
    make = gateway if place == "gateway" else lambda build, pod: rendered(build, {"spec": pod})
    [container] = make(build, {"containers": containers})["spec"]["containers"]
    [ours] = make(build, {})["spec"]["containers"]
    assert container["args"] == ours["args"]
    assert container["image"] == "a"
    assert "readinessProbe" not in container
