"""What each component of the cluster is told: its command line and its configuration file. Starts nothing.

Configuration files are written as JSON where YAML is expected: JSON is YAML, and needs no library.

Traps: under control groups v1 kubelet needs `failCgroupV1: false`, everywhere `cgroupDriver: cgroupfs` as
there may be no systemd; without CAP_SYS_RESOURCE runc dies with "can't get final child's PID from pipe"
unless containerd restricts oom_score_adj; without `--kubelet-preferred-address-types=InternalIP` logs and
exec look the node's name up in DNS; the bridge plugin does not enforce NetworkPolicy; pods' network
namespaces and CNI's address book must lie in the work folder, or a killed cluster leaves them behind.
"""

import json
from pathlib import Path
from typing import Any

from e2e.cluster import certificates
from e2e.cluster.settings import (
    CLUSTER_DOMAIN,
    DNS_IP,
    NODE_IP,
    NODE_NAME,
    POD_RANGE,
    SERVICE_RANGE,
    Settings,
)

PAUSE_IMAGE = "localhost/headway-e2e-pause:1"
ETCD_URL = "http://127.0.0.1:2379"
CONTEXT = "headway-e2e"
# Every call of a service account outside Kubernetes' own namespace, with its answer's status and no bodies.
AUDIT_RULES: list[dict[str, Any]] = [
    {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
    {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
    {"level": "None"},
]


def etcd(settings: Settings) -> list[str]:
    peers = "http://127.0.0.1:2380"
    return [
        "etcd",
        f"--data-dir={settings.work / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={peers}",
    ]


def api_server(settings: Settings) -> list[str]:
    pki = certificates.folder(settings)
    policy = settings.work / "audit-policy.json"
    policy.write_text(
        json.dumps(
            {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "omitStages": ["RequestReceived"],
                "rules": AUDIT_RULES,
            }
        )
    )
    return [
        "kube-apiserver",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={settings.audit_log}",
        f"--etcd-servers={ETCD_URL}",
        f"--advertise-address={NODE_IP}",
        "--secure-port=6443",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki / 'admin.crt'}",
        f"--kubelet-client-key={pki / 'admin.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-admission-plugins=NodeRestriction",
    ]


def controller_manager(settings: Settings) -> list[str]:
    pki = certificates.folder(settings)
    return [
        "kube-controller-manager",
        f"--kubeconfig={settings.kubeconfig}",
        "--leader-elect=false",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--service-account-private-key-file={pki / 'sa.key'}",
        "--use-service-account-credentials",
        "--controllers=*,-nodeipam",
    ]


def scheduler(settings: Settings) -> list[str]:
    return ["kube-scheduler", f"--kubeconfig={settings.kubeconfig}", "--leader-elect=false"]


def containerd(settings: Settings, network_plugins: Path) -> list[str]:
    network = settings.work / "cni"
    network.mkdir(exist_ok=True)
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(settings.work / "cni-addresses"),
    }
    bridge: dict[str, Any] = {"type": "bridge", "bridge": "cni0", "hairpinMode": True}
    bridge |= {"isGateway": True, "ipMasq": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = {"cniVersion": "1.0.0", "name": "bridge", "plugins": [bridge, ports]}
    (network / "10-bridge.conflist").write_text(json.dumps(plugins, indent=1))
    configuration = settings.work / "containerd.toml"
    configuration.write_text(
        f"""version = 3
root = "{settings.work}/containerd/root"
state = "{settings.work}/containerd/state"
[grpc]
  address = "{settings.containerd_socket}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["{network_plugins}"]
  conf_dir = "{network}"
"""
    )
    return ["containerd", "--config", str(configuration)]


def dns(settings: Settings) -> list[str]:
    """DNS runs beside the pods, not in one: the service address is one of the node's own."""
    corefile = settings.work / "Corefile"
    corefile.write_text(
        f".:53 {{\n  bind {DNS_IP}\n  kubernetes {CLUSTER_DOMAIN} {{\n"
        f"    kubeconfig {settings.kubeconfig} {CONTEXT}\n  }}\n}}\n"
    )
    return ["coredns", "-conf", str(corefile)]


def kubelet(settings: Settings) -> list[str]:
    pki = certificates.folder(settings)
    resolver = settings.work / "resolv.conf"
    resolver.write_text(f"nameserver {DNS_IP}\n")
    configuration: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{settings.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(settings.work / "podlogs"),
        # How soon a changed ConfigMap reaches the pods that mount it; a minute unless told.
        "syncFrequency": "10s",
        "resolvConf": str(resolver),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
    }
    path = settings.work / "kubelet.json"
    path.write_text(json.dumps(configuration, indent=1))
    return [
        "kubelet",
        f"--config={path}",
        f"--kubeconfig={settings.work / 'kubelet.kubeconfig'}",
        f"--root-dir={settings.work / 'kubelet'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={NODE_IP}",
    ]


def proxy(settings: Settings) -> list[str]:
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(settings.kubeconfig)},
        "clusterCIDR": POD_RANGE,
        "conntrack": {"maxPerCore": 0},
    }
    path = settings.work / "proxy.json"
    path.write_text(json.dumps(configuration, indent=1))
    return ["kube-proxy", f"--config={path}", f"--hostname-override={NODE_NAME}"]


def node_addresses(prefix_length: int) -> dict[str, str]:
    """The addresses that the node's network needs, each with its interface."""
    return {f"{NODE_IP}/{prefix_length}": "node0", f"{DNS_IP}/32": "lo"}
